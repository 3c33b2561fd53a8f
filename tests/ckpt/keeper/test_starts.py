"""What the next start of a job finds in memory, and what becomes of the memory."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import StorageError
from ckpt.saving.share import Share
from ckpt.storage.directories import remove_tree
from ckpt.storage.ownership import Ownership
from tests.ckpt.keeper.jobs import DIE, LINGER, began, resized, start
from tests.ckpt.keeper.support import Call, files_of, held_memory, keepers_of, no_keepers_are_left, starts
from tests.ckpt.saving.snapshot_jobs import Faults, fresh, restarted, train_step
from tests.inprocess.coordination.helpers import eventually
from tests.support import LeakCheck, run_ranks
from tests.support.selection import full_only

_NOTHING = [None, None, None, True]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Ends what the starts of a test have left."""
    with contextlib.ExitStack() as stack:
        yield stack


def _lingering(step: int) -> list[object]:
    return [step, "lingering memory", 0, True]


@pytest.mark.parametrize(
    ("run_id", "options", "said"),
    [
        (None, {}, "which processes are of the same job"),
        ("none", {}, "TORCHELASTIC_RUN_ID is 'none'"),
        ("7", {"linger_id": ""}, "which processes are of the same job"),
        ("7", {"linger": timedelta(0)}, "must be positive"),
        ("7", {"linger": None, "linger_id": "x"}, "only with linger"),
        ("7", {"read_only": True}, "read_only"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str | None, options: dict[str, Any], said: str
) -> None:
    """Nothing is kept where it is not clear for whom."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    read_only = "read_only" in options
    own = {"linger": LINGER} | {name: value for name, value in options.items() if name != "read_only"}
    with pytest.raises(ValueError, match=said):
        ckpt.Checkpointer(tmp_path, snapshots=ckpt.Snapshots(**own), read_only=read_only)


def test_no_holder_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leak_check: LeakCheck
) -> None:
    """Training goes on without one, with a warning."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with ckpt.Checkpointer(
        tmp_path / "root", snapshots=ckpt.Snapshots(every=1, linger=LINGER, linger_id="x")
    ) as checkpointer:
        state = fresh()
        assert checkpointer.restore(state) is None
        for step in (1, 2):
            train_step(state, 0, step)
            checkpointer.snapshot(state, step)
        assert checkpointer.restore(state) == 2
    assert caplog.text.count("the memory of this rank will not outlive it") == 1
    assert str(tmp_path / "absent") in caplog.text


def test_again_and_again(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    """Also before there is a newer snapshot. Keepers and memory do not pile up, and a clean end leaves nothing."""
    assert starts(stack, runtime, start, 2, tmp_path / "root", 4) == 2 * [_NOTHING]
    for steps, step in ((0, 4), (0, 4), (3, 4), (2, 7), (0, 9)):
        assert starts(stack, runtime, start, 2, tmp_path / "root", steps) == 2 * [_lingering(step)]
        eventually(lambda: len(keepers_of(runtime)) == 2)
        assert len(files_of(runtime)) == 4
        assert len(held_memory(runtime)) <= (3 * 2 if steps else 0) + 2  # slots, and what was restored
    assert starts(stack, runtime, start, 2, tmp_path / "root", 1, "close") == 2 * [_lingering(9)]
    assert [path.name for path in (tmp_path / "root").rglob("*")] == [".owner", "root.json"]
    no_keepers_are_left(runtime)


_REMOVED = {("nothing", ()), ("other steps", (2, 7)), ("copy", (2, 7))}
"""Cells for `make test`: without a root, and with one that has other steps or the same."""


@pytest.mark.parametrize(
    ("again", "saves"),
    [
        pytest.param(again, saves, marks=() if (again, saves) in _REMOVED else full_only)
        for again in ("nothing", "empty", "other steps", "copy")
        for saves in ((), (2,), (2, 7))
    ],
    ids=str,
)
def test_memory_of_a_root_that_was_removed(
    tmp_path: Path, runtime: Path, stack: contextlib.ExitStack, saves: tuple[int, ...], again: str
) -> None:
    """The next start begins with what is there now, and keeps memory of that."""
    root, other = tmp_path / "root", tmp_path / "other"
    if again in ("other steps", "copy"):
        starts(stack, runtime, start, 1, other, 3, "close", saves=(3,))
    starts(stack, runtime, start, 1, root, 7, saves=saves)
    remove_tree(str(root))  # the writer of the killed trainer may still be ending
    if again == "empty":
        root.mkdir()
    elif again == "other steps":
        root.mkdir()
        shutil.copytree(other / "step_00000003", root / "step_00000003")
    elif again == "copy":
        shutil.copytree(other, root)
    there = 3 if (root / "step_00000003").exists() else None
    expected = _NOTHING if there is None else [3, "storage", ANY_BYTES, True]
    assert starts(stack, runtime, start, 1, root, 2) == [expected]
    assert starts(stack, runtime, start, 1, root, 0, "close") == [_lingering((there or 0) + 2)]
    no_keepers_are_left(runtime)


def test_memory_of_a_root_that_is_not_there_now(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    """As one that cannot be made, or read: it is not known which root it is."""
    starts(stack, runtime, start, 1, tmp_path / "root", 7)
    os.rename(tmp_path / "root", tmp_path / "aside")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".owner").write_text("")
    assert starts(stack, runtime, start, 1, tmp_path / "root", 0, "close") == [_NOTHING]
    no_keepers_are_left(runtime)


def test_a_branch_that_was_left_is_left_in_the_next_start_too(
    tmp_path: Path, runtime: Path, stack: contextlib.ExitStack
) -> None:
    """Steps 4 and 6 are published, and training goes on from step 2: nothing but memory tells that."""
    root = tmp_path / "root"
    starts(stack, runtime, start, 1, root, 6, "close", saves=(2, 4, 6))
    starts(stack, runtime, start, 1, root, 2, step=2)
    assert starts(stack, runtime, start, 1, root, 0) == [_lingering(4)]
    assert starts(stack, runtime, start, 1, root, 1, "close") == [_lingering(4)]
    ((step, tier, _, is_right),) = starts(stack, runtime, start, 1, root, 0, "close")
    assert (step, tier, is_right) == (6, "storage", True)  # which is documented: memory was given up


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ({"linger_id": "another job"}, {}),
        ({}, {"INPROCESS_SECRET": "another secret"}),
        ({"root": "another root"}, {}),
    ],
    ids=["id", "secret", "root"],
)
def test_another_job_gets_nothing(
    tmp_path: Path, runtime: Path, stack: contextlib.ExitStack, options: dict[str, str], env: dict[str, str]
) -> None:
    secret = {"INPROCESS_SECRET": "a secret"}
    root = tmp_path / options.pop("root", "root")
    starts(stack, runtime, start, 1, tmp_path / "root", 3, env=secret)
    assert starts(stack, runtime, start, 1, root, 0, "close", env=secret | env, **options) == [_NOTHING]
    assert starts(stack, runtime, start, 1, tmp_path / "root", 0, "close", env=secret) == [_lingering(3)]
    no_keepers_are_left(runtime)


