"""Collectives through a store, for ranks that have no process group yet."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.errors import CheckpointError, CheckpointTimeoutError
from ckpt.ranks.collectives import StoreRanks
from ckpt.ranks.rounds import Round


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=10))


def _client(store: Any) -> Any:
    return dist.TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)


def _on_all(store: Any, world_size: int, act: Any) -> list[Any]:
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        results[rank] = act(StoreRanks(rank, world_size, _client(store), 20.0))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_every_rank_gets_all_payloads(store: Any) -> None:
    def act(ranks: StoreRanks) -> Any:
        first = ranks(b"x" * ranks.rank)
        return first, ranks.maximum(bytes([ranks.rank, 9 - ranks.rank])), ranks(b"")

    expected = ([b"", b"x", b"xx"], bytes([2, 9]), [b"", b"", b""])
    assert _on_all(store, 3, act) == [expected] * 3


def test_keys_do_not_grow(store: Any) -> None:
    def act(ranks: StoreRanks) -> None:
        for number in range(25):
            assert ranks(b"%d" % number) == [b"%d" % number] * 2

    _on_all(store, 2, act)
    before = store.num_keys()
    for rank in range(2):
        with pytest.raises(CheckpointTimeoutError):
            StoreRanks(rank, 2, _client(store), 0.0)(b"")
        _on_all(store, 2, act)
    assert store.num_keys() == before


def test_one_rank_needs_no_store() -> None:
    assert StoreRanks(0, 1, None, 1.0)(b"a") == [b"a"]


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (1, "ranks 0, 2")])
def test_the_ranks_that_do_not_come_are_named(store: Any, rank: int, missing: str) -> None:
    late = rf"after a restart: {missing} did not come within 0\.1 s\. Has every process registered"
    with pytest.raises(CheckpointTimeoutError, match=late):
        StoreRanks(rank, 3, _client(store), 0.1)(b"a")


def test_a_rank_that_comes_too_late_takes_part_in_the_next_one(store: Any) -> None:
    """With the payload that it has then: all ranks return the same, or none returns."""
    with pytest.raises(CheckpointTimeoutError):
        StoreRanks(0, 2, _client(store), 0.1)(b"given up")
    payloads = {0: b"again", 1: b"late"}
    assert _on_all(store, 2, lambda ranks: ranks(payloads[ranks.rank])) == [[b"again", b"late"]] * 2


def test_a_rank_that_is_interrupted_takes_the_others_out_at_once(store: Any) -> None:
    class Interrupted:
        def __init__(self) -> None:
            self._store = _client(store)

        def __getattr__(self, name: str) -> Any:
            if name == "add" and self._arrives:
                raise KeyboardInterrupt
            self._arrives = name == "set"  # the payload is there
            return getattr(self._store, name)

        _arrives = False

    def act(ranks: StoreRanks) -> Any:
        if ranks.rank == 1:
            ranks._store = Interrupted()
            deadline = time.monotonic() + 20
            while Round(store, "0", 3).arrived != 2 and time.monotonic() < deadline:  # the others wait
                time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt if ranks.rank == 1 else CheckpointTimeoutError) as caught:
            ranks(b"")
        return str(caught.value)

    first, _, third = _on_all(store, 3, act)
    assert "rank 1 left again (KeyboardInterrupt)" in first
    assert "rank 1 left again (KeyboardInterrupt)" in third


def test_a_store_that_fails() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the connection is closed")

    with pytest.raises(CheckpointError, match="the store of the iteration failed"):
        StoreRanks(1, 2, Broken(), 1.0)(b"")
