"""Two jobs on one root: the second must never lose a step, in orders of events found by a model.

See tests/ckpt/crash/ownership_model.py. Both jobs run in this process; one acts at a chosen point of the other.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ckpt
from ckpt.errors import CheckpointError
from ckpt.storage.names import SaveId
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.storage.small_saves import assert_whole, opened, save, state_of
from tests.ckpt.storage.syscalls import Call, Syscalls
from tests.support.template import REPOSITORY


def _restore(root: Path) -> int | None:
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        return checkpointer.restore(state_of(-1.0))


def test_a_first_save_that_fails_leaves_a_step_to_restore(tmp_path: Path) -> None:
    """The earlier owner has continued, and removed the step that the later one restored."""

    def fails(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "pwrite":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return perform(*call.args)

    with opened(tmp_path, keep=1) as earlier, opened(tmp_path, keep=1) as later:
        save(earlier, 1)
        assert later.restore(state_of(-1.0)) == 1
        save(earlier, 2)
        assert CheckpointRoot(str(tmp_path)).steps() == [2]
        with pytest.raises(CheckpointError), Syscalls().hooked(fails):
            save(later, 2)
        assert _restore(tmp_path) == 2
        save(later, 2)
        assert assert_whole(tmp_path) == [2]
        assert len(list((tmp_path / ".superseded").iterdir())) == 1
        save(later, 3)
        assert assert_whole(tmp_path) == [3]


@pytest.mark.parametrize("reuse_files", [False, True], ids=["remove", "reuse"])
def test_retention_of_an_earlier_owner_leaves_the_steps_of_the_later_one(tmp_path: Path, reuse_files: bool) -> None:
    """It has checked the token, and waits so long before the rename that another job saves the same step."""
    options = {"keep": 1, "reuse_files": reuse_files}
    intervened = False

    with opened(tmp_path, **options) as earlier, opened(tmp_path, **options) as later:
        save(earlier, 1)
        assert later.restore(state_of(-1.0)) == 1
        save(earlier, 2)

        def waits(call: Call, perform: Callable[..., Any]) -> Any:
            nonlocal intervened
            if call.name == "renameat2" and call.args[0].endswith("step_00000002") and not intervened:
                intervened = True
                save(later, 2)
            return perform(*call.args)

        with pytest.raises(ckpt.FencedError), Syscalls().hooked(waits):
            save(earlier, 3)
        assert intervened
        assert assert_whole(tmp_path) == [2]
        save(later, 3)
        assert assert_whole(tmp_path) == [3]


class _Died(BaseException):
    """Raised in place of a death; nothing handles it."""


def _renames_of(step: int) -> Callable[[Call], bool]:
    """Return whether a call moves a published step, or goes on with that."""
    name = f"step_{step:08d}"

    def matches(call: Call) -> bool:
        if call.name != "renameat2":
            return False
        source = os.path.basename(call.args[0])
        return source == name or source.startswith(f"{name}-moving-")

    return matches


def _stopped(matches: Callable[[Call], bool], number: int, meanwhile: Callable[[], None], died: bool = False) -> Any:
    """Return a hook that lets another job act before the call with this number that matches, or dies instead of it."""
    seen = 0

    def hook(call: Call, perform: Callable[..., Any]) -> Any:
        nonlocal seen
        if matches(call):
            seen += 1
            if seen == number + 1:
                if died:
                    raise _Died
                meanwhile()
        return perform(*call.args)

    return hook


def _assert_continued(root: Path, steps: list[int]) -> None:
    assert set(steps) <= set(assert_whole(root))
    assert _restore(root) == steps[-1]
    assert not [name for name in os.listdir(root / ".abandoned") if "-moving-" in name]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("options", [{}, {"keep": 1, "reuse_files": False}, {"keep": 1, "reuse_files": True}])
def test_the_step_that_a_later_owner_continues_is_not_removed(
    tmp_path: Path, options: dict[str, Any], number: int
) -> None:
    """The earlier one is stopped between its look at the token and a rename, in `delete` or after a save."""
    acted = False

    def continues() -> None:
        nonlocal acted
        acted = True
        if number == 1:  # step 10 has another name now
            assert later.restore(state_of(-1.0)) == (20 if options else 5)
        save(later, 30)

    with opened(tmp_path, **options) as earlier, opened(tmp_path) as later:
        if not options:
            save(earlier, 5)
        save(earlier, 10)
        if number == 0:
            assert later.restore(state_of(-1.0)) == 10
        with pytest.raises(ckpt.FencedError), Syscalls().hooked(_stopped(_renames_of(10), number, continues)):
            save(earlier, 20) if options else earlier.delete(10)
        assert acted
        _assert_continued(tmp_path, [10, 30] if options or number == 0 else [5, 30])
        save(later, 40)
        assert CheckpointRoot(str(tmp_path)).steps()[-2:] == [30, 40]


@pytest.mark.parametrize("reuse_files", [False, True], ids=["remove", "reuse"])
def test_a_step_that_a_dead_owner_was_about_to_remove_is_there_again(tmp_path: Path, reuse_files: bool) -> None:
    with opened(tmp_path, keep=1, reuse_files=reuse_files) as earlier, opened(tmp_path) as later:
        save(earlier, 10)
        try:
            with Syscalls().hooked(_stopped(_renames_of(10), 1, lambda: None, died=True)):
                save(earlier, 20)
        except _Died:
            pass
        assert CheckpointRoot(str(tmp_path)).steps() == [20]
        assert later.restore(state_of(-1.0)) == 20
        save(later, 30)
        _assert_continued(tmp_path, [10, 20, 30])


@pytest.mark.parametrize("number", [0, 1])
def test_the_step_that_a_later_owner_continues_is_not_superseded(tmp_path: Path, number: int) -> None:
    with opened(tmp_path) as first:
        save(first, 10)
        save(first, 20)

    def continues() -> None:
        assert later.restore(state_of(-1.0), 20 if number == 0 else None) in (10, 11, 20)
        save(later, 30)

    with opened(tmp_path) as earlier, opened(tmp_path) as later:
        assert earlier.restore(state_of(-1.0), 10) == 10
        with pytest.raises(ckpt.FencedError), Syscalls().hooked(_stopped(_renames_of(20), number, continues)):
            save(earlier, 11)
        _assert_continued(tmp_path, [10, 20, 30] if number == 0 else [10, 30])


def test_a_step_of_a_later_owner_is_not_moved_to_the_damaged_ones(tmp_path: Path) -> None:
    """It was damaged when the earlier one restored, and saved anew by the later one."""
    with opened(tmp_path) as first:
        save(first, 10)
        save(first, 20)
    (tmp_path / "step_00000020" / "state.json").unlink()

    def continues() -> None:
        assert later.restore(state_of(-1.0)) == 10
        save(later, 20)

    with opened(tmp_path) as earlier, opened(tmp_path) as later:
        assert earlier.restore(state_of(-1.0)) == 10
        with pytest.raises(ckpt.FencedError), Syscalls().hooked(_stopped(_renames_of(20), 0, continues)):
            save(earlier, 11)
        _assert_continued(tmp_path, [10, 20])


@pytest.mark.parametrize("claims_are_lost", [False, True])
def test_the_token_of_a_later_start_is_larger_although_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims_are_lost: bool
) -> None:
    with opened(tmp_path) as earlier:
        for step in (10, 20, 30):
            save(earlier, step)
    (tmp_path / "step_00000030" / "state.json").unlink()
    if claims_are_lost:  # as where a root is copied without its hidden folders
        shutil.rmtree(tmp_path / ".owner")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    with opened(tmp_path) as later:
        assert later.restore(state_of(-1.0)) == 20
        save(later, 30)
    assert assert_whole(tmp_path) == [10, 20, 30]
    assert [path.name for path in (tmp_path / ".damaged").glob("step_*")], "the damaged step counts as an earlier one"
    root = CheckpointRoot(str(tmp_path))
    assert root.ownership.newest() == root.owner_of(30) == root.owner_of(20) + 1


def test_an_undecided_save_is_decided_although_claims_are_lost_and_the_clock_was_set_back(tmp_path: Path) -> None:
    root, token = CheckpointRoot(str(tmp_path)), 2_000_000_000_000  # by a clock that was ahead
    root.make()
    root.pending_save(SaveId(10, token, "0123456789abcdef"), token).begin(1, "digest", None)
    shutil.rmtree(tmp_path / ".owner")
    assert len(root.pending()) == 1
    with opened(tmp_path) as later:
        assert later.restore(state_of(-1.0)) is None
        assert root.pending() == []
        assert root.ownership.newest() == token + 1
        save(later, 10)
    assert root.owner_of(10) == root.ownership.newest() == token + 2


def test_a_step_that_was_moved_aside_is_not_published_again_under_a_later_owner(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        save(first, 10)
        save(first, 20)
        first.restore(state_of(-1.0), 10)
        save(first, 11)
    root = CheckpointRoot(str(tmp_path))
    token = root.ownership.claim(root.ownership.newest())
    root.ownership.release(token)
    (name,) = root.superseded()

    with opened(tmp_path) as later:

        def continues() -> None:
            assert later.restore(state_of(-1.0)) == 11
            save(later, 12)

        def publishes(call: Call) -> bool:
            return call.name == "renameat2" and call.args[1].endswith("step_00000020")

        with pytest.raises(ckpt.FencedError), Syscalls().hooked(_stopped(publishes, 0, continues)):
            root.publish_again(name, token)
        _assert_continued(tmp_path, [10, 11, 12])
        assert root.steps() == [10, 11, 12]
        assert root.superseded() == [name]


def test_a_step_that_comes_back_late_is_of_the_branch_that_was_left(tmp_path: Path) -> None:
    """The later owner has restored an older step, and published, before the earlier one moves this one back."""
    with opened(tmp_path, keep=2) as earlier, opened(tmp_path) as later:
        save(earlier, 5)
        save(earlier, 10)
        moved = False

        def before_it_moves_back(call: Call, perform: Callable[..., Any]) -> Any:
            nonlocal moved
            source = os.path.basename(call.args[0]) if call.name == "renameat2" else ""
            if source == "step_00000010" and not moved:
                moved = True
                later._parts.saver.root_claim.own()  # claims the root, and has not looked at it yet
                assert later.restore(state_of(-1.0), 5) == 5
                perform(*call.args)
                save(later, 6)
                return None
            return perform(*call.args)

        with pytest.raises(ckpt.FencedError), Syscalls().hooked(before_it_moves_back):
            earlier.delete(10)
        assert moved
        assert CheckpointRoot(str(tmp_path)).steps() == [5, 6]
        _assert_continued(tmp_path, [5, 6])
        assert len(CheckpointRoot(str(tmp_path)).superseded()) == 1


# -- a job that was stopped, and taken for dead on another host --------------------------------------------------------

_STOPPED = """
import sys
from pathlib import Path
from ckpt.errors import CheckpointError
from tests.ckpt.storage.small_saves import opened, save
from tests.ckpt.storage.syscalls import Syscalls

