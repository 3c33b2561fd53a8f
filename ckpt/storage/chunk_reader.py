"""Read boxes of arrays from the packs of a step straight into memory, and name the damaged chunk if that fails.

    boxes ─▶ chunks ─▶ records (`direct_reads`) ─▶ sorted by file and place ─▶ jobs of some MB ─▶ runs ─▶ threads
                    └▶ compressed chunks (`compressed_reads`) ──────────────▶ jobs

Where a chunk lies is computed, so a read opens only the files that have something of it. A run is a part of a file,
jobs that follow each other: one thread reads it from its beginning to its end. Any process; free of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointTimeoutError, StorageError
from ckpt.native import CHECKSUM_BYTES, SEGMENT
from ckpt.paths import display
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_codec import corrupt, verify_chunk
from ckpt.storage.chunk_layout import indices
from ckpt.storage.compressed_reads import read_compressed
from ckpt.storage.direct_reads import NO_WHOLE_READS, Records, WholeReads, address_of, records_of_box
from ckpt.storage.files import storage_errors
from ckpt.storage.names import pack_file
from ckpt.storage.pack_index import ChunkPlace, PackIndex, StoredArray
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_source import OpenFile, StepSource, step_source

Array = np.ndarray[Any, np.dtype[Any]]
_Index = tuple[int, ...]

_NEAR_BYTES = 4096
_NO_RECORDS: Records = np.zeros((0, 1 + len(SEGMENT.names or ())), np.int64)
_RUNS_OF_THREAD = 4  # so that all threads end at about the same time


@dataclass(frozen=True, slots=True)
class ArrayRead:
    """A request to read the box at `offset` of an array into `destination`; `name` is that of the tensor, for errors.

    `destination` has the shape of the box (followed by the trailing dimension of a raw dtype), the stored dtype, and
    any strides.
    """

    name: str
    array: StoredArray
    offset: tuple[int, ...]
    destination: Array

    def check(self) -> None:
        """Raise ValueError unless `destination` can hold a box that is inside the array."""
        meta, destination = self.array.meta, self.destination
        same = destination.shape == meta.shape and destination.dtype is meta.stored.numpy_dtype
        if same and self.offset == (0,) * len(meta.shape):
            return
        shape = destination.shape[: len(meta.shape)]
        if destination.shape != (*shape, *meta.stored.trailing) or destination.dtype != meta.stored.numpy_dtype:
            raise ValueError(
                f"{self.name}: {destination.dtype}{destination.shape} cannot hold a box of {meta.dtype}{meta.shape}"
            )
        if not len(self.offset) == len(shape) == len(meta.shape) or any(
            o < 0 or o + n > size for o, n, size in zip(self.offset, shape, meta.shape, strict=True)
        ):
            raise ValueError(f"{self.name}: box {self.offset} + {shape} is not inside {meta.shape}")


class ChunkReader:
    """Reads arrays of a published step, the source or directory `step`, with `threads` threads."""

    def __init__(
        self, step: str | StepSource, packs: PackIndex, *, threads: int = 8, timeout_s: float = 1800.0
    ) -> None:
        self._source = step_source(step)
        self._step = self._source.path
        self._packs = packs
        self._timeout_s = timeout_s
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "ckpt-read")  # its threads end when it is garbage-collected
        self.bytes_done = 0
        """Bytes of files whose reads have ended so far; any thread may look."""

    def read(self, reads: Sequence[ArrayRead], whole: WholeReads = NO_WHOLE_READS) -> None:
        """Fill every destination. No read is pending when this returns or raises.

        The destinations must not overlap. After an error their elements are undefined. Raises CheckpointCorruptError,
        naming tensor, chunk and file, if bytes are missing or damaged; StorageError if the files cannot be read;
        CheckpointTimeoutError after the time limit.
        """
        plan = _Plan(self._step, self._packs)
        for read in reads:
            read.check()
            plan.add(read)
        plan.add_whole(whole)
        piece_bytes = self._source.piece_bytes
        jobs = [*_direct_jobs(plan.records(), plan.files, piece_bytes), *_decode_jobs(plan.chunks, piece_bytes)]
        if not jobs:
            return
        try:
            self._run(jobs)
        except _JobError as failed:
            self._raise(failed, reads, whole)
        plan.compare_shards(self._source)

    def files(self, name: str, array: StoredArray, offset: tuple[int, ...], shape: tuple[int, ...]) -> set[str]:
        """Return the files that have something of a box of an array. Raises as `read` does."""
        places = (_place(self._step, self._packs, name, array, index) for index in _chunks(array.meta, offset, shape))
        return {place.file for place in places}

    def check_files(self, name: str, array: StoredArray, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Check that the files with a box of an array are large enough, without reading them. Raises as `read` does."""
        for index in _chunks(array.meta, offset, shape):
            place = _place(self._step, self._packs, name, array, index)
            try:
                with storage_errors("read", os.path.join(self._step, place.file)):
                    file = self._source.open(place.file)
                    try:
                        nbytes = file.size
                    finally:
                        file.close()
                if nbytes < place.offset + place.nbytes:
                    raise DamagedFileError(f"ends at offset {nbytes}")
            except DamagedFileError as damage:
                raise corrupt(self._step, place, index, name, damage) from None

    def _run(self, jobs: list[_Job]) -> None:
        stopped: list[bool] = []  # has an item when the other jobs need not be done
        pending: set[Future[None]] = set()
        try:
            for run in _runs(jobs, _RUNS_OF_THREAD * self._threads):
                pending.add(self._pool.submit(self._read_run, run, stopped))
            done, pending = wait(pending, self._timeout_s, FIRST_EXCEPTION)
            failed = [error for error in (future.exception() for future in done) if error is not None]
            if failed:
                raise failed[0]
            if pending:
                raise CheckpointTimeoutError(f"{self._step}: not read in {self._timeout_s} s; is the store overloaded?")
        finally:
            stopped.append(True)
            wait(pending, self._timeout_s)

    def _read_run(self, run: list[_Job], stopped: list[bool]) -> None:
        """Read one run, in a thread of the pool, with a descriptor of its own: the kernel reads ahead for each."""
        job = run[0]
        try:
            if stopped:
                return
            with contextlib.closing(self._source.open(job.file)) as opened:
                for job in run:
                    if stopped:
                        return
                    if not job.run(opened):
                        raise DamagedFileError("does not match its checksums")
                    self.bytes_done += job.end - job.start  # a sum may get lost to another thread: for progress only
        except Exception as error:
            raise _JobError(job, error) from error

    def _raise(self, failed: _JobError, reads: Iterable[ArrayRead], whole: WholeReads) -> None:
        """Raise the error for a job that failed: that of the damaged chunk, if there is one."""
        job, error = failed.job, failed.error
        wanted: list[tuple[str, StoredArray, _Index, _Index]]
        wanted = [(one.name, one.array, one.offset, one.destination.shape[: len(one.offset)]) for one in reads]
        arrays = [self._packs.arrays[number] for number in whole.numbers.tolist()]
        wanted += [(display(each.path), each, (0,) * len(each.meta.shape), each.meta.shape) for each in arrays]
        for name, array, offset, shape in wanted:
            for index in _chunks(array.meta, offset, shape):
                place = _place(self._step, self._packs, name, array, index)
                if place.file == job.file and place.offset < job.end and job.start < place.offset + place.nbytes:
                    verify_chunk(self._source, place, array.meta, index, name)
        if isinstance(error, MemoryError | CheckpointError):
            raise error
        path = os.path.join(self._step, job.file)
        if isinstance(error, DamagedFileError):
            raise CheckpointCorruptError(
                f"{path} {error}, but is correct when it is read again; is something writing to it, or the memory bad?"
            ) from error
        raise StorageError(
            f"cannot read {path}: {error} (no damaged chunk was found: try again, and check the store)"
        ) from error


