"""Samples of replicated tensors, taken while a save is staged, so that ranks can tell whether they have the same.

To look at all bytes of all replicas would cost as much as a save. A sample is a run of elements at a place that the
identity of the save decides, so it is the same on all ranks and another one in each save. Their number and size are
bounded: half a MB on the CPU; on a GPU, where each is an operation of the device, a few small ones, which are copied
behind the page header of the slot and digested by the writer. A tensor that is no larger than a sample, and every
value, is compared as a whole.

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
from ckpt.planning.replicas import Kind
from ckpt.planning.state_dict import FlatState
from ckpt.saving.replicas import ENTRY, Digests, InSlot, Tolerance, name_key
from ckpt.staging.runs import checksums_of
from ckpt.staging.strided import is_plain, memory_of, some_bytes
from ckpt.storage.documents import canonical

__all__ = ["SAMPLES_BYTES", "Replicas"]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST = 256
_SAMPLE_BYTES = 2 << 10
_MOST_ON_DEVICE = 24
_DEVICE_SAMPLE_BYTES = 128
_MOST_VALUES = 512
_MASK = (1 << 64) - 1

SAMPLES_BYTES = _MOST_ON_DEVICE * _DEVICE_SAMPLE_BYTES
"""The room in a slot for samples from a GPU."""


@dataclass(frozen=True)
class Replicas:
    """What of a planned state other ranks have, too. `names`, `boxes` and `elements` are columns, one row for each of
    the `paths`; `values` are the keys of the names of values."""

    paths: tuple[Path, ...]
    is_parameter: tuple[bool, ...]
    names: Array
    boxes: Array
    elements: tuple[int, ...]
    values: dict[Path, int]

    @classmethod
    def of(cls, flat: FlatState, kinds: Mapping[Path, Kind]) -> Replicas:
        """Those tensors that are not buffers, and are one box here; and the values that are not per rank."""
        rows = []
        for path, kind in kinds.items():
            leaf = flat.tensors[path]
            if kind != "buffer" and len(leaf.boxes) == 1 and leaf.local.numel() == leaf.boxes[0][0].elements:
                offset = leaf.boxes[0][0].offset
                rows.append((path, kind == "parameter", name_key(path), name_key(offset), leaf.local.numel()))
        paths, is_parameter, names, boxes, elements = zip(*rows, strict=True) if rows else ((),) * 5
        values = {path: name_key(path) for path, leaf in flat.values.items() if not leaf.per_rank}
        return cls(paths, is_parameter, np.array(names, np.uint64), np.array(boxes, np.uint64), elements, values)

    def sample(
        self,
        flat: FlatState,
        encoded: Mapping[Path, Any],
        save_name: str,
        tolerance: Tolerance,
        slot: tuple[torch.Tensor, int],
        stream: torch.cuda.Stream | None,
    ) -> Digests:
        """The samples for one save of this state, with its `encoded` values.

        `slot` is the memory of the slot, and where in it there is room for SAMPLES_BYTES. The copies from a GPU are
        queued on the `stream`.
        """
        seed = int.from_bytes(hashlib.blake2b(save_name.encode(), digest_size=8).digest(), "little")
        order = _mixed(self.names ^ _mixed(self.boxes) ^ np.uint64(seed))
        taken = _Taken(slot[1])
        for number in _first(order, _MOST).tolist():
            leaf = flat.tensors[self.paths[number]]
            most = _SAMPLE_BYTES if leaf.local.is_cpu else _DEVICE_SAMPLE_BYTES
            elements = self.elements[number]
            count = min(elements, max(1, most // leaf.spec.itemsize))
            first = int(order[number]) % (elements - count + 1)
            window = (int(self.boxes[number]) + first * 0x9E3779B97F4A7C15 + count) & _MASK
            key = self.is_parameter[number], int(self.names[number]), window
            taken.add(key, leaf.local, first, count, stream)
        taken.queue(slot[0], stream)
        parameters, others = taken.entries()
        others += self._of_values(encoded, seed)
        in_slot = tuple(taken.in_slot)
        return Digests(tolerance, np.array(parameters, ENTRY).tobytes(), np.array(others, ENTRY).tobytes(), in_slot)

    def _of_values(self, encoded: Mapping[Path, Any], seed: int) -> list[tuple[int, int, int]]:
        paths = list(self.values)
        if len(paths) > _MOST_VALUES:
            keys = np.fromiter(self.values.values(), np.uint64, len(paths))
            paths = [paths[number] for number in _first(_mixed(keys ^ np.uint64(seed)), _MOST_VALUES).tolist()]
        return [(self.values[path], 0, _digest(encoded[path])) for path in paths]


_Entry = tuple[int, int, int]


class _Taken:
    """Collects samples: where the bytes of those on the CPU are, and the tensors of the others."""

    def __init__(self, room: int) -> None:
        self.in_slot: list[InSlot] = []
        self._room = room
        self._keys: list[tuple[bool, int, int]] = []
        self._runs: list[tuple[int, int]] = []  # address and bytes
        self._kept: list[torch.Tensor] = []
        self._on_device: list[tuple[torch.Tensor, int, int]] = []

    def add(
        self, key: tuple[bool, int, int], local: torch.Tensor, first: int, count: int, stream: torch.cuda.Stream | None
    ) -> None:
        """Take elements `first` to ``first + count``, in C order."""
        size = local.element_size()
        if local.is_cpu and is_plain(local):  # nearly always
            self._keys.append(key)
            self._runs.append((local.data_ptr() + first * size, count * size))
            return
        if not local.is_cpu:
            if len(self._on_device) == _MOST_ON_DEVICE:
                return
            self._on_device.append((local, first, count))
            if stream is not None:
                self.in_slot.append(InSlot(*key, self._room, count * size))
                self._room += count * size
                return
        part = some_bytes(local, first, count).cpu()
        self._keys.append(key)
        self._kept.append(part)
        self._runs.append((part.data_ptr(), part.numel()))

    def queue(self, slot: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy the samples that are on a GPU to their room in the slot, behind what is queued there already."""
        if stream is None or not self.in_slot:
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            parts = [some_bytes(*sample) for sample in self._on_device]
            for local, _, _ in self._on_device:
                memory_of(local).record_stream(stream)  # it is not given to others before the copy has run
            joined = torch.cat(parts)
            begin = self.in_slot[0].offset
            slot[begin : begin + joined.numel()].copy_(joined, non_blocking=True)

    def entries(self) -> tuple[list[_Entry], list[_Entry]]:
        """Those of parameters, and those of others, as far as they are known now."""
        found: dict[bool, list[_Entry]] = {True: [], False: []}
        if self._runs:
            addresses, nbytes = zip(*self._runs, strict=True)
            digests = checksums_of(np.array(addresses, np.uint64), np.array(nbytes, np.uint64)).tolist()
            for (is_parameter, name, window), digest in zip(self._keys, digests, strict=True):
                found[is_parameter].append((name, window, digest))
        return found[True], found[False]


def _digest(encoded: Any) -> int:
    is_container = isinstance(encoded, dict | list)
    return zlib.crc32(canonical(encoded) if is_container else repr(encoded).encode())


def _first(order: Array, most: int) -> Array:
    """The numbers of the `most` lowest, lowest first."""
    chosen = np.argpartition(order, most)[:most] if len(order) > most else np.arange(len(order))
    return chosen[np.argsort(order[chosen], kind="stable")]


def _mixed(numbers: Array) -> Array:
    """As if drawn at random: the last step of splitmix64 (Steele, Lea and Flood, 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
