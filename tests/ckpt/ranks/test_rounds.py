"""Ranks meet before a collective, all of them or none: threads over a store of this process force the order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.ranks.rounds import MissingRanksError, Round, meet, value_of
from tests.support import launch_ranks

_LONG_S = 50.0
_SHORT_S = 0.3
_LIMIT_S, _SUSPENDED_S = 5.0, 5.5


class _Watched(dist.Store):
    """A store of one rank that says when the rank begins to wait, and does something else there if told to."""

    def __init__(self, store: dist.Store, instead: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._store = store
        self._instead = instead
        self._checks = 0
        self.waits = threading.Event()

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store.check(keys)
        self._checks += 1
        if self._checks > 1 and not found:  # the first one looks for a round that was given up
            self.waits.set()
            self._instead()
        return found

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "add", "compare_set", "delete_key"):
            return getattr(object.__getattribute__(self, "_store"), name)
        return object.__getattribute__(self, name)


def test_the_first_proposal_is_decided_for_all() -> None:
    store = dist.HashStore()
    first, second = Round(store, "a", 2), Round(store, "a", 2)
    assert (first.is_decided, first.decision) == (False, None)
    assert (first.decide("one"), second.decide("two"), second.decision) == ("one", "one", "one")
    assert first.is_decided
    assert Round(store, "b", 2).decision is None


def test_the_last_rank_that_arrives_is_told() -> None:
    store = dist.HashStore()
    ranks = [Round(store, "a", 3) for _ in range(3)]
    assert ranks[0].arrived is None
    assert [(each.arrive(), each.arrived) for each in ranks] == [(False, 1), (False, 2), (True, 3)]


def test_a_round_that_is_deleted_leaves_no_key() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    one = Round(store, "a", 2)
    one.arrive()
    one.decide("x")
    one.delete()
    assert (one.arrived, one.decision) == (None, None)
    assert store.num_keys() == before


def test_looking_for_a_value_never_makes_one(tmp_path: Path) -> None:
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 1)):
        assert [value_of(store, "a") for _ in range(2)] == [None, None]
        assert store.compare_set("a", "", "first") == b"first"
        assert value_of(store, "a") == "first"


def _all_meet(store: dist.Store, world_size: int) -> None:
    with ThreadPoolExecutor(world_size) as pool:
        for future in [pool.submit(meet, store, rank, world_size, _LONG_S) for rank in range(world_size)]:
            future.result(timeout=_LONG_S)


def test_nobody_goes_on_before_the_last_one_comes() -> None:
    store = dist.HashStore()
    first = _Watched(store)
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[None] = pool.submit(meet, first, 0, 2, _LONG_S)
        assert first.waits.wait(_LONG_S)
        assert not waiting.done()
        meet(store, 1, 2, _LONG_S)
        waiting.result(timeout=_LONG_S)


def test_who_does_not_come_is_named_and_is_in_time_for_the_next_round() -> None:
    store = dist.HashStore()
    second = _Watched(store)
    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(meet, second, 2, 4, _LONG_S)]
        assert second.waits.wait(_LONG_S)
        early.append(pool.submit(meet, store, 0, 4, _SHORT_S))
        for future in early:
            with pytest.raises(MissingRanksError, match=r"ranks 1, 3 did not come within 0\.3 s") as caught:
                future.result(timeout=_LONG_S)
            assert caught.value.missing == [1, 3]
    _all_meet(store, 4)


class _Telling(dist.FileStore):
    """A store of a rank that prints when it has begun to wait, and when it still does after a suspension."""

    def __init__(self, path: str) -> None:
        super().__init__(path, 2)
        self._checks, self._since, self._last = 0, 0, time.monotonic()

    def check(self, keys: list[str]) -> bool:
        now = time.monotonic()
        self._checks += 1
        if self._since or now - self._last > _SUSPENDED_S / 2:
            self._since += 1
        self._last = now
        if self._checks == 3:
            print("waits", flush=True)
        if self._since == 3:  # it would have given up before
            print("still waits", flush=True)
        found: bool = super().check(keys)
        return found


def _meet_first(rank: int, world_size: int, path: str) -> None:
    meet(_Telling(path), 0, 2, _LIMIT_S)
    print("met", flush=True)


def test_a_rank_that_was_suspended_does_not_give_up_the_others(tmp_path: Path) -> None:
    """They may have been suspended with it, and go on a little later."""
    path = str(tmp_path / "store")
    with launch_ranks(_meet_first, 1, path, init_process_group=False) as group:
        group.wait_for_output(0, "^waits")
        group.kill(0, signal.SIGSTOP)
        time.sleep(_SUSPENDED_S)  # by the clock that is tested
        group.kill(0, signal.SIGCONT)
        group.wait_for_output(0, "^still waits")
        meet(dist.FileStore(path, 2), 1, 2, _LONG_S)
        group.wait()
        assert group.stdout(0).endswith("met\n")


def test_a_rank_that_is_interrupted_takes_the_others_out_at_once() -> None:
    store = dist.HashStore()

    def interrupted() -> None:
        raise KeyboardInterrupt

    waits = _Watched(store)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, waits, 0, 3, _LONG_S)
        assert waits.waits.wait(_LONG_S)
        with pytest.raises(KeyboardInterrupt):
            meet(_Watched(store, interrupted), 1, 3, _LONG_S)
        with pytest.raises(MissingRanksError, match=r"rank 1 left again \(KeyboardInterrupt\)"):
            other.result(timeout=_LONG_S)
    _all_meet(store, 3)


def test_a_rank_that_comes_while_a_round_is_given_up_is_either_in_or_late() -> None:
    """The last rank arrives after the first has found it missing, before that is decided."""
    store = dist.HashStore()
    decides, may_decide = threading.Event(), threading.Event()

    class Slow(_Watched):
        def __getattribute__(self, name: str) -> Any:
            if name == "compare_set":
                decides.set()
                assert may_decide.wait(_LONG_S)
            return super().__getattribute__(name)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, Slow(store), 0, 2, _SHORT_S)
        assert decides.wait(_LONG_S)
        last = pool.submit(meet, store, 1, 2, _LONG_S)
        last.result(timeout=_LONG_S)  # all had come when it did
        may_decide.set()
        first.result(timeout=_LONG_S)
    _all_meet(store, 2)


def test_keys_of_earlier_rounds_are_deleted() -> None:
    store = dist.HashStore()
    _all_meet(store, 3)
    after_one = store.num_keys()
    for _ in range(5):
        with pytest.raises(MissingRanksError):
            meet(store, 0, 3, 0.0)
        _all_meet(store, 3)
    assert store.num_keys() == after_one


def test_a_meeting_costs_the_same_however_many_there_were(tmp_path: Path) -> None:
    """Also in a store that says of any key that it was deleted, as a FileStore does, which keeps all operations."""
    file = tmp_path / "store"
    store = dist.FileStore(str(file), 1)
    written = []
    for _ in range(20):
        before = file.stat().st_size
        meet(store, 0, 1, _LONG_S)
        written.append(file.stat().st_size - before)
    assert max(written) <= 2 * min(written[2:])
