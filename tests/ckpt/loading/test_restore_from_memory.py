"""After a fault the state comes back from staging memory where that is sound, and from storage where it is not."""

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.loading.restore_step import RestoreReport
from ckpt.saving import staged_memory
from ckpt.saving.share import HEADER_BYTES
from inprocess.ipc.shared_memory import SharedMemory
from tests.support import LeakCheck, layouts, rank_values
from tests.support.saves import save_here

_Save = Callable[[ckpt.Checkpointer, Any, int], None]
_DRAIN = timedelta(seconds=30)
_FLOATS = 50_000
_BYTES = 3 * 4 * _FLOATS + 8


def _state(value: float) -> dict[str, Any]:
    tensors = {f"w{i}": torch.arange(_FLOATS, dtype=torch.float32) * value + i for i in range(3)}
    return {"tensors": tensors, "small": torch.tensor([value, value]), "numbers": {"value": value}}


def _fill(state: dict[str, Any], value: float) -> None:
    new = _state(value)
    for name, tensor in new["tensors"].items():
        state["tensors"][name].copy_(tensor)
    state["small"].copy_(new["small"])
    state["numbers"]["value"] = value


def _is(state: dict[str, Any], value: float) -> bool:
    expected = _state(value)
    same = all(state["tensors"][name].equal(tensor) for name, tensor in expected["tensors"].items())
    return same and state["small"].equal(expected["small"]) and state["numbers"]["value"] == value


def _saved(root: Path, save: _Save = save_here, **staging: Any) -> tuple[ckpt.Checkpointer, dict[str, Any]]:
    """Value 1.0 is saved as step 1, and registered; training has gone on to 2.0."""
    checkpointer = ckpt.Checkpointer(root, staging=ckpt.Staging(**staging))
    state = _state(1.0)
    checkpointer.register(**state)
    save(checkpointer, state, 1)
    _fill(state, 2.0)
    return checkpointer, state


def _report(checkpointer: ckpt.Checkpointer) -> RestoreReport:
    report = checkpointer.last_restore
    assert report is not None
    return report


def test_own_slot_and_no_read_of_array_data(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _saved(tmp_path, ckpt.Checkpointer.save)
    for _ in (1, 2):  # the second fault comes before anything was saved again
        _fill(state, 2.0)
        for chunk in tmp_path.glob("step_*/packs/*/*"):
            chunk.unlink()
        checkpointer.bridge.recover_from_fault(_DRAIN)
        report = _report(checkpointer)
        assert (report.own_memory_bytes, report.neighbour_memory_bytes, report.storage_bytes) == (_BYTES, 0, 0)
        assert _is(state, 1.0)
    checkpointer.close()


@pytest.mark.parametrize("value", [1, 2.5, "text", None, (1, 2)])
def test_what_cannot_be_put_back_in_place_is_refused(tmp_path: Path, value: Any) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match="register a dict"):
        checkpointer.register(progress=value)


