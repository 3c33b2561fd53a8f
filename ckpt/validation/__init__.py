"""Validate a published step, for `inspect_ckpt`. Does not import torch.

Quick validation reads only the step's own documents: their checksums are correct, they are consistent, every element of
every tensor is stored exactly once, every file exists with its exact size, and there are no others. Full validation
reads every byte and compares every checksum with the one that its writer recorded, so it also finds a valid file of
another place, step or save.

Nothing outside the step is ever opened: symbolic links are damage, and so are paths that lead out of the step.
"""

from ckpt.validation.checks import Report, validate
from ckpt.validation.step_files import PackFile, Problem, StepFiles, read_document, read_step_files

__all__ = ["PackFile", "Problem", "Report", "StepFiles", "read_document", "read_step_files", "validate"]
