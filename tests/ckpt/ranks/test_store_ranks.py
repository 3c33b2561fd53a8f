"""Collectives through a store, for ranks that have no process group yet."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.errors import CheckpointError, CheckpointTimeoutError
from ckpt.ranks.store_ranks import StoreRanks


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
    before = store.num_keys()

    def act(ranks: StoreRanks) -> None:
        for number in range(50):
            assert ranks(b"%d" % number) == [b"%d" % number] * 2

    _on_all(store, 2, act)
    assert store.num_keys() <= before + 2


def test_one_rank_needs_no_store() -> None:
    assert StoreRanks(0, 1, None, 1.0)(b"a") == [b"a"]


@pytest.mark.parametrize(("rank", "who"), [(0, "ranks 1, 2"), (1, "rank 0")])
def test_who_does_not_come_is_named(store: Any, rank: int, who: str) -> None:
    with pytest.raises(CheckpointTimeoutError, match=f"waited 0.1 s for {who}, to agree"):
        StoreRanks(rank, 3, _client(store), 0.1)(b"a")


def test_a_store_that_fails() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the connection is closed")

    with pytest.raises(CheckpointError, match="the store of the iteration failed"):
        StoreRanks(1, 2, Broken(), 1.0)(b"")
