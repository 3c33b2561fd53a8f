"""Is a published step whole? What `inspect_ckpt` tells people, and what they may trust `restore` to find. Free of
torch.

Quick validation reads the step's own documents only: each is sealed, all agree, every element of every tensor is stored
exactly once, every file is there in its exact size, and no other. Full validation reads every byte and compares every
checksum with the one its writer recorded, so a chunk that is valid in itself but belongs elsewhere is found, too.

Nothing outside the step is ever opened: symbolic links are damage, and so is a document that names a place elsewhere.
"""

from ckpt.validation.checks import Report, validate
from ckpt.validation.step_files import ChunkFile, Problem, StepFiles, read_document, read_step_files

__all__ = ["ChunkFile", "Problem", "Report", "StepFiles", "read_document", "read_step_files", "validate"]
