"""Trainings that are made to fail again and again come to the same end as one that never does.

    TESTS=full pytest tests/ckpt/crash/test_restart_faults.py        all jobs
    ... -k drain-2-raising-004                                                one of them: its name is its seed

Of every job: C1 (all ranks restore the same published step, with the right bytes), C2 (the newest), C3 (nothing of an
iteration is published after it was looked at), C4 (nothing is left over), C5 (the same weights in the end).

Jobs with snapshots keep every step in memory: C1 and C2 hold for what all ranks have kept. Some of them have replicas,
a restore in the function and not before it, or a save and a snapshot of the same step. Bytes in memory change, disks
are full, and replica processes are killed, too.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage.root import CheckpointRoot
from ckpt.validation import validate
from tests.ckpt.crash.fault_plan import Job, jobs
from tests.ckpt.crash.restart_training import run, simulate
from tests.support import RanksFailed, run_ranks
from tests.support.selection import FULL

_SOME = {"drain": (1,), "abort": (0,)}
_SOME_WITH_SNAPSHOTS = {"drain": (7,), "abort": (4, 11)}  # each kind of job, and most kinds of faults
_JOBS = [
    job
    for mode, some in _SOME.items()
    for number, job in enumerate(jobs(mode, 40, 7 if FULL else 3))
    if FULL or number in some
]
_JOBS += [
    job
    for mode, some in _SOME_WITH_SNAPSHOTS.items()
    for number, job in enumerate(jobs(mode, 150, 4 if FULL else 3, snapshots=True))
    if FULL or number in some
]
_COUNTS: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _tell_how_many() -> Iterator[None]:
    yield
    print(f"\nfaults that happened: {sum(_COUNTS.values())}: {dict(sorted(_COUNTS.items()))}")


def _events(folder: Path) -> list[list[dict[str, Any]]]:
    files = sorted(folder.glob("rank_*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank_")))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def _owners(root: CheckpointRoot) -> dict[int, int]:
    """The token that each published step was saved with: each iteration that saves claims a larger one."""
    owners = {}
    for step in root.steps():
        document = json.loads((Path(root.step_path(step)) / "zarr.json").read_text())
        owners[step] = int(document["attributes"]["ckpt"]["owner"])
    return owners


def _check_restores(
    events: list[list[dict[str, Any]]], truth: list[list[str]], root: CheckpointRoot, snapshots: bool
) -> None:
    """C1, C2, C3; with snapshots "published" includes what is whole in memory, see `_check_snapshots`."""
    owners = _owners(root)
    recovered = [event for event in itertools.chain(*events) if event["event"] == "recovered"]
    for iteration in sorted({event["iteration"] for event in recovered}):
        active = [e for e in recovered if e["iteration"] == iteration and e["rank"] is not None]
        assert len({event["resume"] for event in active}) == 1, f"C1 after iteration {iteration}: {active}"
        for event in active:
            resume = event["resume"]
            assert event["pending"] == 0
            if snapshots:
                assert resume is None, event  # the next iteration restores
                continue
            assert resume == max(event["steps"], default=None), f"C2: {event}"
            assert resume is None or event["digest"] == truth[resume][event["rank"]], f"C1, the bytes: {event}"
        seen = set(active[0]["steps"]) if active else set()
        newest = max((event["owner"] for event in active), default=0)
        late = {step for step, owner in owners.items() if owner <= newest} - seen
        assert not active or not late, f"C3: {late} of iteration {iteration} or before appeared later"
    for event in itertools.chain(*events):
        if event["event"] == "begin":
            assert event["digest"] == truth[event["step"] or 0][event["rank"]], f"C1, the state to go on from: {event}"
        if event["event"] == "finalized":
            assert event["published"], event


def _check_snapshots(events: list[list[dict[str, Any]]]) -> None:
    """C1 and C2 with snapshots: all begin with one step, and lose no step that all had kept, nor a published one."""
    everything = list(itertools.chain(*events))
    begins = [event for event in everything if event["event"] == "begin"]
    damaged = [event for event in everything if event["event"] == "damaged"]
    known, last = 0, -1  # the newest step that must still be there, and the iteration before
    for iteration in sorted({event["iteration"] for event in begins}):
        of_iteration = [event for event in begins if event["iteration"] == iteration]
        assert len({event["step"] for event in of_iteration}) == 1, f"C1 in iteration {iteration}: {of_iteration}"
        recovered = [e for e in everything if e["event"] == "recovered" and e["iteration"] < iteration]
        published = max((step for event in recovered for step in event["steps"]), default=0)
        began = of_iteration[0]["step"] or 0
        if any(last <= event["iteration"] < iteration for event in damaged):
            known = 0  # an older one, or what is published
        last = iteration
        assert began >= max(known, published), f"C2 in iteration {iteration}: {began}, not {known} or {published}"
        kept = [
            max((e["step"] for e in of_rank if e["event"] == "kept" and e["iteration"] == iteration), default=0)
            for of_rank in events
            if any(event in of_iteration for event in of_rank)
        ]
        known = max(began, min(kept))


def _check_nothing_left(events: list[list[dict[str, Any]]], job: Job, root: CheckpointRoot) -> None:
    """C4."""
    assert root.pending() == []
    for of_rank in events:
        held = [event["held"] for event in of_rank if event["event"] == "begin"]
        for now in held:
            slots = sum(region.startswith("ckpt-slot") for region in now["regions"])
            # Two of each rank, or three; a mapping holds a descriptor of its own. With snapshots those of the dead may
            # be needed, too, and those of the last iteration are given back when there are new ones.
            most = (20 if job.replicas else 12) * (job.active + job.spares) if job.snapshots else 4 * job.active
            assert slots <= most, str(held)
            assert len(now["regions"]) - slots <= 8, str(held)  # the control page of the writer, and its calls
            assert now["children"] <= 4, str(held)  # keeper, monitor process; and what is just ending
        if len(held) > 3:
            # A rank that becomes rank 0 serves the store of the process groups: about 15 more. The first iterations may
            # have had no slots, those of a spare always.
            first = next((now for now in held[1:] if now["regions"]), held[1])
            assert held[-1]["descriptors"] <= first["descriptors"] + 24, str(held)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("job", _JOBS, ids=str)
def test_training_comes_to_the_same_end(tmp_path: Path, job: Job) -> None:
    world_size = job.active + job.spares
    truth = simulate(job.active, job.steps)
    root = CheckpointRoot(str(tmp_path / "root"))
    plan = "\n".join(map(str, job.faults))
    anything = dict.fromkeys(range(world_size)) if job.kills else {}
    try:
        results = run_ranks(
            run,
            world_size,
            job,
            tmp_path,
            timeout=100,
            returncodes=anything,
            env={"LOGLEVEL": "INFO"},
            init_process_group=False,
        )
    except RanksFailed as error:
        raise AssertionError(f"seed {job.seed}\n{plan}\n{error}") from None
    events = _events(tmp_path)
    for event in itertools.chain(*events):
        if event["event"] == "fault":
            _COUNTS[event["fault"].split(": ")[1].split(" on ")[0]] += 1
    try:
        _check_restores(events, truth, root, job.snapshots)
        if job.snapshots:
            _check_snapshots(events)
        _check_nothing_left(events, job, root)
        final = sorted(result.value for result in results if result.value is not None)
        assert final == sorted(truth[job.steps]), f"C5: {len(final)} of {job.active} ranks ended"
        for step in root.steps():
            problems = validate(root.step_path(step)).problems
            assert not problems, problems
    except AssertionError as error:
        output = tmp_path / "output"
        output.write_text(str(RanksFailed("", results)))
        raise AssertionError(f"seed {job.seed}\n{plan}\n{error}\noutput of the ranks: {output}") from None
