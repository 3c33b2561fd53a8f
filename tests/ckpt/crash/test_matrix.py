"""What a SIGKILL leaves: every process x every point of a save x every position of the rank x new or recycled files.

    step 1 is published -> step 2 is saved, and a process dies at the point -> what is on disk, what the others report
    -> the next save (if all trainers live) -> a new start restores the right step

`make test` runs the cells of `REPRESENTATIVE`, `make test-faults` all.
"""

import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import CheckpointError, RemoteTraceback
from ckpt.storage.directory_root import recycled_path
from ckpt.storage.documents import intent_of_step
from ckpt.storage.interface import Root
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.roots import open_root
from tests.ckpt.crash.killers import wait_until, with_writer
from tests.support import RankGroup, launch_ranks
from tests.support.selection import FULL

Roots = tuple[str | Path, str | Path]

_FILE_BYTES = 100_000  # several files of each rank
_AT_ONCE_S = 15.0  # on a busy machine; every time limit that could end the wait instead is longer

POINTS = ("before staging", "after staging", "during write", "before publish", "after publish")
POSITIONS = ((0, 1), (0, 2), (1, 2))
PUBLISHED = "published"  # step 2 is there, and all surviving ranks have finalized it
FAILED = "failed"  # error on all ranks, abandoned; training goes on and step 3 is published
ADOPTED = "adopted"  # complete but undecided; published by the next start
LOST = "lost"  # a part is missing; abandoned at once or by the next start

LEAVES = {
    ("trainer", "before staging"): LOST,
    ("trainer", "after staging"): PUBLISHED,
    ("trainer", "during write"): PUBLISHED,
    ("trainer", "before publish"): PUBLISHED,
    ("trainer", "after publish"): PUBLISHED,
    ("writer", "before staging"): PUBLISHED,  # an idle writer is replaced, and nobody notices
    ("writer", "after staging"): FAILED,
    ("writer", "during write"): FAILED,
    ("writer", "before publish"): FAILED,
    ("writer", "after publish"): PUBLISHED,
    ("both", "before staging"): LOST,
    ("both", "after staging"): LOST,
    ("both", "during write"): LOST,
    ("both", "before publish"): ADOPTED,
    ("both", "after publish"): PUBLISHED,
}
EXCEPTIONS = {
    ("both", "before publish", 1, 2): PUBLISHED,  # its part is there, and the coordinator lives
}
REPRESENTATIVE_OF_REUSE = {
    ("writer", "during write", 0, 1),
    ("trainer", "during write", 1, 2),
    ("both", "during write", 0, 2),
    ("both", "before publish", 0, 1),
}
REPRESENTATIVE = {
    ("writer", "before staging", 0, 1),
    ("writer", "after staging", 0, 2),
    ("writer", "during write", 1, 2),
    ("writer", "before publish", 0, 1),
    ("writer", "after publish", 1, 2),
    ("trainer", "before staging", 1, 2),
    ("trainer", "during write", 0, 1),
    ("both", "during write", 0, 1),
    ("both", "before publish", 0, 2),
}


@dataclass(frozen=True)
class Cell:
    who: str
    point: str
    rank: int
    world_size: int
    reuse: bool = False

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.who, self.point, self.rank, self.world_size

    @property
    def leaves(self) -> str:
        return EXCEPTIONS.get(self.key, LEAVES[self.who, self.point])

    @property
    def victims(self) -> tuple[str, ...]:
        return ("trainer", "writer") if self.who == "both" else (self.who,)

    def __str__(self) -> str:
        where = " over files" if self.reuse else ""
        return f"{self.who} {self.point}{where}, rank {self.rank} of {self.world_size}".replace(" ", "_")


CELLS = [
    Cell(who, point, *position, reuse) for who, point in LEAVES for position in POSITIONS for reuse in (False, True)
]


def _selected() -> list[Cell]:
    return [cell for cell in CELLS if FULL or cell.key in (REPRESENTATIVE_OF_REUSE if cell.reuse else REPRESENTATIVE)]