class _Plan:
    """What a read needs of the files: records of uncompressed chunks, and compressed chunks."""

    def __init__(self, step: str, packs: PackIndex) -> None:
        self._step = step
        self._packs = packs
        self._numbers: dict[tuple[int, int], int] = {}
        self._boxes: list[Records] = []  # and for each the number of the file, where the chunk begins, and the memory
        self._places: list[tuple[int, int, int]] = []
        self._whole: list[Records] = []
        self._shards: dict[tuple[int, _Index], _Shard] = {}
        self._indices = np.empty(0, np.uint8)
        self.chunks: list[_CompressedChunk] = []

    @property
    def files(self) -> list[str]:
        """The files, by the numbers that they have in the records."""
        return [pack_file(rank, number) for rank, number in self._numbers]

    def add(self, read: ArrayRead) -> None:
        """Add what a request needs."""
        array, meta, destination = read.array, read.array.meta, read.destination
        for index in _chunks(meta, read.offset, destination.shape[: len(read.offset)]):
            if meta.compression is not None:
                place = _place(self._step, self._packs, read.name, array, index)
                self.chunks.append(_CompressedChunk(place, index, read))
                continue
            rank, number, base = self._packs.start(array, index)
            file = self._numbers.setdefault((rank, number), len(self._numbers))
            self._boxes.append(records_of_box(meta, index, read.offset, destination.shape, destination.strides))
            self._places.append((file, base, address_of(destination)))
            key = array.number, index
            if meta.sharded and key not in self._shards and key not in self._packs.compared:
                place = ChunkPlace(pack_file(rank, number), base, meta.encoded_bytes(index))
                self._shards[key] = _Shard(read.name, meta, index, place, file)

    def add_whole(self, reads: WholeReads) -> None:
        """Add requests for whole arrays, all at once."""
        count = len(reads.numbers)
        if not count:
            return
        region, offset, nbytes = self._packs.array_places[:, reads.numbers]
        ranks, numbers, starts = self._packs.first_copies
        files = np.zeros(len(starts), np.int64)
        for each in np.flatnonzero(np.bincount(region, minlength=len(starts))).tolist():
            files[each] = self._numbers.setdefault((int(ranks[each]), int(numbers[each])), len(self._numbers))
        table = np.zeros((count, 1 + len(SEGMENT.names or ())), np.int64)
        table[:, 0] = files[region]
        table[:, 1] = starts[region] + offset
        table[:, 2] = table[:, 5] = nbytes - CHECKSUM_BYTES
        table[:, 4] = reads.addresses
        table[:, 6] = 1
        self._whole.append(table)

    def records(self) -> Records:
        """Return the records of all uncompressed chunks, and of the indices of shards that are to be compared."""
        shards = self._shards.values()
        sizes = [each.found_bytes for each in shards]
        self._indices = np.empty(sum(sizes), np.uint8)
        ends = np.cumsum(sizes, dtype=np.int64) + address_of(self._indices)
        of_shards = [each.record(to) for each, to in zip(shards, (ends - sizes).tolist(), strict=True)]
        boxes = np.concatenate([_NO_RECORDS, *self._boxes])
        counts = np.array([len(each) for each in self._boxes], np.int64)
        file, base, to = np.repeat(np.array(self._places, np.int64).reshape(-1, 3), counts, axis=0).T
        boxes[:, 0], boxes[:, 1] = file, base
        boxes[:, 4] += to
        return np.concatenate([boxes, np.array(of_shards, np.int64).reshape(-1, boxes.shape[1]), *self._whole])

    def compare_shards(self, source: StepSource) -> None:
        """Raise CheckpointCorruptError if an index that was read is another one than the shapes give."""
        found, at = self._indices.tobytes(), 0
        for key, shard in self._shards.items():
            shard.check(source, found[at : at + shard.found_bytes])
            at += shard.found_bytes
            self._packs.compared.add(key)


