"""Samples of replicated tensors, taken while a save is staged, so that ranks can tell whether they have the same.

To compare all bytes of all replicas would cost as much as a save. A sample is a run of elements at a place that the
identity of the save decides, so it is the same on all ranks and another one in each save. Their number and size are
bounded: a quarter of a MB on the CPU; on a GPU, where each is an operation of the device, a few small ones, which are
copied behind the header of the slot and digested by the writer. Of a state with more tensors, each save samples others.
A tensor no larger than a sample is compared as a whole, and so are values.

Runs in the trainer.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.paths import Path
from ckpt.planning.replicated_tensors import Kind
from ckpt.planning.state_dict import FlatState
from ckpt.saving.digests import ENTRY, Digests, InSlot, Tolerance, name_key
from ckpt.staging.runs import checksums_of
from ckpt.staging.strided import is_plain, memory_of, some_bytes
from ckpt.storage.documents import canonical_json

Array = np.ndarray[Any, np.dtype[Any]]

_MOST = 128
_SAMPLE_BYTES = 2 << 10
_MOST_ON_DEVICE = 24
_DEVICE_SAMPLE_BYTES = 128
_MOST_VALUES = 512
_MASK = (1 << 64) - 1

SAMPLES_BYTES = _MOST_ON_DEVICE * _DEVICE_SAMPLE_BYTES
"""The room in a slot for samples from a GPU."""


@dataclass(frozen=True)
class Replicas:
    """What other ranks have, too, of a planned state: columns with a row for each of the `paths`.

    `names` and `boxes` are keys of the name, and of where in the tensor this rank's box is. A sample has `counts`
    elements on the CPU, and `device_counts` elsewhere. `values` are the keys of the names of values.
    """

    paths: tuple[Path, ...]
    values: dict[Path, int]
    is_parameter: Array
    names: Array
    boxes: Array
    elements: Array
    counts: Array
    device_counts: Array

    @classmethod
    def of(cls, flat: FlatState, kinds: Mapping[Path, Kind]) -> Replicas:
        """Take the tensors that are not buffers, and are one box here, and the values that are not per rank."""
        paths, rows = [], []
        for path, kind in kinds.items():
            leaf = flat.tensors[path]
            elements, size = leaf.local.numel(), leaf.spec.itemsize
            if kind != "buffer" and len(leaf.boxes) == 1 and elements == leaf.boxes[0][0].elements:
                counts = (min(elements, max(1, most // size)) for most in (_SAMPLE_BYTES, _DEVICE_SAMPLE_BYTES))
                paths.append(path)
                rows.append((kind == "parameter", name_key(path), name_key(leaf.boxes[0][0].offset), elements, *counts))
        columns = np.array(rows, np.uint64).reshape(-1, 6).T.copy()
        values = {path: name_key(path) for path, leaf in flat.values.items() if not leaf.per_rank}
        return cls(tuple(paths), values, columns[0].astype(bool), *columns[1:])

    def sample(
        self,
        flat: FlatState,
        encoded: Mapping[Path, Any],
        save_name: str,
        tolerance: Tolerance,
        slot: tuple[torch.Tensor, int],
        stream: torch.cuda.Stream | None,
    ) -> Digests:
        """Return the samples for one save of this state, with its `encoded` values.

        `slot` is the memory of the slot, and where in it there is room for SAMPLES_BYTES. The copies from a GPU are
        queued on the `stream`.
        """
        seed = int.from_bytes(hashlib.blake2b(save_name.encode(), digest_size=8).digest(), "little")
        order = _mixed(self.names ^ _mixed(self.boxes) ^ np.uint64(seed))
        rows = _first(order, _MOST)
        local = [flat.tensors[self.paths[row]].local for row in rows.tolist()]
        on_cpu = np.fromiter((tensor.is_cpu for tensor in local), bool, len(local))
        chosen = on_cpu | (np.cumsum(~on_cpu) <= _MOST_ON_DEVICE)
        count = np.where(on_cpu, self.counts[rows], self.device_counts[rows])
        first = order[rows] % (self.elements[rows] - count + np.uint64(1))
        entries = np.zeros(len(rows), ENTRY)
        entries["name"] = self.names[rows]
        entries["window"] = _mixed(self.boxes[rows] ^ _mixed(first)) ^ count
        runs = list(zip(local, first.tolist(), count.tolist(), strict=True))
        is_parameter = self.is_parameter[rows]
        here = chosen if stream is None else on_cpu
        entries["digest"][here] = _digests([runs[number] for number in np.flatnonzero(here).tolist()])
        in_slot: list[InSlot] = []
        if stream is not None and not on_cpu.all():
            there = np.flatnonzero(chosen & ~on_cpu).tolist()
            offsets = _queue([runs[number] for number in there], *slot, stream)
            for number, (offset, nbytes) in zip(there, offsets, strict=True):
                name, window, _ = entries[number].tolist()
                in_slot.append(InSlot(bool(is_parameter[number]), name, window, offset, nbytes))
        values = self._of_values(encoded, seed)
        others = entries[here & ~is_parameter].tobytes() + values.tobytes()
        return Digests(tolerance, entries[here & is_parameter].tobytes(), others, tuple(in_slot))

    def _of_values(self, encoded: Mapping[Path, Any], seed: int) -> Array:
        paths = list(self.values)
        if len(paths) > _MOST_VALUES:
            keys = np.fromiter(self.values.values(), np.uint64, len(paths))
            paths = [paths[number] for number in _first(_mixed(keys ^ np.uint64(seed)), _MOST_VALUES).tolist()]
        return np.array([(self.values[path], 0, _digest(encoded[path])) for path in paths], ENTRY)


_Run = tuple[torch.Tensor, int, int]
"""Elements of a tensor, in C order: the first, and how many."""


def _digests(runs: list[_Run]) -> Array:
    """Return the digests of elements on the CPU, or on a device without a stream for copies."""
    addresses, nbytes, kept = [], [], []
    for local, first, count in runs:
        size = local.element_size()
        if local.is_cpu and is_plain(local):  # nearly always
            addresses.append(local.data_ptr() + first * size)
        else:
            kept.append(some_bytes(local, first, count).cpu())
            addresses.append(kept[-1].data_ptr())
        nbytes.append(count * size)
    return checksums_of(np.array(addresses, np.uint64), np.array(nbytes, np.uint64))


def _queue(runs: list[_Run], slot: torch.Tensor, room: int, stream: torch.cuda.Stream) -> list[tuple[int, int]]:
    """Copy elements from a GPU to the slot, from offset `room` on; return offset and bytes of each run there."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    offsets = []
    with torch.cuda.stream(stream):
        for local, _, count in runs:
            memory_of(local).record_stream(stream)  # its memory is not reused before the copy has run
            offsets.append((room, count * local.element_size()))
            room += offsets[-1][1]
        joined = torch.cat([some_bytes(*run) for run in runs])
        slot[offsets[0][0] : room].copy_(joined, non_blocking=True)
    return offsets


def _digest(encoded: Any) -> int:
    is_container = isinstance(encoded, dict | list)
    return zlib.crc32(canonical_json(encoded) if is_container else repr(encoded).encode())


def _first(order: Array, most: int) -> Array:
    """Return the numbers of the `most` lowest, lowest first."""
    chosen = np.argpartition(order, most)[:most] if len(order) > most else np.arange(len(order))
    return chosen[np.argsort(order[chosen], kind="stable")]


def _mixed(numbers: Array) -> Array:
    """Return pseudo-random numbers: the last step of splitmix64 (Steele, Lea and Flood, 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