def _state(step: int) -> dict[str, Any]:
    import torch

    weights = {f"layer{i}": torch.arange(20_000, dtype=torch.float32) * step + i for i in range(6)}
    return {"weights": weights, "small": torch.tensor([step, 2, 3]), "step": step, "rank": ckpt.PerRank(f"of {step}")}


def _assert_equal(state: dict[str, Any], step: int) -> None:
    expected = _state(step)
    for name, tensor in expected["weights"].items():
        assert state["weights"][name].numpy().tobytes() == tensor.numpy().tobytes(), name
    assert state["small"].tolist() == expected["small"].tolist()
    assert (state["step"], state["rank"].value) == (step, f"of {step}")


def _kill_the_idle_writer(queue: ckpt.AsyncCallsQueue) -> None:
    from tests.ckpt.async_calls.functions import ask, report_identity

    pid = ask(queue, report_identity)["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the writer to be gone")


def _train(
    rank: int, world_size: int, cell: Cell, folder: Path, roots: Roots, options: dict[str, Any]
) -> dict[str, Any]:
    root = roots[rank % 2]
    checkpointer = ckpt.Checkpointer(
        root, **options, keep=9, staging=ckpt.Staging(file_bytes=_FILE_BYTES, reuse_files=cell.reuse)
    )
    checkpointer.restore(_state(0))
    if cell.reuse:
        checkpointer.save(_state(0), 0)
    checkpointer.save(_state(1), 1)
    if cell.reuse and rank == 0:
        _retire(CheckpointRoot(str(root)), 0)
    is_victim = rank == cell.rank
    if is_victim and cell.point == "before staging":
        _strike_before_staging(cell, checkpointer)
    request = checkpointer.save_request(_state(2), 2)
    fate_is_open = cell.point == "before publish" and cell.rank != 0
    request = with_writer(
        request,
        point=cell.point,
        victims=cell.victims if is_victim else (),
        trainer_pid=os.getpid(),
        hold=str(folder / "go") if fate_is_open else "",
    )
    checkpointer.queue.schedule_async_request(request)
    answer: dict[str, Any] = {"finalized": None, "error": None}
    begin = time.monotonic()
    try:
        answer["finalized"] = checkpointer.maybe_finalize(blocking=True)
    except CheckpointError as error:
        answer |= {"error": str(error), "rank": error.rank, "step": error.step}
        answer["has_traceback"] = isinstance(error.__cause__, RemoteTraceback)
    answer["waited_s"] = time.monotonic() - begin
    print("decided", answer, flush=True)
    if cell.who != "writer":
        signal.pause()  # the launcher ends the ranks that are left
    checkpointer.save(_state(3), 3)
    checkpointer.close()
    return answer


def _retire(root: CheckpointRoot, step: int) -> None:
    """As the last save would have, if it kept one step only."""
    plan = (intent_of_step(root.step_path(step)) or {}).get("plan")
    assert plan is not None
    wait_until(lambda: root.retire_step(step, None, plan), "the writers to let go of the step")
    assert os.listdir(recycled_path(root)) == [plan]


def _data_files(path: str) -> int:
    return sum(len(names) for _, _, names in os.walk(os.path.join(path, "packs")))


def _recycled_files(root: CheckpointRoot) -> int:
    folder = recycled_path(root)
    return sum(_data_files(os.path.join(folder, plan)) for plan in os.listdir(folder)) if os.path.isdir(folder) else 0


def _strike_before_staging(cell: Cell, checkpointer: ckpt.Checkpointer) -> None:
    """In the trainer: its writer dies idle, the trainer itself with a part of the copies made."""
    from ckpt.saving import stage as stage_module
    from ckpt.staging.copy_table import Copies

    if "writer" in cell.victims:
        _kill_the_idle_writer(checkpointer.queue)
    if "trainer" not in cell.victims:
        return
    stage = stage_module.stage

    def stage_and_die(copies: Copies, *rest: Any) -> Any:
        stage(Copies.of(copies.ops[:1]), *rest)
        os.kill(os.getpid(), signal.SIGKILL)

    stage_module.stage = stage_and_die


