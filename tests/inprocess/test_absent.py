"""Ranks that have returned wait for one that still works, for longer than `completion_timeout`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from inprocess import CallWrapper, Wrapper
from tests.inprocess.restarting import PATIENT, logged
from tests.support import rank_values


@pytest.mark.parametrize("kind", ["bytecode", "without hang protection"])
def test_a_rank_that_exports_for_longer_is_waited_for(kind: str) -> None:
    def main(rank: int, world_size: int, kind: str) -> Any:
        @Wrapper(**PATIENT, completion_timeout=timedelta(seconds=0.5))
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if rank == 0 and kind == "bytecode":
                end = time.monotonic() + 3
                while time.monotonic() < end:
                    time.sleep(0.02)
            elif rank == 0:
                with call.disable_hang_protection():
                    time.sleep(3)
            return call.iteration

        with logged() as lines:
            return train(), [line for line in lines if "waiting for rank" in line]

    (first, _), (second, lines) = rank_values(main, 2, kind)
    assert (first, second) == (0, 0), "nothing is done again"
    assert "waiting for rank 0 for " in lines[0]
    assert "longer than completion_timeout=0.5 s" in lines[0]
