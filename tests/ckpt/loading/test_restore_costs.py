"""Costs of a save and a restore in the trainer, counted rather than timed."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt import AsyncCallsQueue, Checkpointer, PerRank, Snapshots, Staging, load
from ckpt.ranks import collectives
from ckpt.saving import plan_cache
from ckpt.storage import step_source
from ckpt.validation import validate
from tests.support import run_ranks
from tests.support.calls import count_calls
from tests.support.saves import save_here
from tests.support.selection import full_only

_MB = 1 << 20


def _read_of_files(paths: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the first byte and the end of every part of a file that the compiled code is asked for."""
    parts: list[tuple[int, int]] = []
    real = step_source.read_checked

    def recorded(fd: int, segments: Any) -> bool:
        assert paths in os.readlink(f"/proc/self/fd/{fd}")
        for base, block, at, _, size, rows, step, _ in segments.tolist():
            last = at + (rows - 1) * step + size - 1
            parts.append((base + at // block * (block + 4), base + (last // block + 1) * (block + 4)))
        return real(fd, segments)

    monkeypatch.setattr(step_source, "read_checked", recorded)
    return parts


def test_a_restore_reads_each_needed_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{n}": torch.randn(100, 50) for n in range(5)} | {f"s{n}": torch.randn(7) for n in range(50)}
    with Checkpointer(tmp_path, staging=Staging(inner_bytes=4096, file_bytes=1 << 20)) as checkpointer:
        save_here(checkpointer, state, 1)
    with Checkpointer(tmp_path) as checkpointer:  # another one, which has nothing in memory
        parts = _read_of_files("/packs/000/rank_00000_000", monkeypatch)
        checkpointer.restore({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    parts.sort()
    assert all(one[1] <= other[0] for one, other in pairwise(parts))
    needed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert needed < sum(end - start for start, end in parts) < 1.01 * needed + 55 * 8
    assert len(parts) == 60, "one record for each tensor, and one for the index of each shard"


def test_a_restore_runs_little_python_for_each_of_many_tensors(tmp_path: Path) -> None:
    """In calls for each: 52 and 83 when objects were made for the read of each tensor."""
    count = 3000
    state = {f"layers.{n}.weight": torch.randn(8) for n in range(count)}
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, state, 1)
    own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        checkpointer.restore(own, only=["layers.0.weight"])  # imports
        step, calls = count_calls(checkpointer.restore, own)
    assert step == 1
    assert all(torch.equal(own[name], tensor) for name, tensor in state.items())
    assert calls < 26 * count
    loaded, calls = count_calls(load, tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert calls < 42 * count


def _reshard(rank: int, world_size: int, root: Path, save: bool) -> float:
    """Return the bytes read for each byte that this rank needs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    full = {f"w{n}": torch.arange(1024.0 * (700 + 100 * n)).reshape(-1, 1024) for n in range(6)}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items()}
    with Checkpointer(root) as checkpointer:
        if save:
            save_here(checkpointer, state, 1)
            return 0.0
        wanted = {name: tensor.to_local().clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.to_local().zero_()
        with pytest.MonkeyPatch.context() as patch:
            parts = _read_of_files("/packs/000/", patch)
            checkpointer.restore(state)
        assert all(torch.equal(state[name].to_local(), tensor) for name, tensor in wanted.items())
        needed = sum(tensor.numel() * tensor.element_size() for tensor in wanted.values())
        return sum(end - start for start, end in parts) / needed


@pytest.mark.parametrize(
    ("before", "after"), [(4, 3), *(pytest.param(*ranks, marks=full_only) for ranks in ((3, 2), (8, 5)))]
)
def test_another_number_of_ranks_reads_little_more_than_it_needs(tmp_path: Path, before: int, after: int) -> None:
    run_ranks(_reshard, before, tmp_path, True)
    for result in run_ranks(_reshard, after, tmp_path, False):
        assert result.value <= 1.1


def _beside_a_slow_rank(rank: int, world_size: int, root: Path) -> list[str]:
    """Return what this rank prepared for the next save before the slowest rank, the last one, had its bytes."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    has_read = root / "has_read"
    state = {"tensor": torch.ones(_MB // 2)}  # one read
    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, state, 1)
    dist.barrier()
    early: list[str] = []
    prepared: list[str] = []
    is_waiting = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" or (event == "mmap.__new__" and args[1] >= _MB // world_size):
            (prepared if has_read.exists() else early).append(event)

    real_read, real_meet = step_source.read_checked, collectives.meet

    def read(fd: int, segments: Any) -> bool:
        nonlocal is_waiting
        if rank == world_size - 1:
            store.wait([f"waits {other}" for other in range(rank)], timedelta(seconds=30))
        whole = real_read(fd, segments)
        if rank == world_size - 1:
            has_read.touch()
        is_waiting = True
        return whole

    def meet(*args: Any) -> None:
        if is_waiting:
            store.set(f"waits {rank}", "")
        real_meet(*args)

    with Checkpointer(root) as checkpointer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_source, "read_checked", read)
        patch.setattr(collectives, "meet", meet)
        sys.addaudithook(hook)
        assert checkpointer.restore(state) == 1
        checkpointer.save(state, 2)
        assert {"subprocess.Popen", "mmap.__new__"} <= set(prepared), "what is looked for is seen"
    return early


def test_the_next_save_is_prepared_when_the_slowest_rank_has_its_bytes(tmp_path: Path) -> None:
    for result in run_ranks(_beside_a_slow_rank, 3, tmp_path, survivors_timeout=20):
        assert result.value == []


def _peak(rank: int, world_size: int, root: Path, save: bool) -> int:
    """Return how much the peak of this process's memory rose, in bytes, above its size with the state."""
    state = {"big": torch.ones(60 * _MB), "half": torch.ones(40, _MB, dtype=torch.float32)}
    state |= {f"m{n}": torch.ones(n + 1, 1000) for n in range(300)}
    small = {"tensor": torch.ones(9999)}
    if save:
        for name, each in (("small", small), ("big", state)):
            with Checkpointer(root / name) as checkpointer:
                save_here(checkpointer, each, 1)
        return 0
    from ckpt.loading.options import RestoreOptions
    from ckpt.loading.restore import Tiers, restore
    from ckpt.ranks.collectives import Ranks
    from ckpt.storage.root import CheckpointRoot

    for tensor in state.values():
        tensor.zero_()
    restore(Tiers(CheckpointRoot(str(root / "small"))), small, None, RestoreOptions(), Ranks())  # loads libraries
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    report = restore(Tiers(CheckpointRoot(str(root / "big"))), state, None, RestoreOptions(), Ranks())
    assert report is not None
    assert report.step == 1
    rise = _status("VmHWM") - before
    assert all(float(tensor.min()) == float(tensor.max()) == 1 for tensor in state.values())
    return rise


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def test_a_restore_makes_no_second_copy(tmp_path: Path) -> None:
    """The state has 400 MB, in tensors of up to 240 MB."""
    run_ranks(_peak, 1, tmp_path, True, init_process_group=False)
    rise = run_ranks(_peak, 1, tmp_path, False, init_process_group=False)[0].value
    assert rise < 160 * _MB, f"{rise / _MB:.0f} MB"


_TOUCHES_FILES = ("open", "os.", "shutil.", "pathlib.", "tempfile.", "glob.", "subprocess.")


class _Watch:
    """Notes audit events of file system accesses, and collectives, while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self._seen: list[str] = []
        sys.addaudithook(self._hook)
        for name in ("all_gather", "all_reduce", "barrier", "broadcast", "all_gather_object", "all_gather_into_tensor"):
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        of_descriptor = event == "open" and isinstance(args[0], int)  # without a path: no file system access
        if self.on and event.startswith(_TOUCHES_FILES) and not of_descriptor:
            self._seen.append(f"{event} {args}")

    def _counted(self, name: str, real: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                self._seen.append(name)
            return real(*args, **kwargs)

        return counted

    def seen(self, do: Callable[[], object]) -> list[str]:
        """Do something, and return what was seen meanwhile."""
        self._seen.clear()
        self.on = True
        do()
        self.on = False
        return list(self._seen)


def _trained_state() -> tuple[dict[str, Any], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": PerRank(torch.get_rng_state()), "step": 0}, optimizer


def _watched(rank: int, world_size: int, root: Path) -> list[list[str]]:
    """Return the audit events and collectives of several saves: making and scheduling a request, and its end."""
    watch = _Watch()
    state, optimizer = _trained_state()
    rounds = []
    with AsyncCallsQueue() as queue, Checkpointer(root, queue=queue) as checkpointer:
        checkpointer.warmup(state)
        for step in range(1, 4):
            state["step"] = step

            def schedules(step: int = step) -> None:
                queue.schedule_async_request(checkpointer.save_request(state, step))

            rounds.append(watch.seen(schedules))
            optimizer.step()
            rounds.append(watch.seen(functools.partial(checkpointer.maybe_finalize, blocking=True)))
        assert checkpointer.all_steps() == [1, 2, 3]
        other = {"model": torch.nn.Linear(64, 64), "step": 1}
        # Another structure is planned, which shows that the counting works.
        assert watch.seen(lambda: checkpointer.save_request(other, 4)).count("all_gather") > 0
    return rounds


def _watched_snapshots(rank: int, world_size: int, root: Path) -> list[list[str]]:
    """Return the same of several snapshots, behind the first one."""
    watch = _Watch()
    state, optimizer = _trained_state()
    rounds = []
    with Checkpointer(root, snapshots=Snapshots()) as checkpointer:
        checkpointer.warmup(state)
        for step in range(1, 6):
            state["step"] = step
            seen = watch.seen(functools.partial(checkpointer.snapshot, state, step))
            if step > 1:
                rounds.append(seen)
            optimizer.step()
    return rounds


def test_a_snapshot_makes_no_collective_and_touches_no_file(tmp_path: Path) -> None:
    for result in run_ranks(_watched_snapshots, 2, tmp_path / "root", survivors_timeout=20):
        assert result.value == [[], [], [], []]


def test_a_save_makes_no_collective_and_touches_no_file(tmp_path: Path) -> None:
    for result in run_ranks(_watched, 2, tmp_path / "root", survivors_timeout=20):
        assert result.value == [[]] * 6


def _agreements(rank: int, world_size: int, root: Path) -> dict[str, int]:
    """Return how many collectives restores make, from storage and from memory, with and without objects to load."""
    import torch.distributed as dist

    plain = {"weight": torch.arange(1000.0) + rank, "own": PerRank(torch.full((3,), float(rank))), "step": 5}
    objects = {"model": torch.nn.Linear(4, 4), **plain}
    counts = {}
    with pytest.MonkeyPatch.context() as patch:
        calls: list[str] = []
        for name in ("all_gather", "all_reduce"):
            real = getattr(dist, name)

            def recorded(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                calls.append(_name)
                return _real(*args, **kwargs)

            patch.setattr(dist, name, recorded)

        def count(what: str, checkpointer: Checkpointer, state: Any) -> None:
            calls.clear()
            assert checkpointer.restore(state) == 5
            counts[what] = len(calls)

        for name, state in (("tensors", plain), ("objects", objects)):
            with Checkpointer(root / name, staging=Staging(on_divergence="ignore")) as checkpointer:
                save_here(checkpointer, state, 5)
            with Checkpointer(root / name, snapshots=5, staging=Staging(on_divergence="ignore")) as checkpointer:
                count(f"{name} from storage", checkpointer, state)
                state["step"] = 4
                count(f"{name} and a value", checkpointer, state)
                checkpointer.step(state, 5)
                dist.barrier()  # else the share of the other rank may not be whole yet, and is passed on
                count(f"{name} from memory", checkpointer, state)
    return counts


def test_ranks_agree_as_often_as_they_have_to(tmp_path: Path) -> None:
    """Each time costs all ranks a round trip or more, whatever the number of tensors."""
    for result in run_ranks(_agreements, 2, tmp_path):
        assert result.value == {
            # What there is, what fits, that all have read; the next save; the slots of a new plan.
            "tensors from storage": 5,
            "tensors and a value": 5,  # the value is tried first; the plan is known
            "tensors from memory": 7,  # the save of that step; documents of the shares, and their sizes
            "objects from storage": 6,  # objects that may fail
            "objects and a value": 6,
            "objects from memory": 8,
        }


def _plans_made(rank: int, world_size: int, root: Path) -> list[tuple[int, bool]]:
    """Return how many plans this rank made after each fault, and whether the state could be saved and restored."""
    import torch.distributed as dist

    made = 0
    real = plan_cache.make_save_plan

    def counted(*args: Any) -> Any:
        nonlocal made
        made += 1
        return real(*args)

    state: dict[str, Any] = {f"of {rank}": torch.arange(1000.0) + rank, "shared": torch.ones(5), "step": 1}
    found = []
    checkpointer = Checkpointer(root, snapshots=1, staging=Staging(on_divergence="ignore"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cache, "make_save_plan", counted)

        def save(step: int) -> None:
            state["step"] = step
            checkpointer.save(state, step)

        def after_fault(step: int) -> None:
            nonlocal made
            made = 0
            dist.barrier()
            wanted = {name: value.clone() for name, value in state.items() if name != "step"}
            for name in wanted:
                state[name].zero_()
            checkpointer.restore(state)
            good = state["step"] == step - 1 and all(torch.equal(state[name], value) for name, value in wanted.items())
            save(step)
            found.append((made, good))

        save(1)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10))
        after_fault(2)
        if rank == 1:  # is replaced
            checkpointer.close()
            checkpointer = Checkpointer(root, snapshots=1, staging=Staging(on_divergence="ignore"))
        else:
            checkpointer.bridge.recover_from_fault(timedelta(seconds=10))
        after_fault(3)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10))
        if rank == 1:
            state["more"] = torch.ones(7)
        save(4)
        after_fault(5)
    checkpointer.close()
    return found


def test_after_a_fault_ranks_that_are_as_before_use_their_plan_again(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks(_plans_made, 2, tmp_path))
    assert first == [(0, True), (0, True), (0, True)]
    assert second == [(0, True), (1, True), (0, True)]
    for step in range(1, 6):
        assert validate(str(tmp_path / f"step_{step:08d}")).whole
