"""A node is lost, with everything it held: training goes on from the memory of the others."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.inprocess.nodes.job import Job
from tests.inprocess.nodes.lab import Lab
from tests.inprocess.nodes.replicas_program import Began, began
from tests.support.seeds import seed_of
from tests.support.selection import FULL, full_only

MakeLab = Callable[[int], Lab]
_TRAIN = "tests.inprocess.nodes.replicas_program:train"
_SOON_S = 50.0


def _start(lab: Lab, active: int, **options: Any) -> Job:
    return lab.start(_TRAIN, [active, options], ranks_per_node=2)


def _wait(job: Job, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SOON_S
    while not condition():
        failed = [rank for rank, end in job.exits.items() if end.code > 0]
        assert not failed, job.describe()
        assert time.monotonic() < deadline, job.describe()
        time.sleep(0.02)


def _replicated(job: Job, iteration: int = 0) -> int:
    """The newest step that any rank knows to be replicated."""
    steps = [line.event.split()[1] for line in job.lines() if line.event.startswith("replicated")]
    return max((int(step) for step in steps if step != "None"), default=0)


def _is_replicated_behind(job: Job, step: int) -> bool:
    return _replicated(job) > step


def _begun(job: Job, iteration: int, ranks: int) -> list[Began]:
    _wait(job, lambda: len(began(job.folder, iteration)) >= ranks)
    return began(job.folder, iteration)


def _ends_well(job: Job, lost: set[int]) -> None:
    job.stop()
    left = [rank for rank in job.pids if rank not in lost]
    assert job.wait_exits(left, _SOON_S), job.describe()
    assert {job.exits[rank].code for rank in left} == {0}, job.describe()


def _check(found: list[Began], world_size: int, at_least: int) -> int:
    """All ranks go on from one step, with its bytes; return it."""
    assert {each.world_size for each in found} == {world_size}, found
    (step,) = {each.step for each in found}
    assert step is not None
    assert step >= at_least
    assert all(each.right for each in found), found
    return step


@pytest.mark.parametrize(
    ("nodes", "active", "bandwidth"),
    [
        pytest.param(3, 6, None, id="goes on with 4 ranks", marks=full_only),  # the third does, too
        pytest.param(4, 6, None, id="spares take the places"),
        pytest.param(3, 6, 1e6, id="in the middle of a replica"),  # which takes a second: one is always on the way
    ],
)
def test_a_node_loses_its_power(make_lab: MakeLab, nodes: int, active: int, bandwidth: float | None) -> None:
    lab = make_lab(nodes)
    job = _start(lab, active, bandwidth=bandwidth)
    _wait(job, lambda: _replicated(job) >= 1)
    replicated = _replicated(job)
    lost = 2
    lab.power_off(lost)
    left = min(active, 2 * nodes - 2)
    found = _begun(job, 1, left)
    step = _check(found, left, replicated)
    assert all(each.storage_bytes == 0 for each in found), found
    assert {each.tier for each in found} == {"memory of another node"}
    assert not (job.folder / "root").exists()
    _wait(job, partial(_is_replicated_behind, job, step))  # there are buddies again
    _ends_well(job, set(job.ranks_of(lost)))


@full_only
def test_a_node_is_lost_soon_after_an_exception(make_lab: MakeLab) -> None:
    """What was replicated before the exception is kept until something newer is."""
    lab = make_lab(3)
    job = _start(lab, 6, bandwidth=1e6)  # the snapshot that the exception leaves is not replicated soon
    _wait(job, lambda: _replicated(job) >= 1)
    replicated = _replicated(job)
    (job.folder / "raise").write_text("3")
    _check(_begun(job, 1, 6), 6, replicated)
    lab.power_off(2)
    found = _begun(job, 2, 4)
    _check(found, 4, replicated)
    assert all(each.storage_bytes == 0 for each in found), found
    _ends_well(job, set(job.ranks_of(2)))


def _paused_at(job: Job) -> int:
    """The step after which the ranks make no more."""
    _wait(job, lambda: any(line.event.startswith("paused") for line in job.lines()))
    return next(int(line.event.split()[-1]) for line in job.lines() if line.event.startswith("paused"))


def _replica_files(job: Job, rank: int) -> list[Path]:
    """The memory in which a rank holds what others have sent."""
    files = {}
    for pid in job.processes_of(rank):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(file).startswith("/memfd:ckpt-replica"):
                    files[file.stat().st_ino] = file
    return list(files.values())


def test_a_wrong_byte_in_a_replica(make_lab: MakeLab) -> None:
    """It is found, and all ranks take the published step instead."""
    lab = make_lab(3)
    job = _start(lab, 6, save_every=4)
    _wait(job, lambda: any((job.folder / "root").glob("step_*")))
    (job.folder / "pause").touch()
    job.wait_event(f"replicated {_paused_at(job)}", range(6), _SOON_S)
    harmed = 0
    for rank in job.ranks_of(0):  # the buddies of the ranks on node 2
        for file in _replica_files(job, rank):
            with open(file, "r+b", buffering=0) as memory:
                memory.seek(5000)
                (byte,) = memory.read(1)
                memory.seek(5000)
                memory.write(bytes([byte ^ 1]))
                harmed += 1
    assert harmed >= 2
    lab.power_off(2)
    found = _begun(job, 1, 4)
    step = _check(found, 4, 4)
    assert step % 4 == 0
    assert {each.tier for each in found} == {"storage"}
    assert step <= _replicated(job)
    (job.folder / "pause").unlink()
    _ends_well(job, set(job.ranks_of(2)))


@full_only
def test_a_node_is_lost_after_the_replica_processes_of_the_others_were_killed(make_lab: MakeLab) -> None:
    """What they held is in the memory of their keepers, and new ones serve it."""
    lab = make_lab(3)
    job = _start(lab, 6)
    _wait(job, lambda: _replicated(job) >= 1)
    (job.folder / "pause").touch()
    step = _paused_at(job)
    job.wait_event(f"replicated {step}", range(6), _SOON_S)
    killed = [pid for rank in range(4) for pid in job.processes_of(rank) if _name_of(pid) == "ckpt-replicas"]
    assert len(killed) == 4
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    lab.power_off(2)
    found = _begun(job, 1, 4)
    assert _check(found, 4, step) == step
    assert {each.tier for each in found} == {"memory of another node"}
    (job.folder / "pause").unlink()
    _wait(job, partial(_is_replicated_behind, job, step))
    _ends_well(job, set(job.ranks_of(2)))


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _training(job: Job, iteration: int, lost: set[int]) -> list[int]:
    """The initial ranks that train in an iteration; not those on node 0, which has the coordination server."""
    told = [line for line in job.lines() if line.event.startswith("replicated") and line.iteration == iteration]
    return sorted({line.process for line in told if line.process > 1} - lost)


@full_only
@pytest.mark.parametrize("number", range(100 if FULL else 1))
def test_a_random_schedule_of_faults(make_lab: MakeLab, number: int) -> None:
    """Ranks raise and are killed, and one node loses its power, at any time, also while replicas are sent."""
    chosen = random.Random(seed_of("REPLICAS_SEED", number))
    lab = make_lab(4)
    job = _start(lab, 6, bandwidth=chosen.choice([None, 3e6]), save_every=chosen.choice([None, 7]))
    lost: set[int] = set()
    step = 0
    for iteration, kind in enumerate(chosen.sample(["raise", "kill", "node"], 3), 1):
        _wait(job, partial(_is_replicated_behind, job, step))
        time.sleep(chosen.random() * 0.5)
        before = _replicated(job)
        _wait(job, partial(_training, job, iteration - 1, lost))
        victim = chosen.choice(_training(job, iteration - 1, lost))
        print(kind, victim, before)
        if kind == "raise":
            (job.folder / "raise").write_text(str(victim))
        elif kind == "kill":
            lost.add(victim)
            job.kill_rank(victim)
        else:
            lost |= set(job.ranks_of(job.nodes[victim]))
            lab.power_off(job.nodes[victim])
        world_size = min(6, 8 - len(lost))
        step = _check(_begun(job, iteration, world_size), world_size, before)
    _ends_well(job, lost)