def test_memory_is_kept_for_a_limited_time(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    starts(stack, runtime, start, 1, tmp_path / "root", 3, linger=timedelta(seconds=0.2))
    no_keepers_are_left(runtime)
    assert starts(stack, runtime, start, 1, tmp_path / "root", 0, "close") == [_NOTHING]


@pytest.mark.parametrize("dies", sorted(DIE))
def test_killed_at_the_hand_over(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack, dies: str) -> None:
    """All ranks of a start at once, in a restore: nothing is lost, and nothing piles up."""
    starts(stack, runtime, start, 2, tmp_path / "root", 3)
    starts(stack, runtime, start, 2, tmp_path / "root", dies=dies)
    assert starts(stack, runtime, start, 2, tmp_path / "root", 1) == 2 * [_lingering(3)]
    assert starts(stack, runtime, start, 2, tmp_path / "root", 0, "close") == 2 * [_lingering(4)]
    no_keepers_are_left(runtime)


class _Fault(Exception):
    """Of another rank, which interrupts this one."""


def _interrupted(rank: int, world_size: int, root: Path, place: str, end: str = "close") -> None:
    """As `start`, but a fault interrupts the end of the first restore: there is another one."""
    owner, name, after = DIE[place]
    function, faults = getattr(owner, name), [_Fault()]

    def fails_once(*args: Any, **options: Any) -> Any:
        if faults and not after:
            raise faults.pop()
        result = function(*args, **options)
        if faults:
            raise faults.pop()
        return result

    setattr(owner, name, fails_once)
    with ckpt.Checkpointer(root, snapshots=ckpt.Snapshots(every=1, linger=LINGER, linger_id="a job")) as checkpointer:
        state = fresh()
        with pytest.raises(_Fault):
            checkpointer.restore(state)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10), rank)
        checkpointer.restore(state)
        os.write(1, f"began {began(checkpointer, state, rank)!r}\n".encode())


