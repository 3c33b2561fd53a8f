"""Damaged steps are replaced, older ones continued, single ones removed: by moves that a person can take back."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
import inprocess
from ckpt import AsyncCallsQueue
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FencedError, StorageError
from ckpt.ranks.collectives import StoreRanks
from ckpt.ranks.failure import Failure
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from ckpt.saving import recover, write
from ckpt.saving.publish import publish
from ckpt.storage import files, step_reader
from ckpt.storage.commit import PendingSave
from ckpt.storage.ownership import OwnerState
from ckpt.storage.root import CheckpointRoot
from ckpt.validation import validate
from inprocess.abort import AbortTorchDistributed
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from tests.inprocess.coordination.helpers import eventually
from tests.support import LeakCheck, run_ranks
from tests.support.saves import save_here
from tests.support.template import REPOSITORY
from tools.inspect_ckpt.__main__ import main


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50_000,), value), "number": value}


def _restored(root: Path, step: int | None = None) -> tuple[int | None, float]:
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        state = _state(-1.0)
        found = checkpointer.restore(state, step)
    assert state["w"].unique().tolist() == [state["number"]]
    return found, state["number"]


def _damage(root: Path, step: int) -> None:
    file = root / f"step_{step:08d}" / "packs" / "000" / "rank_00000_000"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _names(path: Path) -> list[str]:
    return sorted(name[:13] for name in os.listdir(path)) if path.exists() else []


# -- damaged steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [2.0, 20.0], ids=["equal", "other"])
def test_a_damaged_step_is_replaced_and_kept(tmp_path: Path, again: float, capsys: pytest.CaptureFixture[str]) -> None:
    """The new copy was thrown away if it was equal, and refused if it was not; the next start went back again."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
    _damage(tmp_path, 2)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(_state(0.0)) == 1
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.damaged == (2,)
        save_here(checkpointer, _state(again), 2)
    assert _restored(tmp_path) == (2, again)
    assert validate(str(tmp_path / "step_00000002")).whole
    assert _names(tmp_path / ".damaged") == ["step_00000002"]
    assert main(["ls", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "set aside" in text
    assert "was damaged" in text
    (kept,) = os.listdir(tmp_path / ".damaged")
    assert main(["rm", str(tmp_path), kept, "--yes"]) == 0
    assert _names(tmp_path / ".damaged") == []


def test_a_step_damaged_twice_is_kept_twice(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
        save_here(checkpointer, _state(2.0), 2)
    for value in (3.0, 4.0):
        _damage(tmp_path, 2)
        (tmp_path / "step_00000002/intent.json").write_text("{")  # nothing says which save it was
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(_state(0.0)) == 1
            save_here(checkpointer, _state(value), 2)
        assert _restored(tmp_path) == (2, value)
    assert _names(tmp_path / ".damaged") == ["step_00000002", "step_00000002"]


def _two_ranks_replace(rank: int, world_size: int, root: Path) -> tuple[int | None, list[int]]:
    with ckpt.Checkpointer(root) as checkpointer:
        step = checkpointer.restore(_state(0.0))
        save_here(checkpointer, _state(20.0), 2)
        return step, checkpointer.all_steps()


def test_two_ranks_replace_a_damaged_step(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
    _damage(tmp_path, 2)
    for result in run_ranks(_two_ranks_replace, 2, tmp_path):
        assert result.value == (1, [1, 2])
    assert _restored(tmp_path) == (2, 20.0)


def test_a_job_that_only_restores_moves_nothing(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
    _damage(tmp_path, 2)
    for read_only in (False, True):
        with ckpt.Checkpointer(tmp_path, read_only=read_only) as checkpointer:
            assert checkpointer.restore(_state(0.0)) == 1
    assert CheckpointRoot(str(tmp_path)).steps() == [1, 2]
    assert len(os.listdir(tmp_path / ".owner")) == 2  # one claim, and its leases


def test_success_is_never_claimed_for_bytes_that_are_not_there(tmp_path: Path) -> None:
    """Zeros of two dtypes had one digest."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"w": torch.zeros(1000)}, 1)
        for state in (
            {"w": torch.zeros(1000, dtype=torch.int32)},
            {"w": torch.zeros(10, 100)},
            {"w": torch.zeros(1000)},
        ):
            with pytest.raises(CheckpointExistsError, match="already published"):
                save_here(checkpointer, state, 1)
        checkpointer.delete(1)
        save_here(checkpointer, {"w": torch.zeros(1000, dtype=torch.int32)}, 1)
    with ckpt.open(tmp_path) as opened:
        assert opened["w"].dtype == "int32"


# -- branches ----------------------------------------------------------------------------------------------------------


def _save_all(root: Path, steps: tuple[int, ...]) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        for step in steps:
            save_here(checkpointer, _state(float(step)), step)


def test_training_goes_on_from_an_older_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next save of 30 failed, and the next start took the old 30."""
    _save_all(tmp_path, (10, 20, 30))
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(_state(0.0), step=20) == 20
        assert checkpointer.all_steps() == [10, 20, 30]  # nothing is moved before there is something new
        save_here(checkpointer, _state(-25.0), 25)
        assert checkpointer.all_steps() == [10, 20, 25]
        save_here(checkpointer, _state(-30.0), 30)
    assert _restored(tmp_path) == (30, -30.0)
    assert _names(tmp_path / ".superseded") == ["step_00000030"]
    main(["ls", str(tmp_path)])
    assert "superseded" not in capsys.readouterr().out
    main(["ls", str(tmp_path), "--all"])
    assert "superseded" in capsys.readouterr().out

    assert main(["restore-branch", str(tmp_path), "30"]) == 0
    assert CheckpointRoot(str(tmp_path)).steps() == [10, 20, 30]
    assert _restored(tmp_path) == (30, 30.0)
    assert _names(tmp_path / ".superseded") == ["step_00000025", "step_00000030"]
    assert main(["restore-branch", str(tmp_path), "30"]) == 0  # and back: with 25, which it continues
    assert CheckpointRoot(str(tmp_path)).steps() == [10, 20, 25, 30]
    assert _restored(tmp_path) == (30, -30.0)


def test_one_job_goes_back_while_it_runs(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            save_here(checkpointer, _state(float(step)), step)
        for again in range(2):
            state = _state(0.0)
            assert checkpointer.restore(state, step=1) == 1
            for step in (2, 3):
                save_here(checkpointer, _state(step + 10.0 * again), step)
        assert checkpointer.all_steps() == [1, 2, 3]
    assert _restored(tmp_path) == (3, 13.0)
    assert (
        _names(tmp_path / ".superseded") == ["step_00000002", "step_00000003"] * 2
        or len(_names(tmp_path / ".superseded")) == 4
    )


def test_the_newest_step_continues_the_one_before(tmp_path: Path) -> None:
    _save_all(tmp_path, (10, 20, 30))
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(_state(0.0), step=20)
        save_here(checkpointer, _state(0.0), 40)
    with ckpt.open(tmp_path) as opened, ckpt.open(tmp_path, 20) as before:
        assert opened.summary["continues"] == {"step": 20, "save": before.summary["save"]}
    with ckpt.open(tmp_path, 10) as first:
        assert first.summary["continues"] is None


def test_training_does_not_begin_anew_beside_superseded_steps(tmp_path: Path) -> None:
    """A job was killed between moving them aside and its own first step."""
    _save_all(tmp_path, (10, 20))
    root = CheckpointRoot(str(tmp_path))
    for step in (10, 20):
        root.move_aside(step, root.ownership.newest(), "superseded")
    with ckpt.Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointNotFoundError, match="restore-branch"):
        checkpointer.restore(_state(0.0))
    assert main(["restore-branch", str(tmp_path), "20"]) == 0
    assert _restored(tmp_path) == (20, 20.0)
    assert root.steps() == [10, 20]


def test_delete(tmp_path: Path) -> None:
    _save_all(tmp_path, (1, 2))
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, _state(3.0), 3)
        checkpointer.delete(1)
        assert checkpointer.all_steps() == [2, 3]
        with pytest.raises(CheckpointNotFoundError, match="no published step 1"):
            checkpointer.delete(1)
        with ckpt.open(tmp_path, 2), pytest.raises(StorageError, match="being read"):
            checkpointer.delete(2)
        checkpointer.delete(2)
        save_here(checkpointer, _state(4.0), 4)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.delete(3)
    assert _restored(tmp_path) == (4, 4.0)


def test_rm_keeps_the_last_whole_step(tmp_path: Path) -> None:
    _save_all(tmp_path, (1, 2))
    assert main(["rm", str(tmp_path), "1", "2", "--yes"]) == 2
    assert CheckpointRoot(str(tmp_path)).steps() == [1, 2]
    assert main(["rm", str(tmp_path), "1"]) == 2  # it asks, and there is no terminal
    assert main(["rm", str(tmp_path), "1", "--yes"]) == 0
    assert CheckpointRoot(str(tmp_path)).steps() == [2]
    assert main(["rm", str(tmp_path), "2", "--yes", "--force"]) == 0
    assert CheckpointRoot(str(tmp_path)).steps() == []
    assert main(["rm", str(tmp_path), "7", "--yes"]) == 2


def test_tools_change_nothing_beside_a_job(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
        for command in (["rm", "1", "--yes"], ["clean", "--yes"], ["restore-branch", "1"]):
            arguments = [command[0], str(tmp_path), *command[1:]]
            assert main(arguments) in (0, 2)
        save_here(checkpointer, _state(3.0), 3)
        assert checkpointer.all_steps() == [1, 2, 3]


# -- starts that recover the same save ---------------------------------------------------------------------------------


class _Stop(BaseException):
    pass


def _leave_complete(root: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise _Stop

    with monkeypatch.context() as patch, contextlib.suppress(_Stop), ckpt.Checkpointer(root) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
        patch.setattr(write, "publish", stop)
        checkpointer.save_request(_state(float(step)), step).execute_sync()


def test_of_two_starts_that_recover_a_save_the_later_one_publishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one truncated documents of a step that the other had published."""
    _leave_complete(tmp_path, 2, monkeypatch)
    root = CheckpointRoot(str(tmp_path))
    (save,) = root.pending()
    token = root.ownership.claim(root.ownership.newest())
    at_the_documents, go_on = threading.Event(), threading.Event()
    write_document = files.write_document

    def slow(path: str, data: bytes, scratch: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            at_the_documents.set()
            assert go_on.wait(30)
        write_document(path, data, scratch)

    monkeypatch.setattr(files, "write_document", slow)
    outcome: list[Exception] = []

    def first() -> None:
        try:
            publish(PendingSave(root, save, token), lambda: None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert at_the_documents.wait(30)
    later = root.ownership.claim(token)
    recover.take_over(root, later, recover.Branch(), 0.0, print)
    before = (tmp_path / "step_00000002/zarr.json").read_bytes()
    go_on.set()
    thread.join(30)
    assert isinstance(outcome[0], (FencedError, StorageError))
    assert (tmp_path / "step_00000002/zarr.json").read_bytes() == before
    assert validate(str(tmp_path / "step_00000002")).whole
    assert not [name for name in os.listdir(tmp_path / "step_00000002") if name.startswith(".")]


def test_a_warmup_does_not_hide_the_save_of_a_dead_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It made this job the owner, which was then taken for the one that had left the save."""
    _leave_complete(tmp_path, 2, monkeypatch)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        state = _state(0.0)
        checkpointer.warmup(state)
        assert checkpointer.restore(state) == 2
        assert state["number"] == 2.0


def test_a_run_that_found_nothing_supersedes_what_an_earlier_one_published_since(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.Checkpointer(tmp_path) as earlier, ckpt.Checkpointer(tmp_path) as later:
        earlier.warmup(_state(0.0))
        assert later.restore(_state(0.0)) is None
        save_here(earlier, _state(-20.0), 20)
        save_here(later, _state(10.0), 10)
        save_here(later, _state(20.0), 20)
        assert later.all_steps() == [10, 20]
    assert "step 20 is of another branch: training began anew; moved to" in caplog.text
    assert _restored(tmp_path) == (20, 20.0)
    with ckpt.open(tmp_path, 10) as first:
        assert first.summary["continues"] is None


def test_history_is_true_though_the_restored_step_was_moved_aside(tmp_path: Path) -> None:
    _save_all(tmp_path, (10, 20))
    with ckpt.open(tmp_path, 20) as opened:
        save = opened.summary["save"]
    root = CheckpointRoot(str(tmp_path))
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(_state(0.0)) == 20
        root.move_aside(20, root.ownership.newest(), "superseded")
        save_here(checkpointer, _state(30.0), 30)
    with ckpt.open(tmp_path, 30) as opened:
        assert opened.summary["continues"] == {"step": 20, "save": save}


@pytest.mark.parametrize("last", ["save", "restore", "delete"])
def test_a_closed_checkpointer_owns_nothing(tmp_path: Path, last: str) -> None:
    _save_all(tmp_path, (1, 2))
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        if last != "delete":
            save_here(checkpointer, _state(3.0), 3)
        if last == "restore":
            checkpointer.restore(_state(0.0))
        if last == "delete":
            checkpointer.delete(1)
    ownership = CheckpointRoot(str(tmp_path)).ownership
    assert ownership.state(ownership.newest()) is OwnerState.GONE
    assert main(["rm", str(tmp_path), "2", "--yes"]) in (0, 2)


def test_a_dropped_checkpointer_keeps_no_thread(tmp_path: Path) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "ckpt-claim"}

    before = threads()
    with AsyncCallsQueue() as queue:
        checkpointer = ckpt.Checkpointer(tmp_path, queue=queue)
        save_here(checkpointer, _state(1.0), 1)
        (own,) = threads() - before
        del checkpointer
        gc.collect()
        own.join(30)
        assert not own.is_alive()


def test_leases_of_readers_end_with_them(tmp_path: Path) -> None:
    """Not with a fork of their process; and what a reader leaves that was killed is removed."""
    with ckpt.Checkpointer(tmp_path, keep=1) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
        opened = ckpt.open(tmp_path)
        leases = tmp_path / ".readers" / opened.summary["save"]
        pid = os.fork()
        if not pid:
            opened.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert len(os.listdir(leases)) == 1
        (leases / "gone-1-1-00000000").touch()
        os.utime(leases / "gone-1-1-00000000", (1e9, 1e9))
        save_here(checkpointer, _state(2.0), 2)
        assert checkpointer.all_steps() == [1, 2]
        opened.close()
        leases.mkdir(exist_ok=True)
        (leases / "gone-1-1-00000000").touch()
        os.utime(leases / "gone-1-1-00000000", (1e9, 1e9))
        save_here(checkpointer, _state(3.0), 3)
        assert checkpointer.all_steps() == [3]
    assert not leases.exists()


_IDLE = """
import gc, sys
import ckpt
from ckpt.storage import step_reader
step_reader.RENEW_S = 0.05
how, root = sys.argv[1:]
if how == "lazy":
    held = ckpt.load(root, lazy=True)["w"]
elif how == "tensor":
    held = ckpt.open(root)["w"]
else:
    held = ckpt.open(root)
print("opened", flush=True)
sys.stdin.readline()
if how != "checkpoint":
    print(float(held[0]), flush=True)
del held
gc.collect()
print("dropped", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["lazy", "tensor", "checkpoint"])
def test_an_idle_reader_of_another_host_keeps_its_step(tmp_path: Path, how: str) -> None:
    """Its lease is all that this process knows of it. It is renewed as long as the object lives, without any read."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", _IDLE]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with ckpt.Checkpointer(tmp_path, keep=1) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
        with subprocess.Popen([*command, how, str(tmp_path)], text=True, cwd=REPOSITORY, **pipes) as reader:
            assert reader.stdout is not None
            assert reader.stdin is not None
            if reader.stdout.readline() != "opened\n":
                pytest.skip(f"no pid namespaces here: {reader.communicate()[1]}")
            (lease,) = (tmp_path / ".readers").glob("*/*")
            before = lease.stat().st_mtime - 5.0  # a lease that had expired could be removed before it is renewed
            os.utime(lease, (before, before))
            eventually(lambda: lease.stat().st_mtime > before + 1.0)
            save_here(checkpointer, _state(2.0), 2)
            assert checkpointer.all_steps() == [1, 2]
            reader.stdin.write("\n")
            reader.stdin.flush()
            if how != "checkpoint":
                assert float(reader.stdout.readline()) == float(_state(1.0)["w"][0])
            assert reader.stdout.readline() == "dropped\n"
            eventually(lambda: not lease.exists())  # the thread that renews it may just hold the object
            save_here(checkpointer, _state(3.0), 3)
            assert checkpointer.all_steps() == [3]
            reader.communicate("\n")


def test_a_fork_of_a_reader_renews_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    """And the thread of the reader ends with it."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
    monkeypatch.setattr(step_reader, "RENEW_S", 1000.0)
    opened = ckpt.open(tmp_path)
    (lease,) = (tmp_path / ".readers").glob("*/*")
    os.utime(lease, (1e9, 1e9))
    opened._reader._lease._renewed = -1e9  # type: ignore[attr-defined]
    pid = os.fork()
    if not pid:
        opened.check()
        os._exit(0)
    os.waitpid(pid, 0)
    assert lease.stat().st_mtime == 1e9
    opened.check()
    assert lease.stat().st_mtime > 1e9
    threads = [thread for thread in threading.enumerate() if thread.name == "ckpt-reader"]
    assert len(threads) == 1
    del opened
    gc.collect()
    threads[0].join(20)
    assert not threads[0].is_alive()
    assert not lease.exists()


def test_an_adoption_needs_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _leave_complete(tmp_path, 2, monkeypatch)
    root = CheckpointRoot(str(tmp_path))
    (save,) = root.pending()
    token = root.ownership.claim(root.ownership.newest())
    root.ownership.claim(token)
    for act in (
        lambda: publish(PendingSave(root, save, token), lambda: None),
        lambda: PendingSave(root, save, token).abandon(Failure(None, "SaveAbandonedError", "late")),
        lambda: recover.take_over(root, token, recover.Branch(0), 0.0, print),
    ):
        with pytest.raises(FencedError):
            act()
    assert root.pending() == [save]


# -- from the restore on, before the first save ------------------------------------------------------------------------


def _weights(value: float) -> dict[str, Any]:
    """A state that can be registered."""
    return {"w": torch.full((50_000,), value)}


def _published(root: Path, *steps: int) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        for step in steps:
            save_here(checkpointer, _weights(float(step)), step)


def _gone_back(root: Path, **options: Any) -> ckpt.Checkpointer:
    """Return a Checkpointer that has restored step 10, of a root with 10, 20 and 30, and was asked for nothing else."""
    _published(root, 10, 20, 30)
    checkpointer = ckpt.Checkpointer(root, **options)
    assert checkpointer.restore(_weights(0.0), step=10) == 10
    return checkpointer


@pytest.mark.parametrize("how", ["recover_from_fault", "restore", "restore_registered", "both"])
def test_a_fault_before_the_first_save_does_not_bring_back_the_branch_that_was_left(tmp_path: Path, how: str) -> None:
    with _gone_back(tmp_path) as checkpointer:
        state = _weights(-1.0)
        checkpointer.register(**state)
        if how == "restore_registered":
            checkpointer.bridge.leave_restoring_to_next_iteration()
        for _ in range(2):
            if how != "restore":
                checkpointer.bridge.recover_from_fault(timedelta(seconds=10))
            if how == "restore_registered":
                checkpointer.bridge.restore_registered(StoreRanks(0, 1, None, 10), 1)
            assert checkpointer.recover() == [10]
            if how in ("restore", "both"):
                assert checkpointer.restore(state) == 10
            assert checkpointer.resume_step == 10
            assert state["w"].unique().tolist() == [10.0]
        assert checkpointer.all_steps() == [10, 20, 30]  # nothing is moved before there is something new
        save_here(checkpointer, _weights(-20.0), 20)
        assert checkpointer.restore(state) == 20
        assert checkpointer.all_steps() == [10, 20]
    assert ckpt.load(tmp_path)["w"].unique().tolist() == [-20.0]


def test_snapshots_of_the_new_branch_count_and_published_steps_of_the_old_one_do_not(tmp_path: Path) -> None:
    with _gone_back(tmp_path, snapshots=1) as checkpointer:
        state = _weights(0.0)
        for step in (11, 12):
            checkpointer.snapshot(_weights(float(step)), step)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10))
        assert checkpointer.recover() == [10, 11, 12]
        assert checkpointer.restore(state) == 12
        assert state["w"].unique().tolist() == [12.0]
        checkpointer.snapshot(_weights(25.0), 25)  # past a step of the old branch
        assert checkpointer.restore(state) == 25
        checkpointer.register(**state)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10))  # what is in memory alone is not restored here
        assert checkpointer.resume_step == 10


def test_snapshots_of_the_branch_that_was_left_do_not_count(tmp_path: Path) -> None:
    _published(tmp_path, 10)
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        state = _weights(0.0)
        assert checkpointer.restore(state) == 10
        for step in (11, 12):
            checkpointer.snapshot(_weights(float(step)), step)
        assert checkpointer.restore(state, 10) == 10
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10))
        assert checkpointer.recover() == [10]
        assert checkpointer.restore(state) == 10


def test_the_branch_that_was_left_can_be_chosen_again(tmp_path: Path) -> None:
    with _gone_back(tmp_path) as checkpointer:
        state = _weights(0.0)
        assert checkpointer.restore(state, 20) == 20
        assert checkpointer.recover() == [10, 20]
        assert checkpointer.restore(state, 30) == 30
        assert checkpointer.recover() == [10, 20, 30]
        _damage(tmp_path, 30)
        assert checkpointer.restore(state) == 20  # the step before on the same branch
        checkpointer.register(**state)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10))  # and the damaged one is not met again
        assert checkpointer.resume_step == 20
        save_here(checkpointer, _weights(25.0), 25)
        assert checkpointer.all_steps() == [10, 20, 25]
    assert _names(tmp_path / ".damaged") == ["step_00000030"]


def test_a_damaged_step_falls_back_on_the_lineage(tmp_path: Path) -> None:
    _published(tmp_path, 5, 10, 20)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        state = _weights(0.0)
        assert checkpointer.restore(state, 10) == 10
        _damage(tmp_path, 10)
        assert checkpointer.restore(state) == 5


def test_training_does_not_begin_anew_when_only_the_branch_that_was_left_is_there(tmp_path: Path) -> None:
    with _gone_back(tmp_path) as checkpointer:
        CheckpointRoot(str(tmp_path)).remove_step(10)
        with pytest.raises(CheckpointNotFoundError, match=r"\[20, 30\] are of the branch that was left"):
            checkpointer.restore(_weights(0.0))
        assert checkpointer.restore(_weights(0.0), 30) == 30


def test_an_evaluation_sees_what_is_published_since(tmp_path: Path) -> None:
    """A step is left by its save, not by its number, and a reader has no branch."""
    with ckpt.Checkpointer(tmp_path) as trainer:
        for step in (10, 20):
            save_here(trainer, _weights(float(step)), step)
        with ckpt.Checkpointer(tmp_path, read_only=True) as reader, ckpt.Checkpointer(tmp_path) as other:
            for evaluation in (reader, other):
                assert evaluation.restore(_weights(0.0), 10) == 10
            assert reader.restore(_weights(0.0)) == 20
            assert other.restore(_weights(0.0)) == 10
            save_here(trainer, _weights(30.0), 30)
            for evaluation in (reader, other):
                assert evaluation.restore(_weights(0.0)) == 30


def _one_is_replaced(initial_rank: int, world_size: int, root: Path, snapshots: bool) -> list[tuple[int, int | None]]:
    """Go back to step 10, then kill a rank; return what each iteration on this rank has restored."""
    checkpointer = ckpt.Checkpointer(root, timeout=timedelta(seconds=20), snapshots=1 if snapshots else None)
    begun: list[tuple[int, int | None]] = []

    @inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
        rank_assignment=inprocess.Compose(MaxActiveWorldSize(2), ShiftRanks()),
        soft_timeout=timedelta(seconds=25),
        hard_timeout=timedelta(seconds=40),
        last_call_wait=timedelta(seconds=0.1),
        monitor_thread_interval=timedelta(seconds=0.1),
        monitor_process_interval=timedelta(seconds=0.1),
    )
    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        dist.init_process_group("gloo")
        state = _weights(0.0)
        begun.append((call.iteration, checkpointer.restore(state, None if call.iteration else 10)))
        assert state["w"].unique().tolist() == [float(begun[-1][1] or 0)]
        if call.iteration == 0:
            for step in (11, 12) if snapshots else ():
                checkpointer.snapshot(_weights(float(step)), step)
            dist.barrier()
            if initial_rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        dist.destroy_process_group()

    train()
    checkpointer.close()
    return begun


@pytest.mark.parametrize("snapshots", [False, True])
def test_a_process_that_takes_the_place_of_another_agrees(tmp_path: Path, snapshots: bool) -> None:
    """The new rank 0, which reads the root for all, has not restored step 10 itself."""
    _published(tmp_path, 10, 20, 30)
    codes = {0: -signal.SIGKILL, 1: 0, 2: 0}
    results = run_ranks(_one_is_replaced, 3, tmp_path, snapshots, returncodes=codes, init_process_group=False)
    begun = [entry for result in results if result.value for entry in result.value if entry[0] == 1]
    assert begun == [(1, 12 if snapshots else 10)] * 2
