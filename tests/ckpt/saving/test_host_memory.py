"""A state that needs more staging memory than `max_host_bytes` is refused on all ranks, before anything is copied."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.errors import StateError
from tests.support import LeakCheck, run_ranks
from tests.support.saves import save_here

_SMALL_BYTES = 1 << 20  # enough for `_small`, and not for `_large`
_SHAPES: dict[str, dict[str, Any]] = {
    "one file": {},
    "one slot": {"slots": 1},
    "small files": {"file_bytes": 100_000, "inner_bytes": 20_000},
    "zstd": {"compression": "zstd", "file_bytes": 300_000},
}


def _small(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "value": value}


def _large(value: float) -> dict[str, Any]:
    return {f"w{number}": torch.full((70_001,), value + number) for number in range(9)} | {"value": value}


def _refused(function: Any, *arguments: Any) -> StateError:
    with pytest.raises(StateError, match="host memory") as caught:
        function(*arguments)
    return caught.value


def _staging_bytes(checkpointer: ckpt.Checkpointer) -> int:
    return sum(slot.region.size for slot in checkpointer._parts.saver._stager.all_slots)


def _needed(error: StateError) -> int:
    found = re.search(r"needs (\d+) bytes", str(error))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("shape", _SHAPES)
def test_the_limit_is_that_of_all_slots_together(tmp_path: Path, shape: str, leak_check: LeakCheck) -> None:
    """The error says what is enough, to the byte; with one byte less nothing is staged."""
    options = _SHAPES[shape]
    with ckpt.Checkpointer(tmp_path / "refused", staging=ckpt.Staging(max_host_bytes=1, **options)) as checkpointer:
        needed = _needed(_refused(checkpointer.save, _large(1.0), 1))
    less = ckpt.Staging(max_host_bytes=needed - 1, **options)
    with ckpt.Checkpointer(tmp_path / "refused", staging=less) as checkpointer:
        error = _refused(checkpointer.save, _large(1.0), 1)
        assert error.rank == 0
        for part in (f"needs {needed} bytes", f"max_host_bytes={needed - 1}", f"at least {needed}", "more ranks"):
            assert part in str(error)
        assert ("slots=1" in str(error)) == (shape != "one slot")
        assert _staging_bytes(checkpointer) == 0
        assert checkpointer.all_steps() == []
    enough = ckpt.Staging(max_host_bytes=needed, **options)
    with ckpt.Checkpointer(tmp_path / "saved", staging=enough) as checkpointer:
        save_here(checkpointer, _large(2.0), 2)
        assert _staging_bytes(checkpointer) == needed
        restored = _large(0.0)
        assert checkpointer.restore(restored) == 2
    assert all(torch.equal(value, restored[name]) for name, value in _large(2.0).items() if name != "value")


def _with_limits(rank: int, world_size: int, root: Path, shards: bool) -> list[str]:
    """Rank 1 may have less than rank 0. What is refused there is refused on both; smaller states are saved."""
    limit = _SMALL_BYTES if rank == 1 else 1 << 30
    large = _large(1.0)
    if shards:
        mesh = init_device_mesh("cpu", (world_size,))
        large = {"w": distribute_tensor(torch.arange(800_000.0), mesh, [Shard(0)])}
    refusals = []
    with ckpt.Checkpointer(root, staging=ckpt.Staging(max_host_bytes=limit, slots=3)) as checkpointer:
        for function, *arguments in (
            (checkpointer.save, large, 1),
            (checkpointer.async_save, large, 1),
            (checkpointer.warmup, large),
            (checkpointer.snapshot, large, 1),
        ):
            error = _refused(function, *arguments)
            refusals.append(f"{error.rank}: {error}")
            assert _staging_bytes(checkpointer) == 0
        checkpointer.save(_small(2.0), 2)
        refusals.append(str(_refused(checkpointer.async_save, large, 3)))
        checkpointer.save(_small(4.0), 4)
        assert checkpointer.all_steps() == [2, 4]
    return refusals


@pytest.mark.parametrize("shards", [False, True])
def test_what_one_rank_may_not_have_is_refused_on_all(tmp_path: Path, shards: bool) -> None:
    first, second = (result.value for result in run_ranks(_with_limits, 2, tmp_path, shards))
    assert first == second
    assert all(text.startswith("1: rank 1 needs ") for text in first[:-1])
    assert len(set(first[:-1])) == 1
    assert list((tmp_path / ".pending").iterdir()) == []


def _restore_and_save(rank: int, world_size: int, root: Path) -> tuple[list[int | None], str]:
    with ckpt.Checkpointer(root, staging=ckpt.Staging(max_host_bytes=_SMALL_BYTES)) as checkpointer:
        state = _large(0.0)
        steps = [checkpointer.restore(state) for _ in range(3)]
        assert state["value"] == 1.0
        error = _refused(checkpointer.async_save, state, 2)
        _refused(checkpointer.async_save, state, 2)
        save_here(checkpointer, _small(3.0), 3)
        return steps, str(error)


def test_a_restore_is_not_refused(tmp_path: Path) -> None:
    """It begins to plan the next save, which is the one that is refused."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, _large(1.0), 1)
    first, second = (result.value for result in run_ranks(_restore_and_save, 2, tmp_path))
    assert first == second
    assert first[0] == [1, 1, 1]
