"""Publish a step: check the parts of all ranks against each other, write the documents of the whole, commit.

Runs in the coordinator's writer at the end of a save, in a trainer that publishes in its place after a fault, and in
the process that recovers what an earlier start left. Needs only what is in the directory.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointExistsError
from ckpt.native import crc32c
from ckpt.paths import Path
from ckpt.saving.digests import Warn, check_replicas
from ckpt.saving.for_readers import DatabaseOfParts
from ckpt.storage.array_metadata import root_document
from ckpt.storage.documents import decode_document, encode_document, encode_root, well_formed
from ckpt.storage.interface import Pending
from ckpt.storage.names import INDEX, part_name
from ckpt.storage.outcomes import Abandoned, Published
from ckpt.storage.pack_index import PackIndex

_OF_INTENT = ("format", "save", "step", "owner", "continues", "restart", "metrics", "versions", "world_size", "plan")
_WHERE_KNOWN = ("mirror", "pace", "run")

_READERS, _READ_AHEAD = 16, 512

PartFile = tuple[dict[str, Any], int]
"""A part manifest, and the checksum of its file."""


def publish(
    pending: Pending,
    tick: Callable[[], None],
    written: Mapping[int, PartFile] | None = None,
    *,
    warn: Warn = lambda names, mixed: None,
    before_commit: Callable[[], None] = lambda: None,
) -> Published | Abandoned:
    """Publish a save of which every part is there; return what was decided, by this or by another process.

    The parts of the ranks in `written` need not be read: the caller has just written them. Several processes may do
    this at once: they write the same documents, and one renames the directory.

    Raises CheckpointCorruptError when the parts do not make up a step, CheckpointExistsError when the step is published
    by another save, StateError when parameters of ranks differ, and what `PendingSave.publish` raises. `tick` is
    called between steps, to show progress; `warn` is called with what else differs; `before_commit` is called
    when everything is durable.
    """
    intent = pending.intent()
    if intent is None:
        outcome = pending.decided()
        if outcome is None:
            raise CheckpointCorruptError(f"{pending.path} has lost its intent.json; was it changed by hand?")
        return outcome
    documents = {name: pending.read_document(f"{name}.json") for name in ("index", "references")}
    # Closed here, not by the garbage collector: that may run while this thread holds the lock of `threading` that the
    # end of a thread needs, and waits for the threads of the pool.
    database = DatabaseOfParts(documents["index"], intent["world_size"], pending.read_document)
    with contextlib.closing(_all_parts(pending, intent["world_size"], written or {})) as parts:
        documents = merged(pending.path, intent, documents, parts, tick, warn, database=database)
    tick()
    pending.write_documents(documents)
    tick()
    before_commit()
    try:
        return pending.publish()
    except CheckpointExistsError:
        # An earlier owner that was about to remove this step of its branch may have put it back since `before_commit`.
        before_commit()
        return pending.publish()


def merged(
    path: str,
    intent: Mapping[str, Any],
    documents: Mapping[str, bytes],
    parts: Iterable[PartFile],
    tick: Callable[[], None] = lambda: None,
    warn: Warn = lambda names, mixed: None,
    *,
    packs: PackIndex | None = None,
    database: DatabaseOfParts | None = None,
) -> dict[str, bytes]:
    """Return the files of a step that its index and the parts of all ranks determine, by name.

    These are the root, the state document, and the `database` where it is not there already.

    `path` says where it is, in messages, and `documents` are what the root vouches for, such as the index, which is
    `packs` if the caller has read it. Raises what `publish` raises for parts that do not make up a step.
    """
    try:
        index = _Index.of(packs) if packs is not None else _read_index(documents["index"], intent["world_size"])
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{path}/{error}") from error
    expected = dict(index.files)
    state: dict[str, Any] = {"values": [], "aliases": [], "containers": []}
    replicas: list[dict[str, str]] = []
    summary: dict[str, Any] = {key: intent[key] for key in _OF_INTENT}
    summary |= {key: intent[key] for key in _WHERE_KNOWN if key in intent}
    summary |= {name: {"bytes": len(data), "crc32c": crc32c(data)} for name, data in documents.items()}
    summary |= {"bytes": 0, "files": 0, "tensors": len(index.paths), "parts": []}
    for rank, (part, part_checksum) in enumerate(parts):
        where = os.path.join(path, part_name(rank))
        identity = {key: intent[key] for key in ("save", "plan", "world_size")} | {"rank": rank}
        if any(part.get(key) != value for key, value in identity.items()):
            raise CheckpointCorruptError(f"{where} belongs to another save or plan")
        with well_formed(where):
            for number, nbytes, _ in part["files"]:
                wanted = expected.pop((rank, number), None)
                if wanted is None or (wanted != nbytes and not index.compressed):
                    raise CheckpointCorruptError(f"{where} has file {number} of {nbytes} bytes, the index {wanted}")
                summary["bytes"] += nbytes
                summary["files"] += 1
            for kind in state:
                state[kind] += part[kind]
            replicas.append(part.get("replicas", {}))
            if database is not None:
                database.take(rank, part)
        summary["parts"].append(part_checksum)
        tick()
    for rank, number in expected:
        where = os.path.join(path, part_name(rank))
        raise CheckpointCorruptError(f"{where} does not list file {number} of the index")
    check_replicas(replicas, lambda: (*index.paths, *(tuple(name) for name, _, _ in state["values"])), warn)
    state_bytes = encode_document(state)
    summary["state"] = {"bytes": len(state_bytes), "crc32c": crc32c(state_bytes)}
    if database is not None:
        summary |= database.summary(path)
    made = {} if database is None else database.made
    return {**made, "state.json": state_bytes, "zarr.json": encode_root(root_document(summary))}


@dataclass(frozen=True, slots=True)
class _Index:
    """What a commit needs of an index: the names of its arrays, and the size of each file by rank and number."""

    paths: tuple[Path, ...]
    files: dict[tuple[int, int], int]
    compressed: bool

    @classmethod
    def of(cls, packs: PackIndex) -> _Index:
        return cls(tuple(array.path for array in packs.arrays), packs.files(), packs.compressed)


# All saves of a structure have the same index, and reading that of 10,000 tensors takes longer than writing them.
@functools.lru_cache(maxsize=2)
def _read_index(data: bytes, world_size: int) -> _Index:
    """Return what the bytes of an index say, after checking them. Raises CheckpointCorruptError."""
    with well_formed(INDEX):
        return _Index.of(PackIndex.from_document(decode_document(data, INDEX), world_size))


def _all_parts(pending: Pending, world_size: int, known: Mapping[int, PartFile]) -> Generator[PartFile]:
    """Yield the parts of all ranks, in order, of which a few hundred at most are in memory.

    Several are read at once, as each waits for a network file system.
    """
    with ThreadPoolExecutor(min(_READERS, world_size), "ckpt-parts") as pool:
        for first in range(0, world_size, _READ_AHEAD):
            ranks = range(first, min(first + _READ_AHEAD, world_size))
            yield from pool.map(lambda rank: known[rank] if rank in known else pending.read_part(rank), ranks)