@pytest.mark.parametrize("place", sorted(DIE))
def test_interrupted_at_the_hand_over(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack, place: str) -> None:
    """By a restart in the process: the memory is still there, and is given up in the end."""
    starts(stack, runtime, start, 1, tmp_path / "root", 3)
    (found,) = starts(stack, runtime, _interrupted, 1, tmp_path / "root", place, "close")
    assert found in (_lingering(3), [3, "neighbour memory", 0, True])
    no_keepers_are_left(runtime)


def test_an_exception_keeps_the_memory(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    starts(stack, runtime, start, 2, tmp_path / "root", 3, "raise")
    assert starts(stack, runtime, start, 2, tmp_path / "root", 0, "close") == 2 * [_lingering(3)]
    no_keepers_are_left(runtime)


def _kill_keeper_of_rank_1(checkpointer: ckpt.Checkpointer, rank: int) -> None:
    pid = checkpointer._parts.keeper.pid
    if rank == 1 and pid is not None:
        os.kill(pid, signal.SIGKILL)


def test_one_of_two_keepers_is_gone(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    """What is published is restored, and the other keeper, and what is left of that one, are gone afterwards."""
    starts(stack, runtime, start, 2, tmp_path / "root", 5, before=_kill_keeper_of_rank_1, saves=(2,))
    assert starts(stack, runtime, start, 2, tmp_path / "root", 0, "close") == 2 * [[2, "storage", ANY_BYTES, True]]
    no_keepers_are_left(runtime)


def _damage_newest_of_rank_1(checkpointer: ckpt.Checkpointer, rank: int) -> None:
    steps = checkpointer._parts.saver.snapshots.steps
    for region in checkpointer._parts.saver.memory.kept:
        if rank == 1 and (Share(region).save_name or "").startswith(f"step_{steps[-1]:08d}"):
            region.buffer[1000] ^= 1


def test_a_wrong_byte(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    """All ranks take the next older snapshot."""
    starts(stack, runtime, start, 2, tmp_path / "root", 5, before=_damage_newest_of_rank_1)
    assert starts(stack, runtime, start, 2, tmp_path / "root", 0, "close") == 2 * [_lingering(4)]
    no_keepers_are_left(runtime)


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1)])
def test_another_world_size(
    tmp_path: Path, runtime: Path, stack: contextlib.ExitStack, worlds: tuple[int, int]
) -> None:
    before, after = worlds
    starts(stack, runtime, resized, before, tmp_path / "root", 4, "kill")
    assert starts(stack, runtime, resized, after, tmp_path / "root", 2, "kill") == after * [_lingering(4)]
    assert starts(stack, runtime, resized, before, tmp_path / "root", 0, "close") == before * [_lingering(6)]
    no_keepers_are_left(runtime)


