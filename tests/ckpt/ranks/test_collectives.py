"""What becomes of a save or a restore that not all ranks call, on real ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CheckpointError, CheckpointTimeoutError, StorageError
from ckpt.ranks.collectives import Ranks
from tests.support import run_ranks

_TIMEOUT_S = 4.0


def _error_of(call: Any, *args: Any) -> CheckpointError | None:
    try:
        call(*args)
    except CheckpointError as error:
        return error
    return None


@pytest.mark.timeout(180)
def test_a_save_that_one_rank_does_not_call_ends_with_its_name_and_the_next_one_works(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        import torch.distributed as dist

        state = {"weight": torch.arange(100_000.0), "step": 3}
        with ckpt.Checkpointer(tmp_path, timeout=timedelta(seconds=_TIMEOUT_S)) as checkpointer:
            begin = time.monotonic()
            error = _error_of(checkpointer.save, state, 1) if rank != 1 else None
            took_s = time.monotonic() - begin
            dist.barrier()  # the group has no collective half done
            checkpointer.save(state, 2)
            lone = _error_of(checkpointer.restore, state) if rank == 1 else None
            dist.barrier()
            assert checkpointer.restore(state) == 2
            return type(error), str(error), took_s, str(lone), checkpointer.all_steps()

    first, absent, third = (result.value for result in run_ranks(main, 3))
    for kind, text, took_s, _, steps in (first, third):
        assert kind is CheckpointTimeoutError
        assert "the save of step 1: rank 1 did not come within 4 s" in text
        assert "Every rank must call save" in text
        assert _TIMEOUT_S <= took_s < 3 * _TIMEOUT_S
        assert steps == [2]
    assert "rank 1 waited" in absent[3]
    assert "the restore: ranks 0, 2 did not come" in absent[3]


def test_ranks_that_call_different_things_all_learn_it(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        state = {"weight": torch.arange(1000.0)}
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            texts = [
                str(_error_of(checkpointer.save, state, rank)),
                str(_error_of(checkpointer.save if rank else checkpointer.warmup, state, *([5] if rank else []))),
            ]
            checkpointer.save(state, 7)
            return texts, checkpointer.all_steps()

    for result in run_ranks(main, 2):
        (steps_differ, calls_differ), published = result.value
        assert "the save of step 0 on rank 0; the save of step 1 on rank 1" in steps_differ
        assert "warmup on rank 0; the save of step 5 on rank 1" in calls_differ
        assert published == [7]


class _InStore(Ranks):
    """Ranks with a store and without collectives."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def store(self) -> Any:
        return self._store


def test_what_a_rank_tells_first_stands_and_only_the_last_names_are_kept() -> None:
    store = torch.distributed.HashStore()
    first, second = _InStore(store), _InStore(store)
    before = store.num_keys()
    assert (first.tell_first("a", None), first.tell_first("a", "1"), second.tell_first("a", "2")) == (None, "1", "1")
    assert second.tell_first("a", None) == "1"
    for number in range(40):
        first.tell_first(f"{number}", "x")
        second.tell_first(f"{number}", "y")
    assert store.num_keys() - before <= 16
    assert (second.tell_first("39", None), second.tell_first("a", None)) == ("x", None)


def test_without_a_store_that_answers_a_rank_knows_what_it_says_itself() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the connection is closed")

    for store in (None, Broken()):
        assert _InStore(store).tell_first("a", "1") == "1"
        assert _InStore(store).tell_first("a", None) is None


def _meetings(rank: int, world_size: int, folder: Path) -> Any:
    """In the default group, in a group of some ranks, and in the default group made anew."""
    import torch.distributed as dist

    def all_names(ranks: Ranks) -> list[bytes]:
        return [name for _ in range(2) for name in ranks(b"x" * ranks.rank + b"!")]

    found = [all_names(Ranks())]
    pair = dist.new_group([0, 2])
    if rank != 1:
        lonely = _error_of(Ranks(pair, timeout_s=0.3), b"") if rank == 2 else None
        assert rank != 2 or "rank 0 did not come" in str(lonely)
        dist.barrier(pair)
        found.append(all_names(Ranks(pair)))
    found.append(all_names(Ranks()))
    if rank == 0:
        assert "ranks 1, 2 did not come" in str(_error_of(Ranks(timeout_s=0.3), b""))
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "again"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found.append(all_names(Ranks()))
    dist.destroy_process_group()
    return found


def test_groups_of_some_ranks_and_groups_made_anew(tmp_path: Path) -> None:
    three, two = [b"!", b"x!", b"xx!"] * 2, [b"!", b"x!"] * 2
    results = [result.value for result in run_ranks(_meetings, 3, tmp_path)]
    assert results == [[three, two, three, three], [three, three, three], [three, two, three, three]]


def test_a_rank_that_died_is_not_waited_for(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        import torch.distributed as dist

        ranks = Ranks(timeout_s=50)
        ranks(b"")
        dist.barrier()
        if rank == 1:
            os._exit(7)
        return str(_error_of(ranks, b""))

    first, _, third = run_ranks(main, 3, returncodes={1: 7})
    for result in (first, third):
        assert "rank 1 died" in result.value
        assert "cannot" not in result.value


def test_the_maximum_the_minimum_and_payloads_of_very_different_sizes() -> None:
    def main(rank: int, world_size: int) -> Any:
        ranks = Ranks()
        sizes_differ = str(_error_of(ranks.maximum, bytes(3 + (rank == 2))))
        long = [payload for _ in range(2) for payload in ranks(bytes([7]) * 50_000 if rank == 1 else b"ab"[:rank])]
        return (
            ranks.maximum(bytes([rank, 9 - rank, 5])),
            ranks.maximum(b""),
            sizes_differ,
            long,
            ranks.minimum(rank, -rank),
        )

    for result in run_ranks(main, 5):
        largest, nothing, sizes_differ, long, smallest = result.value
        assert smallest == [0, -4]
        assert (largest, nothing) == (bytes([4, 9, 5]), b"")
        assert "payloads of 3 to 4 bytes" in sizes_differ
        assert long == [b"", bytes([7]) * 50_000, b"ab", b"ab", b"ab"] * 2


def test_over_a_tcp_store(tmp_path: Path) -> None:
    """As torchrun has it, where a rank's store is a connection to a server."""

    def main(rank: int, world_size: int) -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        early = str(_error_of(Ranks(timeout_s=0.3), b"")) if rank == 0 else ""
        dist.barrier()
        late = Ranks()(str(rank).encode())
        dist.barrier()  # rank 0 has the store
        dist.destroy_process_group()
        return early, late

    first, second = (result.value for result in run_ranks(main, 2, init_process_group=False))
    assert "rank 1 did not come" in first[0]
    assert first[1] == second[1] == [b"0", b"1"]


def test_a_root_that_is_another_directory_on_another_node_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        (tmp_path / f"node{rank}").mkdir()
        state = {"weight": torch.arange(1000.0)}
        with ckpt.Checkpointer(tmp_path / f"node{rank}") as checkpointer:
            error = _error_of(checkpointer.save, state, 1)
        with ckpt.Checkpointer(tmp_path / "shared") as checkpointer:  # the group is as it was
            checkpointer.save(state, 1)
            return type(error), str(error), checkpointer.all_steps()

    for result in run_ranks(main, 2):
        kind, text, steps = result.value
        assert kind is StorageError
        assert "rank 1 cannot use the root" in text
        assert "is not what rank 0 has under this name" in text
        assert steps == [1]
