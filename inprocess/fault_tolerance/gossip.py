"""Measured values of all ranks by way of a store, without a collective.

    checkpoint n      every rank leaves what it has measured under n, and goes on
    a later one       every rank looks for the newest checkpoint before this one that all have written for

Nobody waits. Ranks that call it with the same number look at the same, except where a straggler has not come to an
earlier checkpoint yet: then some use older values until the next one.
"""

from __future__ import annotations

import json
from typing import Any

from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalc

__all__ = ["MaximaGossip"]

_LOOKED_BACK = 3


class MaximaGossip:
    """`store` has `set`, `get` and `check`, as torch's. `rank` counts from 0 to `world_size`."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    def exchange(self, calc: TimeoutsCalc, checkpoint: int) -> bool:
        """Leave what was measured, and have `calc` use what all had at an earlier one. False if none is whole."""
        self._store.set(self._key(checkpoint, self._rank), json.dumps(calc.measured()))
        for earlier in range(checkpoint - 1, max(-1, checkpoint - 1 - _LOOKED_BACK), -1):
            keys = [self._key(earlier, rank) for rank in range(self._world_size)]
            if self._store.check(keys):
                calc.agree([json.loads(self._store.get(key)) for key in keys])
                return True
        return False

    def _key(self, checkpoint: int, rank: int) -> str:
        return f"section limits/{checkpoint}/{rank}"
