"""What stays the same from save to save: the plan of a state's structure, made when the structure is first seen.

    flatten, encode values -> structure as before? the plan is there
                              else: can everybody store its state? exchange of descriptions, plan, own part

Runs in the trainer. Ranks agree on a nonce with each plan, and derive from it the same token for each save without
communication.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.description import StateDescription, exchange
from ckpt.planning.grid import GridOptions
from ckpt.planning.replicas import replica_kinds
from ckpt.planning.save_plan import SavePlan, make_save_plan
from ckpt.planning.state_dict import FlatState, flatten
from ckpt.ranks import Ranks
from ckpt.saving.layout import make_part
from ckpt.saving.part import LocalBoxes, Part
from ckpt.saving.samples import Replicas
from ckpt.storage.commit import SaveId
from ckpt.storage.documents import encode_value

__all__ = ["Planned", "Planner", "Prepared"]

_log = logging.getLogger("ckpt")
_FINE, _FAILED = b"+", b"-"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan: this rank's part of it, also as the bytes that writers get, and the values this rank writes.

    `boxes` are those that this rank holds, also where others write them.

    `value_owners` maps the path of each to whether it is this rank's alone.
    """

    description: StateDescription
    save_plan: SavePlan
    boxes: LocalBoxes
    part: Part
    plan_bytes: bytes
    value_owners: dict[Path, bool]
    nonce: bytes
    replicas: Replicas


@dataclass(frozen=True, slots=True)
class Prepared:
    """A state ready to be staged. `encoded` are all its values; `values` those that this rank writes, the entries of
    the part manifest: path, rank or None, encoded value."""

    flat: FlatState
    encoded: dict[Path, Any]
    values: list[Any]
    planned: Planned


class Planner:
    """Keeps the plan of the last structure seen. `max_slot_bytes` is what one slot holds at most, None for no limit."""

    def __init__(
        self, ranks: Ranks, grid: GridOptions, max_slot_bytes: int | None, compression: str | None, epoch: int
    ) -> None:
        self._ranks = ranks
        self._grid = grid
        self._max_slot_bytes = max_slot_bytes
        self._compression = compression
        self._epoch = epoch
        self._planned: Planned | None = None
        self._last_step = -1
        self._attempt = 0  # how often in a row the last step was to be saved

    def prepare(self, state: Any) -> Prepared:
        """Name the leaves and find or make the plan. When there is none yet, all ranks learn what was wrong on any.

        Raises StateError.
        """
        try:
            flat = flatten(state)
            encoded = _encode_values(flat)
        except Exception as error:
            if self._planned is None:
                self._ranks(_FAILED + f"{type(error).__name__}: {error}".encode())
            raise
        planned = self._plan(flat)
        rank = self._ranks.rank
        values = [[list(path), rank if own else None, encoded[path]] for path, own in planned.value_owners.items()]
        return Prepared(flat, encoded, values, planned)

    def begin_epoch(self, epoch: int) -> None:
        """Forget the plan: the ranks, and who they are, may be others from now on. The next save is planned anew."""
        self._epoch = epoch
        self._planned = None
        self._last_step, self._attempt = -1, 0

    def begin_attempt(self, step: int) -> None:
        """Called once for each save of each step, before anything can fail: it makes the next token."""
        self._attempt = self._attempt + 1 if step == self._last_step else 0
        self._last_step = step

    def save_id(self) -> SaveId | None:
        """The save begun last: different for every save, the same on all ranks. None before there is a plan.

        It depends on the nonce that the ranks agreed on and on how often this step was tried, and on nothing that a
        failed call on one rank could leave different.
        """
        if self._planned is None:
            return None
        text = f"{self._epoch}.{self._last_step}.{self._attempt}".encode()
        token = hashlib.blake2b(text, key=self._planned.nonce, digest_size=8).hexdigest()
        return SaveId(self._last_step, self._epoch, token)

    def _plan(self, flat: FlatState) -> Planned:
        description = flat.describe()
        if self._planned is not None and self._planned.description == description:
            return self._planned
        nonce = self._agree_on_nonce()
        kinds = replica_kinds(flat)
        from_lowest = frozenset(path for path, kind in kinds.items() if kind != "parameter")
        own = replace(description, from_lowest=from_lowest)
        plan = make_save_plan(exchange(own, self._ranks), self._grid)
        rank = self._ranks.rank
        boxes = {path: leaf.boxes for path, leaf in flat.tensors.items()}
        part = make_part(plan, rank, boxes, self._max_slot_bytes, self._compression)
        owned = {path: False for path, owner in plan.value_owners.items() if owner == rank}
        owned |= {path: True for path, ranks in plan.per_rank_values.items() if rank in ranks}
        plan_bytes = pickle.dumps(part.plan, protocol=pickle.HIGHEST_PROTOCOL)
        self._planned = Planned(description, plan, boxes, part, plan_bytes, owned, nonce, Replicas.of(flat, kinds))
        if part.plan.pieces > 1:
            _log.warning(
                "rank %d: the state needs %d bytes of staging memory, and a slot may have %s: it is staged in %d "
                "pieces, which makes saves block training; raise max_host_bytes to avoid this",
                rank,
                sum(image.image_bytes for image in part.plan.images),
                self._max_slot_bytes,
                part.plan.pieces,
            )
        return self._planned

    def _agree_on_nonce(self) -> bytes:
        """Collective. Raises StateError on all ranks when one of them cannot store its state."""
        seeds = self._ranks(_FINE + os.urandom(8))
        for rank, seed in enumerate(seeds):
            if seed.startswith(_FAILED):
                problem = seed.removeprefix(_FAILED).decode(errors="replace")
                raise StateError(
                    f"the state of rank {rank} cannot be stored, nothing was written: {problem}", rank=rank
                )
        return hashlib.blake2b(b"".join(seeds), digest_size=16).digest()


def _encode_values(flat: FlatState) -> dict[Path, Any]:
    encoded = {}
    for path, leaf in flat.values.items():
        try:
            encoded[path] = encode_value(leaf.value)
        except TypeError as error:
            raise StateError(f"{display(path)}: cannot be stored: {error}") from None
    return encoded