def test_a_branch_that_was_left(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    """A start goes back to a published step: nothing newer of the branch before can be restored any more."""
    starts(stack, runtime, start, 2, tmp_path / "root", 5, saves=(2,))
    assert starts(stack, runtime, start, 2, tmp_path / "root", 1, step=2)[0][0] == 2
    assert starts(stack, runtime, start, 2, tmp_path / "root", 0, "close") == 2 * [_lingering(3)]
    no_keepers_are_left(runtime)


def test_another_start_that_has_claimed_the_root(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    """As with another id: what it has saved comes first, and memory of before is of a branch that was left."""
    starts(stack, runtime, start, 1, tmp_path / "root", 5)
    starts(stack, runtime, start, 1, tmp_path / "root", 2, "close", linger_id="another job", saves=(2,))
    found = starts(stack, runtime, start, 1, tmp_path / "root", 0, "close")
    assert found == [[2, "storage", ANY_BYTES, True]]
    no_keepers_are_left(runtime)


def _start_without_storage(rank: int, world_size: int, *args: Any, **options: Any) -> None:
    """As `start`, but the first look at the owner of the root fails."""
    owner = Ownership.owner
    failures = [StorageError("a server is down")]

    def fails_once(ownership: Ownership) -> int:
        if failures:
            raise failures.pop()
        return owner(ownership)

    Ownership.owner = fails_once  # type: ignore[method-assign]
    start(rank, world_size, *args, **options)


def test_another_job_has_claimed_the_root_after_a_start_that_could_not_see_its_owner(
    tmp_path: Path, runtime: Path, stack: contextlib.ExitStack
) -> None:
    starts(stack, runtime, _start_without_storage, 1, tmp_path / "root", 5)
    starts(stack, runtime, start, 1, tmp_path / "root", 2, "close", linger_id="another job", saves=(2,))
    found = starts(stack, runtime, start, 1, tmp_path / "root", 0, "close")
    assert found == [[2, "storage", ANY_BYTES, True]]
    no_keepers_are_left(runtime)


def test_the_root_was_claimed_by_the_job_itself(tmp_path: Path, runtime: Path, stack: contextlib.ExitStack) -> None:
    starts(stack, runtime, start, 2, tmp_path / "root", 5, saves=(2, 4))
    assert starts(stack, runtime, start, 2, tmp_path / "root", 5, saves=(7,)) == 2 * [_lingering(5)]
    assert starts(stack, runtime, start, 2, tmp_path / "root", 0) == 2 * [_lingering(10)]
    assert starts(stack, runtime, start, 2, tmp_path / "root", 0, "close") == 2 * [_lingering(10)]
    no_keepers_are_left(runtime)


def test_a_rank_that_is_replaced(tmp_path: Path, runtime: Path) -> None:
    """In a restart in the process: the one in its place takes its memory over, so that nothing is left in the end."""
    at = Faults(("kill", 0, 2, 5), ("raise", 1, 1, 7))
    call = Call(
        functools.partial(restarted, snapshots=ckpt.Snapshots(1, linger=LINGER, linger_id="a job")),
        (tmp_path / "root", at, 4),
    )
    env = {"TMPDIR": str(runtime)}
    codes = {2: -signal.SIGKILL}
    results = run_ranks(call, 5, init_process_group=False, env=env, returncodes=codes)
    begun = [entry for result in results if result.value for entry in result.value if entry[0] > 0]
    assert sorted(entry[:3] for entry in begun) == [
        (i, rank, step) for i, step in ((1, 4), (2, 6)) for rank in range(4)
    ]
    assert all(entry[4] for entry in begun)
    no_keepers_are_left(runtime)


class _AnyBytes:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    def __hash__(self) -> int:
        return 0


ANY_BYTES = _AnyBytes()
