"""Check the database of a step against its index: it must be the one that the index gives, byte by byte.

Only compressed nodes may be other frames, of another version of zstd, with the same content.
"""

from __future__ import annotations

import numpy as np

from ckpt.loading.index import CheckpointIndex
from ckpt.storage.names import MANIFEST, NODES
from ckpt.storage.ocdbt import FRAME_HEAD_BYTES, FRAME_TAIL_BYTES, database, head_of
from ckpt.storage.regions import Numbers
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.zarr_entries import Hierarchy
from ckpt.storage.zstd_frames import decompressed

__all__ = ["compressed_places", "database_problem"]


def database_problem(index: CheckpointIndex, manifest: bytes, nodes: bytes) -> tuple[str, str] | None:
    """Return a file, and what is wrong with it; None if both are right.

    CheckpointCorruptError or ValueError if it cannot be told, as the parts do not say where compressed chunks are.
    """
    entries = Hierarchy.of(index.packs).entries(compressed_places(index))
    recorded = _Recorded(nodes)
    try:
        expected = database(entries, compress=recorded.compressed)
    except DamagedFileError as damage:
        return NODES, f"differs from the index: the node at byte {recorded.at} {damage}"
    if nodes != expected[1]:
        return NODES, "differs from the index"
    return None if manifest == expected[0] else (MANIFEST, "differs from the index")


def compressed_places(index: CheckpointIndex) -> Numbers:
    """Return the places of compressed chunks as `Hierarchy.entries` takes them. CheckpointCorruptError."""
    rows = list[tuple[int, ...]]()
    if index.packs.compressed and index.packs.table is not None:
        for rank in range(index.world_size):
            rows += [(*key, *place) for key, place in index.packs.table(rank).items()]
    return np.array(rows, np.int64).reshape(-1, 5)


class _Recorded:
    """Takes the frames of compressed nodes from a file, in order; `at` is where the next one begins."""

    def __init__(self, nodes: bytes) -> None:
        self.at = 0
        self._nodes = nodes

    def compressed(self, body: bytes) -> bytes | None:
        """Return the frame of the next node, None if that is not compressed. DamagedFileError for another content."""
        nbytes, is_compressed = head_of(self._nodes, self.at)
        frame = self._nodes[self.at + FRAME_HEAD_BYTES : self.at + nbytes - FRAME_TAIL_BYTES]
        if is_compressed and decompressed(frame, len(body)).tobytes() != body:
            raise DamagedFileError("has another content")
        self.at += nbytes
        return frame if is_compressed else None
