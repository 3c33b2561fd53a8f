"""Link the files of a pack that hold the same as in the step before, instead of writing them.

    checksums of the file as in the newest step?              no   ─▶ written
    name or digest of its bytes as in the newest step?        no, or none was made then   ─▶ written
    its file there the one that this process has written?     no   ─▶ written
    link(2)                                                   fails   ─▶ written

So a file that changes costs a comparison of checksums, and one that does not is linked from the third save on. The
checksums alone prove nothing: they have 32 bits. The digest does (see `ckpt.native.digest`). A file from the memory of
a CPU has a name for its bytes from the trainer (see `ckpt.staging.held_runs`): then these are compared, and the writer
reads none of the bytes. What is known of files is in the memory of the writer process: after its death everything is
written anew.

A linked file is whole in both steps, whichever is removed first, but it is one copy of the bytes: if the device loses
it, both steps are damaged. Therefore it is written again after `_MOST_STEPS` steps. Nothing writes to a file that has
several names: see `ckpt.storage.files.take`.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpt.errors import StorageError
from ckpt.native import DIGEST_KEY_BYTES, digest
from ckpt.storage.files import FileIdentity
from ckpt.storage.interface import Root
from ckpt.storage.pack_writers import FileJob, PackWriter, WrittenFile

_MOST_STEPS = 128
_SPREAD = 37  # so that the files of a rank are not all written again in the same save
_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class _StepFile:
    """A file of the newest step. `sample` differs if its content does, mostly; `digest` always, if there is one.

    The name of the content, if it has one, is the digest; then there is no sample. The file has been linked `links`
    times. Without `identity` it cannot be.
    """

    written: WrittenFile
    sample: bytes | None
    digest: bytes | None
    links: int
    identity: FileIdentity | None = None


class UnchangedFiles:
    """The files of one rank in the newest step that this process has written. For one save at a time."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(DIGEST_KEY_BYTES)
        self._plan: str | None = None
        self._folder = ""
        self._published: dict[int, _StepFile] = {}
        self._written: dict[int, _StepFile] = {}

    def begin(self, plan: str | None) -> None:
        """Begin a save of the plan with this digest; files of another plan hold other things. None: link no files."""
        if plan != self._plan:
            self._plan, self._published = plan, {}
        self._written = {}

    def write(self, writer: PackWriter, job: FileJob) -> WrittenFile:
        """Link or write one file. `StorageError` as `PackWriter.write`. Any thread."""
        if self._plan is None:
            return writer.write(job)
        content = job.content if job.checksummed.all() else None  # a link would leave the others without
        sample, made, links = None if content else _sample(job), content, job.number * _SPREAD % _MOST_STEPS
        before = self._published.get(job.number)
        if before is not None and before.sample == sample:
            made = content or digest(job.memory, self._key)
            if made == before.digest and before.identity is not None:
                links = before.links + 1
                if links <= _MOST_STEPS and writer.link(job.number, self._folder, before.identity):
                    written = replace(before.written, is_linked=True)
                    self._written[job.number] = replace(before, written=written, links=links)
                    return written
                links = 0
        written = writer.write(job)
        self._written[job.number] = _StepFile(written, sample, made, links)
        return written

    def synced(self, writer: PackWriter) -> None:
        """Note which the files are: all are written, and durable."""
        for number, file in self._written.items():
            if not file.written.is_linked:
                with contextlib.suppress(StorageError):  # then it is written again
                    self._written[number] = replace(file, identity=writer.identity(number))

    def published(self, root: Root, step: int) -> None:
        """Let the next save link the files of this one, which was published as a step."""
        if self._written:
            self._folder = root.source_of(step).path
        self._published, self._written = self._written, {}


def _sample(job: FileJob) -> bytes:
    """Return all checksums of a file; of chunks to compress, which have none yet, the first bytes of each."""
    if not job.to_compress:
        return job.checksums()
    memory: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(job.memory, np.uint8)
    count = min(_SAMPLE_BYTES, int(job.sizes.min()))
    return memory[job.starts[:, np.newaxis] + np.arange(count)].tobytes()
