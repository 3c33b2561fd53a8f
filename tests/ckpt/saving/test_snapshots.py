"""Snapshots: steps that are in memory alone, and what a restart restores of them."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.ranks.collectives import StoreRanks
from ckpt.saving import snapshots
from ckpt.saving.share import Share
from inprocess.ipc.shared_memory import SharedMemory
from tests.ckpt.saving.snapshot_jobs import Faults, fresh, is_state_of, resized, restarted, train_step
from tests.support import LeakCheck, run_ranks
from tests.support.quick_keepers import descendants
from tests.support.saves import save_here
from tests.support.selection import full_only
from tests.support.template import REPOSITORY, quick_python

_DRAIN = timedelta(seconds=20)


def _trained(checkpointer: ckpt.Checkpointer, state: dict[str, Any], first: int, last: int) -> None:
    for step in range(first, last + 1):
        train_step(state, 0, step)
        checkpointer.snapshot(state, step)


def test_a_snapshot_is_restored_without_storage(tmp_path: Path, leak_check: LeakCheck) -> None:
    root = tmp_path / "root"
    with ckpt.Checkpointer(root, snapshots=1) as checkpointer:
        state = fresh()
        _trained(checkpointer, state, 1, 5)
        train_step(state, 0, 6)
        checkpointer.bridge.recover_from_fault(_DRAIN)
        assert checkpointer.restore(state) == 5
        assert is_state_of(state, 0, 5)
        report = checkpointer.last_restore
        assert report is not None
        assert (report.tier, report.in_memory, report.storage_bytes) == ("own memory", True, 0)
        assert not root.exists()


@pytest.mark.parametrize(
    ("kind", "registered"),
    [
        ("raise", False),
        ("kill", True),
        pytest.param("raise", True, marks=full_only),
        pytest.param("kill", False, marks=full_only),
    ],
)
def test_one_of_four_ranks_fails(tmp_path: Path, kind: str, registered: bool) -> None:
    """With a spare in its place all ranks go on from the snapshot of the step before."""
    at = Faults((kind, 0, 2, 5))
    world = 5 if kind == "kill" else 4
    codes = {2: -signal.SIGKILL} if kind == "kill" else {}
    results = run_ranks(
        restarted,
        world,
        tmp_path / "root",
        at,
        4,
        8,
        registered,
        returncodes={rank: codes.get(rank, 0) for rank in range(world)},
        init_process_group=False,
        env={"LOGLEVEL": "INFO"},
    )
    begun = [entry for result in results if result.value for entry in result.value if entry[0] == 1]
    assert sorted(rank for _, rank, _, _, _ in begun) == [0, 1, 2, 3]
    assert {(step, right) for _, _, step, _, right in begun} == {(4, True)}
    assert not (tmp_path / "root").exists()


def test_checksums_that_are_made_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    """As of tensors on a GPU: training goes on meanwhile, and what is not done counts for nothing."""
    monkeypatch.setattr(snapshots, "_INLINE_BYTES", -1)
    begun, go, completed = threading.Event(), threading.Event(), snapshots.chunks_in_slot

    def late(*args: Any) -> Any:
        begun.set()
        assert go.wait(20)
        return completed(*args)

    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        _trained(checkpointer, state, 1, 1)
        assert checkpointer.restore(state) == 1
        monkeypatch.setattr(snapshots, "chunks_in_slot", late)
        _trained(checkpointer, state, 2, 2)
        assert begun.wait(20)
        train_step(state, 0, 3)
        threading.Timer(0.05, go.set).start()
        assert checkpointer.restore(state) == 2  # waits for it
        assert is_state_of(state, 0, 2)


def test_slots_are_held_until_a_newer_snapshot_is_complete(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path / "root", snapshots=1, staging=ckpt.Staging(slots=2)) as checkpointer:
        state = fresh()
        _trained(checkpointer, state, 1, 7)
        assert checkpointer.restore(state) == 7
        assert is_state_of(state, 0, 7)


def test_one_slot_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least two slots"):
        ckpt.Checkpointer(tmp_path, snapshots=1, staging=ckpt.Staging(slots=1))
    with (
        ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(slots=1)) as checkpointer,
        pytest.raises(ValueError, match="at least two slots"),
    ):
        checkpointer.snapshot(fresh(), 1)


@pytest.mark.parametrize("options", [{"snapshots": 0}, {"save_every": -1}])
def test_every_must_be_positive(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of at least 1"):
        ckpt.Checkpointer(tmp_path, **options)


def test_step_does_what_is_due(tmp_path: Path, leak_check: LeakCheck) -> None:
    finalized = []
    with ckpt.Checkpointer(tmp_path, snapshots=2, save_every=4) as checkpointer:
        state = fresh()
        for step in range(1, 8):
            train_step(state, 0, step)
            finalized += checkpointer.step(state, step, metrics={"loss": 1.0})
        finalized += checkpointer.maybe_finalize(blocking=True)
        assert finalized == checkpointer.all_steps() == [4]
        assert checkpointer.restore(state) == 6
        assert is_state_of(state, 0, 6)


def test_a_save_is_a_snapshot_even_if_it_is_abandoned(tmp_path: Path, leak_check: LeakCheck) -> None:
    root = tmp_path / "root"
    with ckpt.Checkpointer(root, snapshots=1) as checkpointer:
        state = fresh()
        _trained(checkpointer, state, 1, 1)
        train_step(state, 0, 2)
        checkpointer.save_request(state, 2)  # and never scheduled
        train_step(state, 0, 3)
        checkpointer.bridge.recover_from_fault(_DRAIN)
        assert checkpointer.all_steps() == []
        assert checkpointer.restore(state) == 2
        assert is_state_of(state, 0, 2)
        train_step(state, 0, 3)
        checkpointer.save(state, 3)
        assert checkpointer.all_steps() == [3]


def test_after_a_restore_nothing_newer_is_left(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        train_step(state, 0, 1)
        save_here(checkpointer, state, 1)
        _trained(checkpointer, state, 2, 3)
        assert checkpointer.restore(state, 1) == 1
        assert is_state_of(state, 0, 1)
        assert checkpointer.restore(state) == 1


def test_a_step_in_memory_can_be_asked_for(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        _trained(checkpointer, state, 1, 2)
        assert checkpointer.recover() == [1, 2]
        assert checkpointer.restore(state, 2) == 2
        with pytest.raises(ckpt.errors.CheckpointNotFoundError, match="no published step 9"):
            checkpointer.restore(state, 9)


def _two_of_one_step(root: Path, order: str) -> None:
    """Make a snapshot and a save of step 5, with other content, and restore the one that was made later."""
    first, second = order.split(", ")
    with ckpt.Checkpointer(root, snapshots=1, staging=ckpt.Staging(slots=4)) as checkpointer:
        state = fresh()
        if "claimed" in first:
            train_step(state, 0, 3)
            save_here(checkpointer, state, 3)
        for kind in (first, second):
            train_step(state, 0, 5)  # not the same the second time
            if "save" in kind:
                save_here(checkpointer, state, 5)
            else:
                checkpointer.snapshot(state, 5)
        expected = {name: tensor.clone() for name, tensor in state["weights"].items()}
        for how in ("restore", "fault"):
            train_step(state, 0, 6)
            if how == "fault":
                checkpointer.bridge.recover_from_fault(_DRAIN)
            assert checkpointer.restore(state) == 5
            assert all(tensor.equal(expected[name]) for name, tensor in state["weights"].items()), order


@pytest.mark.parametrize(
    "order",
    ["snapshot, save", "snapshot of a claimed root, save", "save, snapshot", "snapshot, snapshot"],
)
def test_of_two_of_one_step_the_later_one_is_restored(tmp_path: Path, order: str, leak_check: LeakCheck) -> None:
    """It was decided by their names, which have a random part: so it is tried more than once."""
    for number in range(4):
        _two_of_one_step(tmp_path / str(number), order)


def test_a_published_step_is_not_older_than_a_snapshot_because_its_slot_was_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        train_step(state, 0, 5)
        checkpointer.snapshot(state, 5)
        train_step(state, 0, 5)
        save_here(checkpointer, state, 5)
        expected = state["weights"]["w0"].clone()
        (published,) = (json.loads((tmp_path / "step_00000005/intent.json").read_bytes())["save"],)
        for region in checkpointer._parts.saver._stager.memory.regions:
            if Share(region).save_name == published:
                Share(region).clear()
        train_step(state, 0, 6)
        assert checkpointer.restore(state) == 5
        assert state["weights"]["w0"].equal(expected)
        report = checkpointer.last_restore
        assert report is not None
        assert report.tier == "storage"


def _flip(slots: list[SharedMemory], save_names: list[str]) -> None:
    for region in slots:
        if any(name in (Share(region).save_name or "") for name in save_names):
            region.buffer[1000] ^= 1


@pytest.mark.parametrize(("damaged", "step", "tier"), [([3], 2, "own memory"), ([2, 3], 1, "storage")])
def test_a_wrong_byte_is_found_and_an_older_tier_is_taken(
    tmp_path: Path,
    slots: list[SharedMemory],
    damaged: list[int],
    step: int,
    tier: str,
    caplog: pytest.LogCaptureFixture,
    leak_check: LeakCheck,
) -> None:
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        train_step(state, 0, 1)
        save_here(checkpointer, state, 1)
        _trained(checkpointer, state, 2, 3)
        _flip(slots, [f"step_{number:08d}" for number in (*damaged, 1)])  # of step 1, storage has another copy
        train_step(state, 0, 4)
        checkpointer.bridge.recover_from_fault(_DRAIN)
        assert checkpointer.restore(state) == step
        assert is_state_of(state, 0, step)
        report = checkpointer.last_restore
        assert report is not None
        assert (report.tier, report.damaged) == (tier, ())
        assert "step 3 cannot be restored" in caplog.text
        caplog.clear()  # its records have the errors, and those the threads that read
        gc.collect()


def test_a_damaged_snapshot_that_is_all_there_is(
    tmp_path: Path, slots: list[SharedMemory], caplog: pytest.LogCaptureFixture, leak_check: LeakCheck
) -> None:
    """The restore fails, as tensors may be overwritten, but not in every restart."""
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        _trained(checkpointer, state, 1, 1)
        _flip(slots, ["step_00000001"])
        for _ in range(2):
            checkpointer.bridge.recover_from_fault(_DRAIN)
            with pytest.raises(ckpt.errors.CheckpointCorruptError, match="wrong checksum"):
                checkpointer.restore(fresh())
        checkpointer.bridge.recover_from_fault(_DRAIN)
        state = fresh()
        assert checkpointer.restore(state) is None
        _trained(checkpointer, state, 1, 2)
        assert checkpointer.restore(state) == 2
        caplog.clear()
        gc.collect()


def test_a_state_that_grows(tmp_path: Path, leak_check: LeakCheck) -> None:
    """Slots are replaced by larger ones; the snapshot in the old ones is held until there is a new one."""
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        _trained(checkpointer, state, 1, 1)
        larger = {**fresh(), "more": torch.zeros(1 << 20)}
        checkpointer.warmup(larger)
        checkpointer.bridge.recover_from_fault(_DRAIN)
        assert checkpointer.restore(state) == 1
        assert is_state_of(state, 0, 1)
        _trained(checkpointer, {**state, "more": torch.ones(1 << 20)}, 2, 6)
        assert checkpointer.restore(larger) == 6
        assert is_state_of(larger, 0, 6)
        assert larger["more"].min() == 1


def test_values_that_grow(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        for step in range(1, 6):
            state = {"w": torch.full((100,), float(step)), "log": {"text": "x" * 10_000 * step}}
            checkpointer.snapshot(state, step)
        found = {"w": torch.zeros(100), "log": {"text": ""}}
        assert checkpointer.restore(found) == 5
        assert found["log"]["text"] == "x" * 50_000


def test_compressed_saves(tmp_path: Path, leak_check: LeakCheck) -> None:
    """What is in slots is never compressed, so that it can be restored all the same."""
    with ckpt.Checkpointer(tmp_path, snapshots=1, staging=ckpt.Staging(compression="zstd")) as checkpointer:
        state = fresh()
        train_step(state, 0, 1)
        save_here(checkpointer, state, 1)
        _trained(checkpointer, state, 2, 2)
        train_step(state, 0, 3)
        assert checkpointer.restore(state) == 2
        assert is_state_of(state, 0, 2)
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.tier == "own memory"


def test_read_only(tmp_path: Path) -> None:
    with (
        ckpt.Checkpointer(tmp_path, read_only=True) as checkpointer,
        pytest.raises(ckpt.errors.CheckpointError, match="read_only"),
    ):
        checkpointer.snapshot(fresh(), 1)


def _assert_next_save_continues_step_1(checkpointer: ckpt.Checkpointer, state: Any) -> None:
    train_step(state, 0, 4)
    save_here(checkpointer, state, 4)
    assert checkpointer.all_steps() == [1, 4]
    document = json.loads((Path(checkpointer.root) / "step_00000004" / "intent.json").read_text())
    assert document["continues"]["step"] == 1


def test_the_next_save_continues_what_was_published(tmp_path: Path, leak_check: LeakCheck) -> None:
    """Not the snapshot that was restored, of which storage knows nothing."""
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        train_step(state, 0, 1)
        save_here(checkpointer, state, 1)
        _trained(checkpointer, state, 2, 3)
        checkpointer.bridge.recover_from_fault(_DRAIN)
        assert checkpointer.restore(state) == 3
        _assert_next_save_continues_step_1(checkpointer, state)


def test_a_branch_that_was_left_is_superseded_after_a_restore_from_memory(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    """Training goes back to step 1, and after a fault on from a snapshot; only then there is a save."""
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        for step in (1, 2):
            train_step(state, 0, step)
            save_here(checkpointer, state, step)
        assert checkpointer.restore(state, 1) == 1
        _trained(checkpointer, state, 2, 3)
        checkpointer.bridge.recover_from_fault(_DRAIN)
        assert checkpointer.restore(state) == 3
        _assert_next_save_continues_step_1(checkpointer, state)


def test_the_next_save_continues_what_was_published_if_the_registered_state_was_restored(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    """As `CheckpointInitialize` does it, when there is no process group yet."""
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = fresh()
        checkpointer.register(**state)
        checkpointer.bridge.leave_restoring_to_next_iteration()
        train_step(state, 0, 1)
        save_here(checkpointer, state, 1)
        _trained(checkpointer, state, 2, 3)
        checkpointer.bridge.recover_from_fault(_DRAIN)
        checkpointer.bridge.restore_registered(StoreRanks(0, 1, None, 10), 1)
        assert checkpointer.resume_step == 3
        _assert_next_save_continues_step_1(checkpointer, state)


# -- several ranks -----------------------------------------------------------------------------------------------------


def _starved(rank: int, world_size: int, root: Path) -> str:
    """Rank 1 makes one snapshot, rank 0 goes on."""
    with ckpt.Checkpointer(root, snapshots=1, timeout=timedelta(seconds=5)) as checkpointer:
        state = fresh()
        checkpointer.snapshot(state, 1)
        error = ""
        if rank == 0:
            try:
                for step in range(2, 9):
                    checkpointer.snapshot(state, step)
            except ckpt.errors.CheckpointTimeoutError as timeout:
                error = str(timeout)
        dist.barrier()
        for step in range(9, 12):  # both again
            checkpointer.snapshot(state, step)
        dist.barrier()
        assert checkpointer.restore(state) == 11
        return error


def test_a_rank_that_makes_no_snapshots(tmp_path: Path) -> None:
    error, _ = (result.value for result in run_ranks(_starved, 2, tmp_path))
    assert "no staging slot became free in 5 s; snapshots of steps [1, 2, 3] are held until a newer one is" in error
    assert "that of step 3 is on 1 of 2" in error


def _of_two_roots(rank: int, world_size: int, folder: Path) -> list[int | None]:
    """Make snapshots with two Checkpointers; rank 1 always comes after rank 0."""
    state, steps = fresh(), range(1, 9)
    with contextlib.ExitStack() as stack:
        two = [
            stack.enter_context(ckpt.Checkpointer(folder / name, snapshots=1, timeout=timedelta(seconds=10)))
            for name in ("first", "second")
        ]
        for checkpointer in two:
            checkpointer.warmup(state)
        for step in steps:
            train_step(state, rank, step)
            for turn in range(world_size):
                if turn == rank:
                    for checkpointer in two:
                        checkpointer.snapshot(state, step)
                dist.barrier()
        return [checkpointer.restore(state) for checkpointer in two]


def test_two_checkpointers_of_one_process_group(tmp_path: Path) -> None:
    assert [result.value for result in run_ranks(_of_two_roots, 2, tmp_path)] == [[8, 8], [8, 8]]


def _back_by_itself(rank: int, world_size: int, root: Path) -> tuple[int | None, list[float]]:
    """Make step 2 twice, without a restore between; rank 1 does not come to the second one."""
    with ckpt.Checkpointer(root, snapshots=1, timeout=timedelta(seconds=30)) as checkpointer:
        state = {"weights": {f"w{i}": torch.zeros(20_000) for i in range(4)}}
        for step, value in ((1, 1.0), (2, 2.0), (1, 10.0), (2, 20.0)):
            for tensor in state["weights"].values():
                tensor.fill_(value)
            if (rank, value) != (1, 20.0):
                checkpointer.snapshot(state, step)
            dist.barrier()
        checkpointer.bridge.recover_from_fault(_DRAIN, rank)
        step = checkpointer.restore(state)
        return step, [value for tensor in state["weights"].values() for value in tensor.unique().tolist()]


def test_a_step_that_is_made_twice(tmp_path: Path) -> None:
    """What ranks have of the first one and of the second one is never taken for one snapshot."""
    for result in run_ranks(_back_by_itself, 2, tmp_path):
        assert result.value == (1, 4 * [10.0])  # the one before, which is later than the first one of step 2


def _recovered_twice(rank: int, world_size: int, root: Path) -> list[int]:
    """Fill all slots, recover twice with the process group that there is, and go on."""
    state = {"w": torch.zeros(1000)}
    with ckpt.Checkpointer(root, snapshots=1, timeout=timedelta(seconds=20)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.snapshot(state, step)
        for _ in range(2):
            checkpointer.bridge.recover_from_fault(_DRAIN)
            checkpointer.maybe_finalize()  # looks after snapshots
        dist.barrier()
        for step in (4, 5, 6, 7):
            checkpointer.snapshot(state, step)
        return checkpointer._parts.saver.snapshots.steps


def test_a_rank_counts_once_after_a_fault_that_leaves_the_process_group(tmp_path: Path) -> None:
    """Else more have counted than there are ranks, no snapshot is ever complete, and no slot becomes free."""
    for result in run_ranks(_recovered_twice, 3, tmp_path):
        assert result.value[-1] == 7
        assert len(result.value) <= 3


def _held() -> dict[str, Any]:
    """What this process and its children hold, but for memory that the allocator has not given back."""
    maps = Path("/proc/self/maps").read_text()
    held: dict[str, Any] = {"mapped": maps.count("ckpt-slot"), "threads": threading.active_count()}
    for process in (psutil.Process(), *descendants()):
        links = {int(link.name): os.stat(link) for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.exists()}
        shared = {found.st_ino: found.st_size for fd, found in links.items() if _is_memfd(process.pid, fd)}
        if process.name() == "ckpt-writer":  # attaches to a slot when that is first saved from
            assert len(shared) <= 1 + 5
            assert len(links) <= 24
        else:
            held[f"{process.name()} {process.pid}"] = len(links), len(shared), sum(shared.values()) >> 20
    return held


def _is_memfd(pid: int, fd: int) -> bool:
    return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:ckpt")


def _two_hundred(rank: int, world_size: int, root: Path, replicas: bool) -> list[Any]:
    """A snapshot of every step, and now and then a save. Returns what was held after 60 and after all, and more."""
    snapshots = ckpt.Snapshots(1, replicas=1, place=f"place {rank}") if replicas else ckpt.Snapshots(1)
    with ckpt.Checkpointer(root, snapshots=snapshots, save_every=50, keep=1) as checkpointer:
        state, found, resident = fresh(), [], []
        for step in range(1, 202):
            train_step(state, rank, step)
            checkpointer.step(state, step)
            if step in (60, 201):
                checkpointer.maybe_finalize(blocking=True)
                while replicas and checkpointer.replicated_step != step:
                    checkpointer.maybe_finalize()
                deadline = time.monotonic() + 20
                while (held := _held()) != (found or [None])[0] and step == 201 and time.monotonic() < deadline:
                    time.sleep(0.01)  # what ends just now, as the connection of the last replica
                found.append(held)
                resident.append(psutil.Process().memory_info().rss)
                dist.barrier()
        store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        keys = store.num_keys()
        dist.barrier()
        assert checkpointer.restore(state) == 201
        assert is_state_of(state, rank, 201)
        return [*found, resident[1] - resident[0], keys]


@pytest.mark.parametrize("replicas", [pytest.param(False, marks=full_only), True])
def test_nothing_grows_in_two_hundred_snapshots(tmp_path: Path, replicas: bool) -> None:
    for result in run_ranks(_two_hundred, 2, tmp_path, replicas):
        before, after, growth, keys = result.value
        assert after == before
        assert growth < 8 << 20  # that of a slot in each snapshot is 28 MB
        assert keys < 24  # those of snapshots that are just being counted, and rounds of meetings


def _sharded(rank: int, world_size: int, root: Path) -> None:
    """Four ranks with FSDP2, then two ranks of them, and one that holds all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(33, 64), torch.nn.Linear(64, 7))

    sharded = model(1)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size,)))
    with ckpt.Checkpointer(root, snapshots=1) as checkpointer:
        checkpointer.snapshot({"model": sharded}, 5)
        other = model(2)
        fully_shard(other, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s")))
        assert checkpointer.restore({"model": other}) == 5
        whole = model(3)
        assert checkpointer.restore({"model": whole}) == 5
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.storage_bytes == 0
        expected = model(1)
        for name, tensor in whole.state_dict().items():
            assert tensor.equal(expected.state_dict()[name])
        for name, tensor in other.state_dict().items():
            assert tensor.full_tensor().equal(expected.state_dict()[name])


def test_another_sharding(tmp_path: Path) -> None:
    run_ranks(_sharded, 4, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_fewer_ranks_go_on(tmp_path: Path) -> None:
    """Two of four ranks are killed, and there are no spares: two go on from what is in memory of all four."""
    at = Faults(("kill", 0, 1, 5), ("kill", 0, 2, 5))
    codes = {0: 0, 1: -signal.SIGKILL, 2: -signal.SIGKILL, 3: 0}
    results = run_ranks(
        resized, 4, tmp_path / "root", at, returncodes=codes, init_process_group=False, env={"LOGLEVEL": "INFO"}
    )
    begun = [entry for result in results if result.value for entry in result.value if entry[0] == 1]
    assert begun == [(1, rank, 4, "neighbour memory", True) for rank in (0, 1)]
    assert not (tmp_path / "root").exists()


def test_a_second_fault_before_the_next_snapshot(tmp_path: Path) -> None:
    """What the dead rank had in memory is still there."""
    at = Faults(("kill", 0, 2, 5), ("raise", 1, 0, 5))
    results = run_ranks(
        restarted,
        5,
        tmp_path / "root",
        at,
        4,
        returncodes={rank: -signal.SIGKILL if rank == 2 else 0 for rank in range(5)},
        init_process_group=False,
        env={"LOGLEVEL": "INFO"},
    )
    begun = [entry for result in results if result.value for entry in result.value if entry[0] > 0]
    assert sorted(entry[:3] for entry in begun) == [(i, rank, 4) for i in (1, 2) for rank in range(4)]
    assert all(entry[4] for entry in begun)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "victims", [pytest.param((2,), id="one", marks=full_only), pytest.param((0, 1, 3), id="all-but-one")]
)
def test_replaced_processes_get_their_shares_from_a_neighbour(tmp_path: Path, victims: tuple[int, ...]) -> None:
    """Under the launcher, which starts a process for each that was killed."""
    program = Path(__file__).with_name("snapshot_program.py")
    launcher = [quick_python(), "-m", "inprocess.fault_tolerance.launcher", "--standalone", "--nproc-per-node=4"]
    command = [*launcher, "--ft-restart-policy=in-process", str(program), str(tmp_path), *map(str, victims)]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYTHON_EXEC": quick_python(),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    began = re.findall(r"began (\d+) (\d) (\w+) ([a-z ]*) (True|False)$", done.stdout, re.MULTILINE)
    assert {entry[4] for entry in began} == {"True"}
    restarts = {int(entry[0]) for entry in began if entry[0] != "0"}
    assert {entry[2] for entry in began if int(entry[0]) in restarts} == {"4"}, done.stdout
    last = [entry for entry in began if int(entry[0]) == max(restarts)]
    assert sorted(entry[1] for entry in last) == ["0", "1", "2", "3"]
    assert sum(entry[3] == "neighbour memory" for entry in last) >= len(victims)
    assert not (tmp_path / "root").exists()