def _chunks(meta: ArrayMeta, offset: _Index, shape: _Index) -> Iterable[_Index]:
    """Return the chunks that have something of a box."""
    if 0 in shape:
        return ()
    if meta.chunk_shape == meta.shape:
        return ((0,) * len(shape),)
    boxes = zip(offset, shape, meta.chunk_shape, strict=True)
    return indices([range(o // c, -(-(o + n) // c)) for o, n, c in boxes])


def _place(step: str, packs: PackIndex, name: str, array: StoredArray, index: _Index) -> ChunkPlace:
    try:
        return packs.place(array, index)
    except KeyError:
        raise CheckpointCorruptError(
            f"{step}: tensor {name}, chunk {index}: no part says where it is; restore from another step or copy"
        ) from None


@dataclass(frozen=True, slots=True)
class _Shard:
    """The index of a shard of which inner chunks are read. It is read with them, and compared.

    The places of inner chunks are computed from the shapes that the step records. The index says how many there are:
    without it, wrong shapes with correct checksums would give other elements than the step has.
    """

    name: str
    meta: ArrayMeta
    index: _Index
    place: ChunkPlace
    file: int

    @property
    def found_bytes(self) -> int:
        """The size of the index without its checksum."""
        return self.meta.index_bytes - CHECKSUM_BYTES

    def record(self, address: int) -> tuple[int, ...]:
        """Return the record that reads the index to an address."""
        nbytes = self.found_bytes
        base = self.place.offset + self.place.nbytes - self.meta.index_bytes
        return (self.file, base, nbytes, 0, address, nbytes, 1, 0, 0)

    def check(self, source: StepSource, found: bytes) -> None:
        """Raise CheckpointCorruptError if the index that was read is another one than the shapes give."""
        if found != self.meta.layout(self.index).index[:-CHECKSUM_BYTES]:
            verify_chunk(source, self.place, self.meta, self.index, self.name)


class _JobError(Exception):
    def __init__(self, job: _Job, error: Exception) -> None:
        super().__init__(str(error))
        self.job = job
        self.error = error


@dataclass(frozen=True, slots=True)
class _Job:
    """A part of a read: bytes `start` to `end` of a file. `run` reads them, and returns whether they are whole."""

    file: str
    start: int
    end: int
    run: Callable[[OpenFile], bool]


def _direct_jobs(records: Records, files: Sequence[str], piece_bytes: int) -> Iterator[_Job]:
    """Divide records into jobs, such that no block is read twice unless two requests need it."""
    left = records
    while len(left):
        file, base, block, at, _, nbytes, rows, step, _ = left.T
        last = at + (rows - 1) * step + nbytes - 1
        pitch = block + CHECKSUM_BYTES
        first_block, end_block = base + at // block * pitch, base + (last // block + 1) * pitch
        first_byte, end_byte = first_block + at % block, base + last // block * pitch + last % block + 1
        order = np.lexsort((first_byte, file))
        file = file[order]
        begins = np.concatenate([[True], file[1:] != file[:-1]])  # a file
        own = _in_order(begins, first_byte[order], end_byte[order])
        order, file = order[own], file[own]
        yield from _jobs(left[order], files, file, first_block[order], end_block[order], piece_bytes)
        keep = np.ones(len(left), bool)
        keep[order] = False
        left = left[keep]


def _in_order(begins: Array, first: Array, end: Array) -> Array:
    """Return which of these ranges, sorted by file and first byte, do not overlap with one before.

    `begins` says which are the first of a file.
    """
    own = begins.copy()
    starts = np.flatnonzero(begins).tolist()
    for low, high in zip(starts, [*starts[1:], len(begins)], strict=True):
        own[low + 1 : high] = first[low + 1 : high] >= np.maximum.accumulate(end[low:high])[:-1]
    return own


def _jobs(
    table: Array, files: Sequence[str], file: Array, first: Array, end: Array, piece_bytes: int
) -> Iterator[_Job]:
    """Cut sorted records where enough bytes are together, and nowhere in a block."""
    nbytes = table[:, 5] * table[:, 6]
    share = (np.cumsum(nbytes) - nbytes) // piece_bytes
    apart = (share[1:] != share[:-1]) & (first[1:] >= end[:-1])
    cuts = np.flatnonzero(apart | (file[1:] != file[:-1])) + 1
    segments = np.ascontiguousarray(table[:, 1:]).view(SEGMENT).reshape(-1)
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(table)], strict=True):
        part = segments[low:high]
        yield _Job(
            files[int(file[low])],
            int(first[low]),
            int(end[low:high].max()),
            lambda opened, part=part: opened.read_checked(part),  # type: ignore[misc]
        )


@dataclass(frozen=True, slots=True)
class _CompressedChunk:
    place: ChunkPlace
    index: _Index
    read: ArrayRead


def _decode_jobs(chunks: list[_CompressedChunk], piece_bytes: int) -> Iterator[_Job]:
    """Group compressed chunks that lie near each other; those of some MB are jobs of their own."""
    group: list[_CompressedChunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.place):
        if group:
            start, before = group[0].place, group[-1].place
            far = chunk.place.offset > before.offset + before.nbytes + _NEAR_BYTES
            large = chunk.place.offset + chunk.place.nbytes - start.offset > piece_bytes
            if far or large or chunk.place.file != start.file:
                yield _decode_job(group)
                group = []
        group.append(chunk)
    if group:
        yield _decode_job(group)


def _decode_job(chunks: list[_CompressedChunk]) -> _Job:
    start = chunks[0].place.offset
    end = max(chunk.place.offset + chunk.place.nbytes for chunk in chunks)

    def run(opened: OpenFile) -> bool:
        together = opened.read(start, end - start) if len(chunks) > 1 else None
        for chunk in chunks:
            place = chunk.place

            def read(offset: int, size: int, at: int = place.offset) -> bytes | memoryview:
                if together is None:
                    return opened.read(at + offset, size)
                return memoryview(together)[at + offset - start :][:size]

            meta = chunk.read.array.meta
            read_compressed(meta, chunk.index, place.nbytes, read, chunk.read.offset, chunk.read.destination)
        return True

    return _Job(chunks[0].place.file, start, end, run)


def _runs(jobs: Iterable[_Job], count: int) -> Iterator[list[_Job]]:
    """Group jobs that follow each other in a file into runs of about the same size, at least `count` if possible."""
    of_file = [list(group) for _, group in itertools.groupby(jobs, lambda job: job.file)]
    sizes = [max(1, sum(job.end - job.start for job in group)) for group in of_file]
    total = sum(sizes)
    for group, nbytes in zip(of_file, sizes, strict=True):
        parts, done = -(-nbytes * count // total), 0
        runs: dict[int, list[_Job]] = {}
        for job in group:
            runs.setdefault(done * parts // nbytes, []).append(job)
            done += job.end - job.start
        yield from runs.values()
