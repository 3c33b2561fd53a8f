"""When the retry controller ends the job."""

import pytest

from inprocess.exception import RestartAbort
from inprocess.initialize import Initialize, RetryController
from inprocess.state import FrozenState


def test_by_default_there_is_no_limit() -> None:
    state = FrozenState(rank=0, world_size=1, iteration=10**6)
    assert RetryController()(state) is state
    assert isinstance(RetryController(), Initialize)


@pytest.mark.parametrize(("iteration", "ends"), [(0, False), (2, False), (3, True), (4, True)])
def test_at_most_so_many_iterations(iteration: int, ends: bool) -> None:
    controller = RetryController(max_iterations=3)
    state = FrozenState(rank=0, world_size=1, iteration=iteration)
    if ends:
        with pytest.raises(RestartAbort, match="max_iterations=3"):
            controller(state)
    else:
        assert controller(state) is state


@pytest.mark.parametrize(
    ("live", "active", "message"),
    [(4, 4, ""), (4, 2, ""), (3, 3, "min_world_size=4"), (4, 1, "min_active_world_size=2"), (4, None, "")],
)
def test_enough_ranks_must_be_left(live: int, active: int | None, message: str) -> None:
    controller = RetryController(min_world_size=4, min_active_world_size=2)
    state = FrozenState(rank=0, world_size=live, active_world_size=active)
    if message:
        with pytest.raises(RestartAbort, match=message):
            controller(state)
    else:
        assert controller(state) is state
