"""The limit of the staging memory of each rank, and the check that a plan keeps to it.

Ranks may have different limits. Each rank knows those of all ranks, and computes from the plan what every rank needs:
so a plan that does not fit on one of them is refused on all, without a further collective.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import StateError
from ckpt.planning.save_plan import SavePlan
from ckpt.saving.share import HEADER_BYTES
from ckpt.storage.chunk_layout import in_pages

_FORM = struct.Struct(">QQ")
LIMIT_BYTES = _FORM.size
"""The size of an encoded `HostLimit`."""


@dataclass(frozen=True, slots=True)
class HostLimit:
    """The staging memory that one rank may have: `slots` slots of at most `max_bytes` together; None for no limit."""

    slots: int
    max_bytes: int | None = None

    def encoded(self) -> bytes:
        """Return the limit as `LIMIT_BYTES` bytes."""
        return _FORM.pack(self.slots, self.max_bytes or 0)

    @classmethod
    def decode(cls, data: bytes) -> HostLimit:
        """Return the limit that `encoded` made these bytes of."""
        slots, max_bytes = _FORM.unpack(data)
        return cls(slots, max_bytes or None)

    def needed(self, share_bytes: int) -> int:
        """Return the bytes of all slots for a share of so many bytes."""
        return self.slots * (share_bytes + HEADER_BYTES)


def check_host_memory(plan: SavePlan, limits: Sequence[HostLimit]) -> None:
    """Raise StateError, the same on all ranks, if a rank needs more than its limit. `limits` is by rank."""
    if all(limit.max_bytes is None for limit in limits):
        return  # the usual case; a large job need not list all files for it
    shares = [0] * len(limits)
    for (rank, _), nbytes in plan.index.files().items():
        shares[rank] += in_pages(nbytes)
    needed = [limit.needed(share) for limit, share in zip(limits, shares, strict=True)]
    refused = [
        rank for rank, limit in enumerate(limits) if limit.max_bytes is not None and needed[rank] > limit.max_bytes
    ]
    if not refused:
        return
    rank = max(refused, key=needed.__getitem__)
    slots, others = limits[rank].slots, len(refused) - 1
    raise StateError(
        f"rank {rank} needs {needed[rank]} bytes of host memory to stage its share of the state ({slots} slot(s) of "
        f"{needed[rank] // slots} bytes), and Staging(max_host_bytes={limits[rank].max_bytes}) is the limit"
        f"{f', as {others} other rank(s) need more than theirs' if others else ''}. Nothing was staged on any rank. "
        f"Raise max_host_bytes to at least {needed[rank]}, or save with more ranks"
        f"{', or with fewer slots: with Staging(slots=1) a save waits for the one before' if slots > 1 else ''}",
        rank=rank,
    )
