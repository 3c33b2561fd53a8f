"""Copy one published step to another root, bit for bit, under the same save id.

    intent, index ──▶ for each rank: pack files, then its part ──▶ state, root ──▶ publish

A file is read into memory, checked there against the checksums of its chunks and against what its writer has recorded,
and written from there: damaged bytes are never copied. A rank's part is written after its pack files, and the step is
published as a save is; so whatever is killed, no half-copied step is ever visible, and a copy that has all parts is
complete. What an earlier attempt has written is read back and checked, and not written again.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError, SaveAbandonedError, StorageError
from ckpt.loading.consistency import read_index
from ckpt.loading.index import CheckpointIndex, items, sizes
from ckpt.native import crc32c
from ckpt.storage.chunk_codec import READ_BYTES
from ckpt.storage.documents import INTENT, MAX_DOCUMENT_BYTES, decode_document, is_recorded, well_formed
from ckpt.storage.files import storage_errors
from ckpt.storage.interface import Pending, Root
from ckpt.storage.names import INDEX, MANIFEST, NODES, REFERENCES, pack_file, parse_save_name, part_name
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.node_packs import NodeLocalStep
from ckpt.storage.outcomes import Abandoned, Published
from ckpt.storage.parts_watch import PartsWatch
from ckpt.storage.regular_files import DamagedFileError, MissingFileError
from ckpt.storage.step_source import StepSource
from ckpt.validation.step_files import PackChecks, PackFile

PATIENCE_S = 30.0
"""How long a rank may complete nothing, at least, before the process of rank 0 copies its share."""

Array = np.ndarray[Any, np.dtype[Any]]

_THREADS = 4  # each has one file in memory
_PIECE_BYTES = 4 << 20
_LOOK_S = 1.0
_SHOWN = 8
_COORDINATOR = 0
_OF_BEGIN = ("format", "save", "step", "owner", "world_size", "plan", "continues")


class StoppedError(Exception):
    """The process ends."""


class Throttle:
    """Lets at most so many bytes per second pass, as a mean since the last pause. Any thread."""

    def __init__(self, bytes_per_s: float | None, stopping: threading.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._stopping = stopping
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` may be read. StoppedError if the process is to end meanwhile."""
        wait_s = 0.0
        if self._bytes_per_s is not None:
            with self._lock:
                now = time.monotonic()
                wait_s = max(0.0, self._free_at - now)
                self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
        self.pause(wait_s)

    def pause(self, seconds: float) -> None:
        """Wait. StoppedError if the process is to end meanwhile."""
        if self._stopping.wait(seconds):
            raise StoppedError


