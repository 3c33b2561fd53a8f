"""Records of the runs of memory in a slot: a save does not copy bytes again that are there already.

A run whose checksum is as in the last save gets a hash of its bytes in the slot. If the tensor has that hash in the
next save, it is read and not copied: the slot holds what a copy would have put there. A run that changes costs a
comparison of checksums, and is not hashed. See `ckpt.native.update_runs`.

Belongs to the thread that stages. What is known of a run changes together with its bytes, so it is also right after
an interrupted save, of which some runs were copied. Of what is copied in another way, as strided tensors and those of a
GPU are, nothing is known.
"""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt.native import BLOCK_BYTES, DIGEST_KEY_BYTES, HASH_BYTES, HELD, update_runs

Array = np.ndarray[Any, np.dtype[Any]]
_CONTENT_BYTES = 32


class RunHashes:
    """The key of the hashes in all slots of a rank, and the records of the slot that was staged last."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(DIGEST_KEY_BYTES)
        self.last: weakref.ref[HeldRuns] | None = None  # its slot has it
        self.number = 0


class HeldRuns:
    """The records of the runs in one slot, which have these sizes.

    Nothing but `update` writes to their places, unless `begin` is told so. `layout` is the object that says where the
    runs are; others with the same layout are compared.
    """

    def __init__(self, layout: object, sizes: Array, hashes: RunHashes) -> None:
        self.layout = layout
        self.records = np.zeros(len(sizes), HELD)
        blocks = -(-sizes.astype(np.int64) // BLOCK_BYTES)
        self._room = np.empty(int(blocks.sum()) * HASH_BYTES, np.uint8)  # takes memory as far as it is used
        self.records["hashes"] = self._room.ctypes.data + (np.cumsum(blocks) - blocks) * HASH_BYTES
        self._hashes = hashes
        self._at = int(self.records.ctypes.data)
        self._last: HeldRuns | None = None  # during a save, if it is not this one

    def begin(self, elsewhere: Array) -> None:
        """Begin a save in this slot. The runs `elsewhere`, a mask, are not copied by `update`."""
        self.records["state"][elsewhere] = 0  # before anything is copied, as that may be interrupted
        hashes = self._hashes
        last = None if hashes.last is None else hashes.last()
        self._last = None if last is self or last is None or last.layout is not self.layout else last
        hashes.last, hashes.number = weakref.ref(self), hashes.number + 1

    def update(self, runs: Array, first: int, end: int) -> None:
        """Make the copies of the runs `first` to `end` (exclusive) that are needed. Any thread, each run once."""
        at, last = first * HELD.itemsize, self._last or self
        update_runs(runs[first:end], self._at + at, last._at + at, self._hashes.key, self._hashes.number)

    def end(self, files: Sequence[slice | None]) -> tuple[bytes | None, ...]:
        """End a save; return a name for the bytes of each file, of which the runs are given: the same name and bytes.

        None if they are not known, or no runs are given.
        """
        self._last = None
        numbers, known = np.ascontiguousarray(self.records["content"]), self.records["state"] > 0

        def content(runs: slice | None) -> bytes | None:
            if runs is None or not known[runs].all():
                return None
            key = self._hashes.key[: hashlib.blake2b.MAX_KEY_SIZE]
            return hashlib.blake2b(numbers[runs].tobytes(), digest_size=_CONTENT_BYTES, key=key).digest()

        return tuple(map(content, files))