def _wait_for_death(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        assert select.select([pidfd], [], [], 30.0)[0], f"process {pid} was not killed"
    finally:
        os.close(pidfd)


def _play(group: RankGroup, cell: Cell) -> list[dict[str, Any]]:
    """Until all processes are gone. The answers of the ranks that had one."""
    if cell.who == "writer":
        return [result.value for result in group.wait(50)]
    _wait_for_death(group.pid(cell.rank))
    others = [rank for rank in range(cell.world_size) if rank != cell.rank]
    for rank in others:
        if cell.leaves == PUBLISHED:
            group.wait_for_output(rank, "^decided.*'finalized': \\[2\\]")
        group.kill(rank)
    group.wait(30, dict.fromkeys(range(cell.world_size), -signal.SIGKILL))
    return []


def _check_answers(cell: Cell, answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["waited_s"] < _AT_ONCE_S, answer
        if cell.leaves == PUBLISHED:
            assert answer["finalized"] == [2]
            continue
        assert (answer["rank"], answer["step"]) == (cell.rank, 2)
        assert f"rank {cell.rank}" in answer["error"]
        assert "step 2" in answer["error"]
        assert "SIGKILL" in answer["error"]
        assert answer["has_traceback"]


def _check_storage(cell: Cell, root: Root) -> None:
    next_step = [3] if cell.who == "writer" else []
    reasons = [root.pending_save(save).outcome() for save in root.abandoned()]
    assert root.steps() == ([1, 2] if cell.leaves == PUBLISHED else [1]) + next_step, reasons
    everyone = set(range(cell.world_size))
    parts = [root.pending_save(save).parts_present() for save in root.pending()]
    if cell.leaves == ADOPTED:
        assert parts == [everyone]
    elif cell.leaves == LOST:
        assert parts in ([], [everyone - {cell.rank}], [set()])
    else:
        assert parts == []


@pytest.mark.parametrize("cell", _selected(), ids=str)
def test_kill(cell: Cell, tmp_path: Path) -> None:
    play(cell, tmp_path, (tmp_path / "root", tmp_path / "root"))


def play(cell: Cell, folder: Path, roots: Roots, env: Mapping[str, str] | None = None, **options: Any) -> None:
    """Play a cell and check what it leaves. Odd ranks see the root under the second path, as on another mount."""
    with launch_ranks(_train, cell.world_size, cell, folder, roots, options, env=env or {}) as group:
        _check_answers(cell, _play(group, cell))
        group.wait_for_no_survivors(30)
    root = open_root(roots[1])
    _check_storage(cell, root)
    if (
        isinstance(root, CheckpointRoot)
        and cell.reuse
        and cell.point in ("during write", "before publish", "after publish")
    ):
        assert _recycled_files(root) < _data_files(root.step_path(1)), "the save did not take the files"
    state = _state(0)
    with ckpt.Checkpointer(root.path, staging=ckpt.Staging(file_bytes=_FILE_BYTES), **options) as checkpointer:
        expected = 3 if cell.who == "writer" else 2 if cell.leaves in (PUBLISHED, ADOPTED) else 1
        assert checkpointer.restore(state) == expected
        _assert_equal(state, expected)
        assert root.pending() == []
        checkpointer.save(_state(4), 4)  # and life goes on
        assert checkpointer.latest_step() == 4


def selected(few: set[tuple[str, str, int, int]]) -> list[Cell]:
    """All cells if TESTS is "full", else a few, over new files."""
    return [cell for cell in CELLS if FULL or (cell.key in few and not cell.reuse)]


def test_the_matrix_is_whole() -> None:
    assert len(CELLS) == 2 * 3 * len(POINTS) * len(POSITIONS)
    assert {cell.point for cell in CELLS} == set(POINTS)
    assert {cell.key for cell in CELLS} >= REPRESENTATIVE | REPRESENTATIVE_OF_REUSE | EXCEPTIONS.keys()
