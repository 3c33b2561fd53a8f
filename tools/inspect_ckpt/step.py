"""A step that is read: found at a path that a user typed, protected from removal, and read in blocks."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from ckpt.exporting.selection import matching
from ckpt.loading.consistency import all_tensors, read_index
from ckpt.loading.index import CheckpointIndex, StoredTensor, checked_summary, read_vouched
from ckpt.native import crc32c
from ckpt.paths import display
from ckpt.planning.boxes import Box
from ckpt.storage.chunk_layout import indices
from ckpt.storage.documents import decode_document, decode_root, well_formed
from ckpt.storage.dtypes import stored
from ckpt.storage.interface import Root
from ckpt.storage.names import INDEX, parse_save_name, part_name
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.roots import is_object_url, open_root
from ckpt.storage.step_reader import hold_directory
from ckpt.storage.step_source import LocalStep, StepSource, step_source
from ckpt.validation import read_document

from .output import CannotReadError, NotPublishedError
from .root import any_root, check_directory, check_root, looks_like_step, refuse_other_format, steps_of

_BLOCK_BYTES = 16 << 20
_MAX_SECONDS = 1e10
_TIMES = ("begin", "wait_s", "stage_s", "stall_s", "write_begin", "write_s", "sync_s")


@dataclass(frozen=True)
class Step:
    """A step by the names that users type: keys joined by "/", with ``@rank<r>`` for what belongs to one rank.

    `tensors` contains aliases, too; `aliases` maps each to the name of its original.
    """

    path: str
    index: CheckpointIndex
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]
    aliases: dict[str, str]

    def select(self, patterns: Sequence[str]) -> list[str]:
        """Return the names of the tensors that any of `patterns` equals or matches (`*`, `?`, `[...]`).

        ConversionError for a pattern that matches nothing.
        """
        return matching(self.tensors, patterns, self.path)


@contextmanager
def open_step(path: str) -> Iterator[Step]:
    """Open the step at `path`, or the newest of the root at `path`, and protect it from removal.

    Raises what `step_path` and `read_index` raise.
    """
    if is_object_url(path):
        with held_objects(path) as source:
            yield _step(source)
        return
    where = step_path(path)
    with protected(where, None if where == path else path):
        yield _step(LocalStep(where))


@contextmanager
def held_objects(url: str, step: int | None = None) -> Iterator[StepSource]:
    """Hold a step in an object store: `url` is its place, or a root, then the newest one or `step`. See `protected`.

    NotPublishedError if there is none.
    """
    root = open_root(url)
    steps = root.steps() if step is None else [step]
    try:
        with root.hold_step(steps[-1], lease=True, renewing=True) if steps else root.hold_itself() as held:
            try:
                yield held.source
            except CheckpointError:
                held.check()  # a step that was removed is not damaged
                raise
    except CheckpointNotFoundError as error:
        raise NotPublishedError(str(error)) from error


@contextmanager
def held(root: Root, step: int) -> Iterator[StepSource]:
    """Hold a published step of a root, in a directory (see `protected`) or an object store (see `held_objects`)."""
    if isinstance(root, CheckpointRoot):
        path = root.step_path(step)
        with protected(path):
            yield LocalStep(path)
    else:
        with held_objects(root.path, step) as source:
            yield source


@contextmanager
def protected(path: str, root: str | None = None) -> Iterator[None]:
    """Keep the retention of a running job from removing the step at `path`, as far as leases and locks reach.

    CannotReadError if it was removed all the same: what was read may be of another step then.
    """
    try:
        with hold_directory(path, root, renewing=True) as reader:
            try:
                yield
            except (CheckpointError, OSError):
                reader.check()  # a step that was removed is not damaged
                raise
            reader.check()
    except CheckpointNotFoundError as error:
        raise CannotReadError(str(error)) from error


def _step(source: StepSource) -> Step:
    index = read_index(source)
    tensors = dict(all_tensors(index))
    aliases = {}
    for alias, target in index.aliases.items():
        if target in index.tensors:
            aliases[display(alias)] = display(target)
        for rank in index.per_rank_tensors.get(target, {}):
            aliases[f"{display(alias)}@rank{rank}"] = f"{display(target)}@rank{rank}"
    tensors |= {alias: tensors[target] for alias, target in aliases.items()}
    values = {display(name): value for name, value in index.values.items()}
    for name, own in index.per_rank_values.items():
        values |= {f"{display(name)}@rank{rank}": value for rank, value in own.items()}
    return Step(source.path, index, dict(sorted(tensors.items())), dict(sorted(values.items())), aliases)


# -- the path of a step ------------------------------------------------------------------------------------------------


def step_path(path: str) -> str:
    """Return the directory of the step that `path` means: itself, or the newest published step of a root.

    Raises NotPublishedError, CannotReadError.
    """
    check_directory(path)
    _check_published(path)
    if os.path.lexists(os.path.join(path, "zarr.json")):
        _check_zarr_of_step(path)
        return path
    root = CheckpointRoot(path)
    steps = steps_of(root)
    if steps:
        return root.step_path(steps[-1])
    if looks_like_step(path):
        refuse_other_format(path)
        return path  # its zarr.json is missing: the caller reports it
    check_root(path)
    raise NotPublishedError(f"{path} has no published step, only saves that are pending or abandoned")


def add_step(parser: argparse.ArgumentParser, *, option: bool = False, repeated: bool = False) -> None:
    """Add the argument STEP, or the option --step, that names a step of the root PATH."""
    about = "the number of a step of the root"
    if option:
        parser.add_argument("--step", type=number_of_step, metavar="N", help=f"{about} (default: the newest)")
    else:
        parser.add_argument("step", type=number_of_step, metavar="STEP", nargs="*" if repeated else "?", help=about)


def at_step(path: str, step: int | str | None) -> str:
    """Return the place of a published step of the root `path`; `path` itself if `step` is None.

    CannotReadError if `path` is no root or `step` no number, NotPublishedError if there is no such step.
    """
    if step is None:
        return path
    root = any_root(path)
    steps = steps_of(root)
    try:
        number = number_of_step(str(step))
    except argparse.ArgumentTypeError as error:
        raise CannotReadError(f"{error}: give ROOT STEP STEP, or two paths") from None
    if number not in steps:
        there = f"it has {', '.join(map(str, steps[-5:]))}" + (", and older ones" if len(steps) > 5 else "")
        raise NotPublishedError(f"{path} has no published step {number}; {there if steps else 'it has none'}")
    return root.source_of(number).path


def number_of_step(text: str) -> int:
    """Parse the number of a step. argparse.ArgumentTypeError if it is none."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a step")
    return number


