"""The limit of bandwidth, by a clock that the test moves."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.replication.connection import BLOCK_BYTES, MIN_BANDWIDTH, Limiter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(1, BLOCK_BYTES), st.floats(0, 2)), min_size=1, max_size=200))
def test_never_more_than_the_bandwidth_and_a_burst(sends: list[tuple[int, float]]) -> None:
    clock = Clock()
    bandwidth = 1e6
    limiter = Limiter(bandwidth, clock)
    begin, sent = clock.now, 0
    for nbytes, pause in sends:
        clock.now += limiter.reserve(nbytes)
        sent += nbytes
        assert sent <= BLOCK_BYTES + bandwidth * (clock.now - begin) + 1
        clock.now += pause


def test_the_bandwidth_is_used() -> None:
    clock = Clock()
    limiter = Limiter(1e6, clock)
    for _ in range(100):
        clock.now += limiter.reserve(BLOCK_BYTES)
    assert clock.now - 100.0 == pytest.approx(99 * BLOCK_BYTES / 1e6)


def test_threads_share_it() -> None:
    clock = Clock()
    limiter = Limiter(1e6, clock)
    delays: list[float] = []

    def take() -> None:
        for _ in range(50):
            delays.append(limiter.reserve(BLOCK_BYTES))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(delays) == pytest.approx(199 * BLOCK_BYTES / 1e6)


def test_without_a_limit_nothing_waits() -> None:
    assert Limiter(None).reserve(1 << 40) == 0.0


@pytest.mark.parametrize("bandwidth", [0, -1, MIN_BANDWIDTH - 1, float("nan")])
def test_a_limit_has_to_let_something_pass(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidth must be at least"):
        Limiter(bandwidth)


def test_stop_ends_every_wait() -> None:
    limiter = Limiter(MIN_BANDWIDTH)
    limiter.reserve(1 << 40)  # years
    waiting = threading.Thread(target=lambda: answers.append(limiter.wait(1)))
    answers: list[bool] = []
    waiting.start()
    calls: list[str] = []
    with limiter.stopping(lambda: calls.append("in time")):
        limiter.stop()
    with limiter.stopping(lambda: calls.append("late")):
        pass
    waiting.join()
    assert answers == [False]
    assert calls == ["in time", "late"]
    assert not limiter.wait(1)