class StepCopy:
    """One copy of the step in `source` to `mirror`, which is owned with `token`.

    Raises CheckpointCorruptError, naming the file, for damage; StorageError if either root fails; FencedError if a
    later job owns the mirror; CheckpointExistsError if it has another save of this step; SaveAbandonedError if this
    copy was abandoned there.
    """

    def __init__(
        self,
        source: StepSource,
        mirror: Root,
        token: int,
        throttle: Throttle,
        *,
        is_helped: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`is_helped`: the processes of other ranks call `copy_share`.

        If they complete nothing for `patience_s`, and for twice the time that the share of this process has taken, it
        copies theirs, too; of a `NodeLocalStep`, it gives up instead.
        """
        self._source = source
        self._here = source if isinstance(source, NodeLocalStep) else None
        self._is_helped = is_helped
        self._patience_s = patience_s
        self._throttle = throttle
        self._index: CheckpointIndex = read_index(source)
        self._checks = PackChecks(self._index)
        self._own = threading.local()
        self._lock = threading.Lock()
        save = parse_save_name(str(self._index.summary["save"]))
        if save is None:
            raise CheckpointCorruptError(f"{source.path} is of save {self._index.summary['save']!r:.80}, which is none")
        self._pending: Pending = mirror.pending_save(save, token)
        self.resumed = False  # what is in the mirror already is not written again
        self.nbytes = 0

    def run(self, before_commit: Callable[[], None], superseded: Collection[int] = ()) -> None:
        """Copy what is missing, call `before_commit`, which moves steps aside that are `superseded`, and publish."""
        outcome = self._pending.outcome()
        if outcome is None:
            self._begin(superseded)
            summary = self._index.summary
            names = (INDEX, REFERENCES, MANIFEST, NODES)
            first = [name for name in names if name.removesuffix(".json") in summary]
            self._pending.write_documents({name: self._document(name) for name in first})
            if self._here is not None:
                self._copy_nodes(self._here)
            elif self._is_helped and not self.resumed:
                self._copy_ranks_with_helpers()
            else:
                self._copy_ranks(self._ranks)
            self._pending.write_documents({name: self._document(name) for name in ("state.json", "zarr.json")})
            before_commit()
            outcome = self._pending.publish()
        if isinstance(outcome, Abandoned):
            why = outcome.reason
            raise SaveAbandonedError(f"the copy {self._pending.path} was abandoned: {why.kind}: {why.message}")
        assert isinstance(outcome, Published)

    @property
    def has_begun(self) -> bool:
        """Whether the copy has begun, and is not decided, so that others may `copy_share`."""
        return self._pending.has_begun()

    def copy_share(self, rank: int) -> None:
        """Copy the files of one rank, for a copy that has begun. Raises as the class says.

        Of a `NodeLocalStep`, copy all that is on this node, that rank first.
        """
        if self._here is not None:
            self.resumed = True
            self._copy_node(self._here, rank)
        elif rank in self._ranks and not self._pending.has_part(rank):
            self.resumed = True
            self._copy_ranks([rank])

    @property
    def _ranks(self) -> range:
        return range(self._index.world_size)

    def _copy_ranks_with_helpers(self) -> None:
        """Copy the files of rank 0, wait for those of the others, and copy what they do not."""
        begin = time.monotonic()
        self._copy_ranks([0])
        patience_s = max(self._patience_s, 2 * (time.monotonic() - begin))
        watch = PartsWatch(self._pending, self._index.world_size)
        progress, missing = time.monotonic(), len(self._ranks)
        while not watch.look() and time.monotonic() - progress < patience_s:
            if len(watch.missing) < missing:
                progress, missing = time.monotonic(), len(watch.missing)
            self._throttle.pause(_LOOK_S)
        self.resumed = True  # by those that have not completed their shares
        self._copy_ranks(sorted(watch.missing))

    def _copy_nodes(self, here: NodeLocalStep) -> None:
        """Copy what is on this node, and wait for the other nodes. StorageError if they complete nothing."""
        begin = time.monotonic()
        self._copy_node(here, _COORDINATOR)
        watch = PartsWatch(self._pending, self._index.world_size)
        progress, patience_s, missing = time.monotonic(), max(self._patience_s, 2 * (time.monotonic() - begin)), -1
        while not watch.look():
            if len(watch.missing) != missing:
                progress, missing = time.monotonic(), len(watch.missing)
            elif time.monotonic() - progress >= patience_s:
                # A process that is stopped, or hangs, may have a lock and keep it.
                stuck = sorted(watch.missing)
                left = [rank for rank in stuck if not self._copy_if_here(here, rank, heeds_lock=False)]
                if left:
                    raise StorageError(
                        f"the files of ranks {left[:_SHOWN]}{' and others' if len(left) > _SHOWN else ''} are not in "
                        "the mirror: their nodes are busy, or were replaced"
                    )
            self._throttle.pause(min(_LOOK_S, patience_s))

    def _copy_node(self, here: NodeLocalStep, first: int) -> None:
        """Copy the files of all ranks that have some on this node; each rank is copied by one process of the node."""
        ranks = {first, *here.ranks_here} & set(self._ranks)
        for rank in sorted(ranks, key=lambda rank: (rank != first, rank)):
            self._copy_if_here(here, rank)

    def _copy_if_here(self, here: NodeLocalStep, rank: int, *, heeds_lock: bool = True) -> bool:
        """Copy the files of a rank that are on this node. False if they are not here.

        Does nothing if another process has the lock, unless that is not heeded: two that copy write the same bytes.
        """
        lock = NodeLock(f"copy of rank {rank} from {here.node_path} to {self._pending.path}")
        if self._pending.has_part(rank) or (not lock.take() and heeds_lock):
            return True
        try:
            _, _, packs = self._share(rank)
            is_here = all(here.can_read(pack.name) for pack in packs)
            if is_here and not self._pending.has_part(rank):
                self._copy_ranks([rank])
            return is_here
        finally:
            lock.release()

    def _begin(self, superseded: Collection[int]) -> None:
        intent = self._document(INTENT)
        document = decode_document(intent, os.path.join(self._source.path, INTENT))
        if any(self._index.summary.get(name) != value for name, value in document.items()):
            raise CheckpointCorruptError(f"{self._source.path}/{INTENT} is damaged: it belongs to another save")
        if self._pending.intent() is None:
            lineage = {name: value for name, value in document.items() if name not in _OF_BEGIN}
            world_size, plan, continues = (document[name] for name in ("world_size", "plan", "continues"))
            self._pending.begin(world_size, plan, continues, superseded, lineage=lineage)
        else:
            self.resumed = True
        if self._pending.read_document(INTENT) != intent:
            raise StorageError(f"{self._pending.path}/{INTENT} differs from that of the step: it is of another version")

    def _document(self, name: str) -> bytes:
        """Return a document, checked. `read_index` has checked the root itself."""
        where = os.path.join(self._source.path, name)
        try:
            with storage_errors("read", where):
                data = self._source.read(name, MAX_DOCUMENT_BYTES)
        except DamagedFileError as damage:
            raise CheckpointCorruptError(f"{where} {damage}") from None
        expected = self._index.summary.get(name.removesuffix(".json"))
        if isinstance(expected, dict) and not is_recorded(data, expected):
            raise CheckpointCorruptError(f"{where} is damaged: it is not the one that belongs to this step")
        self._throttle.take(len(data))
        return data

    def _copy_ranks(self, ranks: Iterable[int]) -> None:
        """Copy the files of ranks, many ranks at once as each may have one file only."""
        with ThreadPoolExecutor(_THREADS, "ckpt-mirror") as pool:
            for batch in self._batches(ranks):
                parts = {name: data for name, data, _ in batch}
                for _ in pool.map(self._copy_pack, [pack for _, _, packs in batch for pack in packs]):
                    pass
                for _ in pool.map(lambda part: self._pending.write_file(part[0], memoryview(part[1])), parts.items()):
                    pass

    def _batches(self, ranks: Iterable[int]) -> Iterator[list[tuple[str, bytes, list[PackFile]]]]:
        """Yield lists of parts: name, content, pack files. Each list has a few times as many files as threads."""
        batch: list[tuple[str, bytes, list[PackFile]]] = []
        for rank in ranks:
            batch.append(self._share(rank))
            if sum(len(packs) for _, _, packs in batch) >= 4 * _THREADS:
                yield batch
                batch = []
        if batch:
            yield batch

    def _share(self, rank: int) -> tuple[str, bytes, list[PackFile]]:
        """Return the part of a rank: its name, its content, the pack files that it lists."""
        name = part_name(rank)
        where = os.path.join(self._source.path, name)
        data = self._document(name)
        if crc32c(data) != self._index.summary["parts"][rank]:
            raise CheckpointCorruptError(f"{where} is damaged: it is not the one that belongs to this step")
        with well_formed(where):
            listed = [sizes(entry) for entry in items(decode_document(data, where)["files"])]
            packs = [PackFile(pack_file(rank, number), rank, number, size, crc) for number, size, crc in listed]
        return name, data, packs

    def _copy_pack(self, pack: PackFile) -> None:
        assert pack.nbytes is not None
        if self.resumed and self._is_there(pack):
            return
        data = self._read(pack.name, pack.nbytes)
        problems = self._checks.check_file(pack, _InMemory(data), len(data), self._buffer)
        if problems:
            problem = problems[0]
            where = os.path.join(self._source.path, pack.name)
            what = "" if problem.tensor is None else f" (tensor {problem.tensor})"
            raise CheckpointCorruptError(f"{where} is damaged: it {problem.message}{what}", rank=pack.rank)
        self._pending.write_file(pack.name, data)
        with self._lock:
            self.nbytes += pack.nbytes

    def _is_there(self, pack: PackFile) -> bool:
        """Return whether the mirror has a file already, whole and with the right checksums."""
        assert pack.nbytes is not None
        where = os.path.join(self._pending.path, pack.name)
        try:
            with storage_errors("read", where):
                file = self._pending.source.open(pack.name)
                try:
                    if file.size != pack.nbytes:
                        return False
                    self._throttle.take(pack.nbytes)
                    return not self._checks.check_file(pack, file, pack.nbytes, self._buffer)
                finally:
                    file.close()
        except DamagedFileError:
            return False

    def _read(self, name: str, nbytes: int) -> memoryview:
        where = os.path.join(self._source.path, name)
        at = 0
        try:
            with storage_errors("read", where):
                file = self._source.open(name)
                try:
                    if file.size != nbytes:
                        raise DamagedFileError(f"has {file.size} bytes instead of {nbytes}")
                    memory: Array = np.empty(nbytes, np.uint8)
                    while at < nbytes:
                        piece = memory[at : at + _PIECE_BYTES].data
                        self._throttle.take(len(piece))
                        count = file.read_into(piece, at)
                        if not count:
                            raise DamagedFileError(f"ends at offset {at}")
                        at += count
                finally:
                    file.close()
        except MissingFileError as damage:
            raise CheckpointCorruptError(f"{where} {damage}") from None
        except DamagedFileError as damage:
            raise CheckpointCorruptError(f"{where} is damaged: it {damage}") from None
        return memory.data

    @property
    def _buffer(self) -> memoryview:
        """Memory of this thread for a check."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, READ_BYTES))
        buffer: memoryview = self._own.buffer
        return buffer


class _InMemory:
    """A file that was read as a whole; see `ckpt.validation.step_files.Readable`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read(self, offset: int, nbytes: int) -> memoryview:
        return self._data[offset : offset + nbytes]

    def read_into(self, memory: memoryview, offset: int) -> int:
        data = self._data[offset : offset + len(memory)]
        memory[: len(data)] = data
        return len(data)