def step_number(path: str) -> int:
    """Return the number of the step in the directory `path` of a checkpoint root."""
    return int(os.path.basename(path).removeprefix("step_"))


def _check_published(path: str) -> None:
    parent, name = os.path.split(os.path.abspath(path))
    if parse_save_name(name) is None:
        return
    if os.path.basename(parent) in (".superseded", ".damaged"):
        return
    if os.path.basename(parent) == ".abandoned":
        raise NotPublishedError(f"{path} is a save that was abandoned: it can never be published")
    raise NotPublishedError(f"{path} is a pending save: it is not published")


def _check_zarr_of_step(path: str) -> None:
    """CannotReadError if the zarr.json in `path` is that of another Zarr group.

    Where the other files look like a step, a zarr.json that cannot be understood is damage instead.
    """
    if looks_like_step(path):
        return
    try:
        summary_of(path)
    except CheckpointCorruptError:
        refuse_other_format(path)
        raise CannotReadError(f"{path} is not a checkpoint: its zarr.json is not one of a step") from None
    except (CheckpointError, OSError):
        return  # the caller reads it again, and reports it


# -- documents of a step, without the index ----------------------------------------------------------------------------


def summary_of(step: str | StepSource) -> dict[str, Any]:
    """Read the summary in the root document of a step. CheckpointCorruptError, StorageError."""
    source = step_source(step)
    where = os.path.join(source.path, "zarr.json")
    with well_formed(where):
        return checked_summary(_root_document(source)["attributes"]["ckpt"], where)