def test_restore_finds_it_in_memory_too(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _saved(tmp_path)
    assert checkpointer.restore(state) == 1
    assert _report(checkpointer).storage_bytes == 0
    assert _is(state, 1.0)
    checkpointer.close()


def test_a_byte_that_has_changed_in_memory(
    tmp_path: Path, slots: list[SharedMemory], caplog: pytest.LogCaptureFixture, leak_check: LeakCheck
) -> None:
    checkpointer, state = _saved(tmp_path)
    for slot in slots:
        slot.buffer[1000] ^= 1
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert _report(checkpointer).own_memory_bytes == 0
    assert _report(checkpointer).storage_bytes >= _BYTES
    assert _is(state, 1.0)
    assert "does not hold what was written" in caplog.text
    checkpointer.close()


def test_a_slot_that_a_newer_save_was_staged_over(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _saved(tmp_path, slots=1)
    checkpointer.save_request(state, 2)  # and never scheduled
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert _report(checkpointer).own_memory_bytes == 0
    assert _is(state, 1.0)
    checkpointer.close()


def test_a_slot_that_is_staged_over_while_it_is_read(
    tmp_path: Path, slots: list[SharedMemory], monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    checkpointer, state = _saved(tmp_path)
    unstage = staged_memory.unstage

    def overtaken(copies: Any, tensors: Any, slot: torch.Tensor) -> Any:
        slot[-HEADER_BYTES:] = 0  # as the owner does before it stages
        slot[:-HEADER_BYTES] = 77
        return unstage(copies, tensors, slot)

    monkeypatch.setattr(staged_memory, "unstage", overtaken)
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert _report(checkpointer).own_memory_bytes == 0
    assert _report(checkpointer).storage_bytes >= _BYTES
    assert _is(state, 1.0)
    checkpointer.close()


def test_what_is_not_kept_as_it_is_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, leak_check: LeakCheck
) -> None:
    """Compressed arrays come from storage, without a complaint."""
    checkpointer, state = _saved(tmp_path, compression="zstd")
    caplog.clear()
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert _report(checkpointer).own_memory_bytes == 0
    assert _is(state, 1.0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    checkpointer.close()


def test_a_step_that_is_damaged_on_storage_is_not_passed_over(tmp_path: Path, leak_check: LeakCheck) -> None:
    """The others may have it in memory: going back alone would part the ranks."""
    checkpointer, state = _saved(tmp_path, slots=1, compression="zstd")
    save_here(checkpointer, state, 2)
    for chunk in tmp_path.glob("step_00000002/packs/*/*"):
        chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    with pytest.raises(ckpt.errors.CheckpointError):
        checkpointer.bridge.recover_from_fault(_DRAIN)
    assert checkpointer.resume_step is None
    checkpointer.close()


# -- several ranks -----------------------------------------------------------------------------------------------------


def _join(rank: int, world_size: int, name: str) -> None:
    import torch.distributed as dist

    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world_size)


def _fewer(rank: int, world_size: int, root: Path) -> tuple[RestoreReport, bool, str] | None:
    """Rank 0 is lost; rank 1 goes on alone, as rank 0."""
    import torch.distributed as dist

    _join(rank, world_size, "first")
    checkpointer = ckpt.Checkpointer(root)
    state = {**_state(1.0), "own": ckpt.PerRank({"rank": rank, "tensor": torch.full((3000,), float(rank))})}
    checkpointer.register(**state)
    checkpointer.save(state, 1)
    _fill(state, 2.0)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        checkpointer.close()  # its memory is gone, except for what rank 1 has of it
        return None
    checkpointer.bridge.recover_from_fault(_DRAIN)
    first = _report(checkpointer)
    assert (state["own"].value["rank"], _is(state, 1.0)) == (1, True)
    assert first.storage_bytes == 0, first
    _fill(state, 2.0)
    checkpointer.restore(state)  # no process group: one rank, number 0
    report, right = _report(checkpointer), _is(state, 1.0)
    own = f"{state['own'].value['rank']} {float(state['own'].value['tensor'][0])}"
    checkpointer.save(state, 2)
    checkpointer.close()
    for thread in threading.enumerate():
        if thread.name == "ckpt-arena-free":  # closing does not wait for it
            thread.join()
    left = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ckpt" in line]
    assert left == []
    return report, right, own


def test_the_last_of_two_ranks_reads_what_the_lost_one_had_staged(tmp_path: Path) -> None:
    _, answer = rank_values(_fewer, 2, tmp_path, timeout=50)
    report, right, own = answer
    assert right
    assert report.neighbour_memory_bytes > 0
    assert report.storage_bytes == 0
    assert own == "0 0.0"


def _layouts(rank: int, world_size: int, root: Path) -> list[str]:
    import torch.distributed as dist

    _join(rank, world_size, "layouts")
    state = layouts.build(world_size)
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.register(everything=state)
        save_here(checkpointer, {"everything": state}, 1)
        layouts.clear(state)
        dist.barrier()
        checkpointer.bridge.recover_from_fault(_DRAIN)
        report = _report(checkpointer)
        wrong = layouts.differences(state, layouts.build(world_size))
        dist.barrier()
    if report.storage_bytes or not report.own_memory_bytes:
        wrong.append(str(report))
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_of_every_kind(tmp_path: Path, world_size: int) -> None:
    """DTensor in all placements, FSDP, HSDP, tensor parallelism."""
    assert rank_values(_layouts, world_size, tmp_path, timeout=50) == [[]] * world_size


def _different_names(rank: int, world_size: int, root: Path) -> tuple[int | None, float, int]:
    """As the stages of a pipeline: each rank has names that no other knows."""
    import torch.distributed as dist

    _join(rank, world_size, "names")
    state = {"all": torch.ones(3000), f"stage{rank}": torch.full((4000,), float(rank))}
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.register(**state)
        save_here(checkpointer, state, 1)
        state[f"stage{rank}"].zero_()
        dist.barrier()
        checkpointer.bridge.recover_from_fault(_DRAIN)
        dist.barrier()
        answer = checkpointer.resume_step, float(state[f"stage{rank}"][7]), _report(checkpointer).storage_bytes
    dist.destroy_process_group()
    return answer


def test_names_that_only_other_ranks_know(tmp_path: Path) -> None:
    assert rank_values(_different_names, 2, tmp_path, timeout=50) == [(1, 0.0, 0), (1, 1.0, 0)]


def _alone(rank: int, world_size: int, root: Path) -> bool:
    """The last rank does not save before the others have staged their share."""
    import torch.distributed as dist

    _join(rank, world_size, "alone")
    store = dist.distributed_c10d._get_default_store()
    state = _state(1.0)
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.register(**state)
        checkpointer.save(state, 1)
        checkpointer.bridge.recover_from_fault(_DRAIN)
        assert checkpointer.restore(state) == 1
        if rank == world_size - 1:
            store.wait([f"staged {other}" for other in range(rank)], timedelta(seconds=30))
        checkpointer.async_save(state, 2)
        store.set(f"staged {rank}", "")
        checkpointer.maybe_finalize(blocking=True)
        dist.barrier()
        return checkpointer.all_steps() == [1, 2]


def test_the_first_save_after_a_restore_waits_for_no_rank(tmp_path: Path) -> None:
    assert rank_values(_alone, 3, tmp_path, timeout=50) == [True] * 3


@pytest.mark.parametrize("slots", [1, 2])
def test_the_newest_step_when_later_saves_are_given_up(tmp_path: Path, slots: int) -> None:
    """It stays in memory where there is a second slot; else a save that was staged is in the only one."""
    state = {"w": torch.arange(100_000, dtype=torch.float32)}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.register(**state)
        for step in range(slots):
            checkpointer.save_request(state, step)  # none is free for the next one
        checkpointer.bridge.recover_from_fault(None)
        save_here(checkpointer, state, 1)
        for step in (2, 3, 4):
            state["w"] += 1
            checkpointer.save_request(state, step)  # staged, and interrupted before it was scheduled
            checkpointer.bridge.recover_from_fault(None)
            assert checkpointer.resume_step == 1
            report = checkpointer.last_restore
            assert report is not None
            assert (report.own_memory_bytes, report.storage_bytes) == ((400_000, 0) if slots == 2 else (0, 400_000))
            assert state["w"][:3].tolist() == [0, 1, 2]