def wait(call, perform):
    if call.name == "renameat2" and call.args[1].endswith("step_00000002"):
        print("in flight", flush=True)
        sys.stdin.readline()
    return perform(*call.args)

root = Path(sys.argv[1])
with opened(root) as checkpointer:
    save(checkpointer, 1)
    for step in (2, 3, 4):
        try:
            with Syscalls().hooked(wait):
                save(checkpointer, step)
        except CheckpointError as error:
            print(type(error).__name__, error, flush=True)
        else:
            print("saved", step, flush=True)
"""


class _Trainer:
    """A job in a pid namespace of its own, so that this process knows of it by its leases alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", _STOPPED]
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [*command, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        if self.line() != "in flight":
            pytest.skip(f"no pid namespaces here: {self.process.communicate()[1]}")
        (self.trainer,) = psutil.Process(self.process.pid).children()

    def line(self) -> str:
        """Return what the job says next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def stop(self) -> None:
        """Stop it for longer than its leases are valid."""
        self.trainer.send_signal(signal.SIGSTOP)
        for path in (self.root / ".owner").rglob("*"):
            os.utime(path, (time.time() - 60,) * 2)

    def go_on(self) -> None:
        for path in (self.root / ".owner").rglob("*"):  # as its threads do soon
            os.utime(path)
        self.trainer.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[_Trainer]:
    """A job that has saved step 1, stopped just before it publishes step 2."""
    trainer = _Trainer(tmp_path)
    trainer.stop()
    yield trainer
    trainer.process.kill()
    trainer.process.communicate()


def test_a_restore_does_not_end_a_job_that_it_takes_for_dead(stopped: _Trainer) -> None:
    """All parts of step 2 are there, so the restore publishes it; the job goes on and says why."""
    state = state_of(-1.0)
    with ckpt.Checkpointer(stopped.root) as evaluation:
        assert evaluation.restore(state) == 2
        stopped.go_on()
        assert [stopped.line() for _ in range(3)] == ["saved 2", "saved 3", "saved 4"]
        assert evaluation.restore(state) == 4
    assert assert_whole(stopped.root) == [1, 2, 3, 4]
    assert "This job still owns the root, and goes on" in stopped.process.communicate()[1]


def test_a_save_that_a_restore_has_given_up_is_the_only_one_that_is_lost(stopped: _Trainer) -> None:
    (part,) = (stopped.root / ".pending").rglob("parts/*/rank_00000.json")
    part.unlink()
    with ckpt.Checkpointer(stopped.root) as evaluation:
        assert evaluation.restore(state_of(-1.0)) == 1
    stopped.go_on()
    assert stopped.line().startswith("SaveAbandonedError the save of step 2 was abandoned on all ranks")
    assert [stopped.line() for _ in range(2)] == ["saved 3", "saved 4"]
    assert assert_whole(stopped.root) == [1, 3, 4]


def test_a_job_that_saves_still_ends_one_that_it_takes_for_dead(stopped: _Trainer) -> None:
    with opened(stopped.root) as later:
        assert later.restore(state_of(-1.0)) == 2
        save(later, 5)
    stopped.go_on()
    assert stopped.line() == "saved 2"
    assert [stopped.line().partition(" ")[0] for _ in range(2)] == ["FencedError", "FencedError"]
    assert assert_whole(stopped.root) == [1, 2, 5]