def overview_of(step: str | StepSource) -> tuple[dict[str, Any], int]:
    """Read the summary in the root document, and count the tensors without checking their metadata.

    CheckpointCorruptError, StorageError.
    """
    source = step_source(step)
    summary = summary_of(source)
    with well_formed(os.path.join(source.path, INDEX)):
        arrays = read_vouched(source, INDEX, summary["index"])["arrays"]
        names = {(json.dumps(array["path"]), array.get("rank")) for array in arrays}
    return summary, len(names)


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Times of one rank. `begin` and `write_begin` are seconds since 1970, the others durations in seconds.

    The trainer waits for `stall_s`, which contains `wait_s` for a free slot and `stage_s` to copy. The writer writes
    for `write_s`, and makes what it wrote durable for `sync_s`.
    """

    begin: float
    wait_s: float
    stage_s: float
    stall_s: float
    write_begin: float
    write_s: float
    sync_s: float

    @property
    def written(self) -> float:
        """When the part was durable."""
        return self.write_begin + self.write_s + self.sync_s


@dataclass(frozen=True)
class SaveTimes:
    """Times of one save in seconds: of each duration the largest over all ranks; `begin` is seconds since 1970.

    `queue_s`: from the end of the stall to the start of writing. `commit_s`: from the last part to the root document;
    None where the change times of the files do not tell, because they were copied. `rate` is bytes per second of
    writing and sync.
    """

    step: int
    begin: float
    ranks: int
    bytes: int
    wait_s: float
    stage_s: float
    stall_s: float
    queue_s: float
    write_s: float
    sync_s: float
    commit_s: float | None
    rate: float


def part_times(step: str | StepSource, summary: Mapping[str, Any], most: int | None = None) -> list[PartTimes]:
    """Read the times of all ranks, or of `most` ranks, evenly spaced.

    CheckpointCorruptError if a part is not the one that the root document names.
    """
    parts = summary["parts"]
    return [_part_times(step_source(step), rank, parts[rank]) for rank in evenly(len(parts), most or len(parts))]


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers from 0 to `count`, evenly spaced, among them the first."""
    return list(range(count)) if count <= most else [number * count // most for number in range(most)]


def _part_times(source: StepSource, rank: int, checksum: int) -> PartTimes:
    name = part_name(rank)
    data, path = read_document(source, name), source.path
    if crc32c(data) != checksum:
        raise CheckpointCorruptError(f"{os.path.join(path, name)} is not the one that belongs to this step")
    part = decode_document(data, os.path.join(path, name))
    with well_formed(os.path.join(path, name)):
        times = {name: float(part["times"].get(name, 0.0)) for name in _TIMES}
        if not all(abs(each) < _MAX_SECONDS for each in times.values()):
            raise ValueError("a time is not possible")
    return PartTimes(**times)


def _root_document(step: str | StepSource) -> dict[str, Any]:
    source = step_source(step)
    return decode_root(read_document(source, "zarr.json"), os.path.join(source.path, "zarr.json"))


# -- tensors in blocks -------------------------------------------------------------------------------------------------


def block_boxes(tensor: StoredTensor, block_bytes: int = _BLOCK_BYTES) -> Iterator[Box]:
    """Cut a tensor into boxes of whole chunks (inner ones, where there are) and at most `block_bytes`.

    A single chunk larger than that is a box of its own: it cannot be read in parts.
    """
    itemsize = stored(tensor.dtype).itemsize
    for array in tensor.boxes:
        shape = array.meta.shape
        if 0 in shape:
            continue
        chunk = array.meta.inner_chunk_shape or array.meta.chunk_shape
        block = _enlarged(chunk, shape, block_bytes // itemsize)
        for start in indices([range(0, size, step) for size, step in zip(shape, block, strict=True)]):
            part = tuple(min(step, size - at) for step, size, at in zip(block, shape, start, strict=True))
            yield Box(tuple(a + b for a, b in zip(start, array.box_offset, strict=True)), part)


def _enlarged(chunk: tuple[int, ...], shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """Multiply `chunk` by whole numbers, last dimension first, up to `elements` in all and no further than `shape`."""
    block = list(chunk)
    for dim in reversed(range(len(block))):
        others = math.prod(block) // block[dim]
        most = max(1, elements // (others * chunk[dim]))
        block[dim] = chunk[dim] * min(most, -(-shape[dim] // chunk[dim]))
    return tuple(block)
