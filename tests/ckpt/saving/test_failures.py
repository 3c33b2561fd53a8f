"""What goes wrong around a `Checkpointer`, and what must still be true then. Deaths are in `tests/ckpt/crash`."""

import contextlib
import errno
import gc
import os
import resource
import signal
import subprocess
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckpt
from ckpt.async_calls import call
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTimeoutError,
    FencedError,
    RemoteTraceback,
    StateError,
)
from ckpt.ranks.failure import Failure
from ckpt.saving import write
from ckpt.storage.commit import Abandoned, PendingSave, Published
from ckpt.storage.directories import lock_shared
from ckpt.storage.names import SaveId
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Gate, ask
from tests.ckpt.crash.killers import wait_until, with_writer
from tests.ckpt.saving.full_disk import fill
from tests.support import LeakCheck, launch_ranks, run_ranks
from tests.support.saves import save_here
from tests.support.selection import FULL, full_only

_MB = 1 << 20
_SAVES = 100 if FULL else 30
_AT_ONCE_S = 30.0  # storage is tried again for 8 s; every time limit that could end the wait instead is longer


def _state(value: float, count: int = _MB // 4) -> dict[str, Any]:
    return {"w": torch.arange(count, dtype=torch.float32) + value, "value": value}


def _assert_restored(checkpointer: ckpt.Checkpointer, step: int, value: float, count: int = _MB // 4) -> None:
    state = _state(-1.0, count)
    assert checkpointer.restore(state, step) == step
    assert state["value"] == value
    assert state["w"].equal(_state(value, count)["w"])


def _what_happens(checkpointer: ckpt.Checkpointer, state: Any = None, step: int = 0) -> dict[str, Any]:
    """Save in the background as a training loop does; what `maybe_finalize` said, or the save itself.

    Without a state, of what was scheduled before.
    """
    begin = time.monotonic()
    try:
        if state is not None:
            checkpointer.async_save(state, step)
        return {"finalized": checkpointer.maybe_finalize(blocking=True)}
    except CheckpointError as error:
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "rank": error.rank,
            "step": error.step,
            "traceback": str(error.__cause__) if isinstance(error.__cause__, RemoteTraceback) else "",
            "waited_s": time.monotonic() - begin,
        }


def _limit_file_size(queue: ckpt.AsyncCallsQueue, limit_bytes: int) -> None:
    """Of the files that the writer writes."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = (resource.RLIMIT_FSIZE, (limit_bytes, hard))
    queue.schedule_async_request(ckpt.AsyncRequest(resource.setrlimit, arguments, []))
    queue.maybe_finalize_async_calls(blocking=True)


# -- storage refuses ---------------------------------------------------------------------------------------------------


def _too_large_on_one_rank(rank: int, world_size: int, root: Path, victim: int) -> list[dict[str, Any]]:
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(_state(1.0), 1)
        if rank == victim:
            _limit_file_size(checkpointer.queue, 64 << 10)
        answers = [_what_happens(checkpointer, _state(2.0), 2)]
        if rank == victim:
            _limit_file_size(checkpointer.queue, resource.RLIM_INFINITY)
        answers.append(_what_happens(checkpointer, _state(3.0), 3))
    return answers


@pytest.mark.parametrize(("victim", "world_size"), [pytest.param(0, 1, marks=full_only), (0, 2), (1, 2)])
def test_storage_that_refuses_one_rank_is_an_error_on_all_and_training_goes_on(
    tmp_path: Path, victim: int, world_size: int
) -> None:
    for result in run_ranks(_too_large_on_one_rank, world_size, tmp_path / "root", victim):
        failed, after = result.value
        assert (failed["kind"], failed["rank"], failed["step"]) == ("SaveAbandonedError", victim, 2)
        for part in (f"rank {victim}: StorageError", "step 2", "ulimit -f", "training can go on"):
            assert part in failed["text"]
        assert "storage/files.py" in failed["traceback"]
        assert failed["waited_s"] < _AT_ONCE_S
        assert after == {"finalized": [3]}
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.all_steps() == [1, 3]
        _assert_restored(checkpointer, 3, 3.0)


def _save_twice(rank: int, world_size: int, root: Path, repaired: Path) -> list[dict[str, Any]]:
    with ckpt.Checkpointer(root) as checkpointer:
        first = _what_happens(checkpointer, _state(1.0, 2 * _MB), 1)
        print("first", first, flush=True)
        while not repaired.exists():
            time.sleep(0.01)
        return [first, _what_happens(checkpointer, _state(2.0, 2 * _MB), 2)]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=full_only), 2])
def test_root_that_is_a_file(tmp_path: Path, world_size: int) -> None:
    root, repaired = tmp_path / "root", tmp_path / "repaired"
    root.write_text("not a directory")
    with launch_ranks(_save_twice, world_size, root, repaired) as group:
        for rank in range(world_size):
            group.wait_for_output(rank, "^first")
        root.unlink()
        repaired.touch()
        results = group.wait()
    for rank, result in enumerate(results):
        failed, after = result.value
        assert f"{root} is a file" in failed["text"]
        assert failed["kind"] == "StorageError"
        assert rank == 0 or failed["rank"] == 0
        assert failed["waited_s"] < _AT_ONCE_S
        assert after == {"finalized": [2]}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=full_only), 2])
def test_full_disk(small_disk: Path, tmp_path: Path, world_size: int) -> None:
    """Saves of 8 MB to 6 MB. The failed save gives back what it took; the next one works once there is room."""
    root, repaired = small_disk / "root", tmp_path / "repaired"
    with launch_ranks(_save_twice, world_size, root, repaired) as group:
        for rank in range(world_size):
            group.wait_for_output(rank, "^first")
        deadline = time.monotonic() + 40
        while (used := sum(file.stat().st_size for file in root.rglob("*") if file.is_file())) > 200_000:
            assert time.monotonic() < deadline, f"the failed save still takes {used} bytes"
            time.sleep(0.01)
        subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
        repaired.touch()
        results = group.wait()
    for result in results:
        failed, after = result.value
        assert "full" in failed["text"]
        assert failed["rank"] in range(world_size)
        assert failed["step"] == 1
        assert failed["traceback"]
        assert failed["waited_s"] < _AT_ONCE_S
        assert after == {"finalized": [2]}


def _fails_without_a_record(rank: int, world_size: int, root: Path, victim: int) -> list[dict[str, Any]]:
    """One rank can write nothing, not even the reason: neither its writer nor its trainer."""
    torch.distributed.init_process_group("gloo")  # with a store that is no file
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(_state(1.0), 1)
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == victim:
            _limit_file_size(checkpointer.queue, 0)
        request = checkpointer.save_request(_state(2.0), 2)
        checkpointer.queue.schedule_async_request(request)
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
        answers = [_what_happens(checkpointer)]
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        if rank == victim:
            _limit_file_size(checkpointer.queue, resource.RLIM_INFINITY)
        return [*answers, _what_happens(checkpointer, _state(3.0), 3)]


@pytest.mark.parametrize(
    ("victim", "world_size"), [pytest.param(0, 1, marks=full_only), pytest.param(0, 2, marks=full_only), (1, 2)]
)
def test_reason_that_storage_does_not_take_reaches_all_ranks(tmp_path: Path, victim: int, world_size: int) -> None:
    results = run_ranks(_fails_without_a_record, world_size, tmp_path / "root", victim, init_process_group=False)
    for result in results:
        failed, after = result.value
        assert (failed["kind"], failed["rank"], failed["step"]) == ("SaveAbandonedError", victim, 2)
        assert f"rank {victim}: StorageError" in failed["text"]
        assert "ulimit -f" in failed["text"]
        assert failed["waited_s"] < _AT_ONCE_S
        assert after == {"finalized": [3]}


def _save_on_a_full_disk(rank: int, world_size: int, root: Path, full: Path, repaired: Path) -> list[dict[str, Any]]:
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(_state(0.0, 1000), 1)
        print("saved", flush=True)
        wait_until(full.exists, "the disk to be full")
        first = _what_happens(checkpointer, _state(1.0, 1000), 2)
        print("first", flush=True)
        wait_until(repaired.exists, "room")
        return [first, _what_happens(checkpointer, _state(2.0, 1000), 3)]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=full_only), 2])
def test_disk_without_room_for_one_more_byte(small_disk: Path, tmp_path: Path, world_size: int) -> None:
    full, repaired = tmp_path / "full", tmp_path / "repaired"
    with launch_ranks(_save_on_a_full_disk, world_size, small_disk / "root", full, repaired) as group:
        for rank in range(world_size):
            group.wait_for_output(rank, "^saved")
        filler = fill(small_disk)
        full.touch()
        for rank in range(world_size):
            group.wait_for_output(rank, "^first")
        filler.unlink()
        repaired.touch()
        results = group.wait()
    for result in results:
        failed, after = result.value
        assert "is full" in failed["text"]
        assert failed["rank"] in range(world_size)
        assert failed["waited_s"] < _AT_ONCE_S
        assert after == {"finalized": [3]}


def test_root_that_disappears_during_the_save(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(_state(1.0), 1)
        (tmp_path / "root").rename(tmp_path / "elsewhere")
        assert _what_happens(checkpointer, _state(2.0), 2) == {"finalized": [2]}
        assert checkpointer.all_steps() == [2]


# -- ranks that contradict each other ----------------------------------------------------------------------------------


def _one_rank_cannot(rank: int, world_size: int, root: Path) -> list[str]:
    answers = []
    bad = {**_state(1.0), "bad": (lambda: 0) if rank == 1 else 1}
    good = {**_state(1.0), "bad": 1}
    with ckpt.Checkpointer(root) as checkpointer:
        with pytest.raises(StateError, match="bad") as first:  # the first save is planned together
            checkpointer.async_save(bad, 1)
        answers.append(str(first.value))
        checkpointer.save(good, 2)
        begin = time.monotonic()
        with pytest.raises(CheckpointError, match="bad") as second:  # later ones are not
            checkpointer.save(bad, 3)
        assert time.monotonic() - begin < 20, "no time limit was waited for"
        answers.append(str(second.value))
        checkpointer.save(good, 3)
        assert checkpointer.all_steps() == [2, 3]
    return answers


def test_a_leaf_that_one_rank_cannot_store_is_an_error_on_all(tmp_path: Path) -> None:
    healthy, bad = (result.value for result in run_ranks(_one_rank_cannot, 2, tmp_path / "root"))
    assert "rank 1" in healthy[0]
    assert "rank 1: StateError" in healthy[1]
    assert "step 3" in healthy[1]
    assert bad[0].startswith("bad") or "bad:" in bad[0]


# -- steps that are there ----------------------------------------------------------------------------------------------


def _again(rank: int, world_size: int, root: Path) -> list[dict[str, Any]]:
    with ckpt.Checkpointer(root) as checkpointer:
        states = [_state(1.0), _state(1.0), _state(2.0), _state(1.0)]
        return [_what_happens(checkpointer, state, 5) for state in states]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=full_only), 2])
def test_a_published_step_is_never_saved_again(tmp_path: Path, world_size: int) -> None:
    """Not with the same content either: success would be claimed for bytes that are not there."""
    for result in run_ranks(_again, world_size, tmp_path / "root"):
        first, *others = result.value
        assert first == {"finalized": [5]}
        for other in others:
            assert (other["kind"], other["rank"], other["step"]) == ("CheckpointExistsError", 0, 5)
            assert "already published" in other["text"]
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        _assert_restored(checkpointer, 5, 1.0)
        assert CheckpointRoot(str(tmp_path / "root")).pending() == []


def test_of_two_jobs_on_one_root_the_later_start_wins(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path) as one, ckpt.Checkpointer(tmp_path) as two:
        one.save(_state(1.0), 1)
        two.save(_state(2.0), 2)
        with pytest.raises(FencedError, match="started later"):
            one.save(_state(3.0), 3)
        two.save(_state(4.0), 4)
        with pytest.raises(FencedError):
            one.delete(1)
        assert one.all_steps() == two.all_steps() == [1, 2, 4]
    root = CheckpointRoot(str(tmp_path))
    assert (root.pending(), root.abandoned()) == ([], [])


# -- requests ----------------------------------------------------------------------------------------------------------


def test_finalize_functions_run_once_in_order_after_publication(tmp_path: Path) -> None:
    seen: list[Any] = []
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        request = checkpointer.save_request(_state(1.0), 1)
        request.add_finalize_fn(lambda: seen.append(checkpointer.all_steps()))
        request.add_finalize_fn(lambda: functions.fail("mine"))
        request.add_finalize_fn(lambda: seen.append("last"))
        checkpointer.queue.schedule_async_request(request)
        checkpointer.async_save(_state(2.0), 2)
        with pytest.raises(ValueError, match="mine"):
            checkpointer.maybe_finalize(blocking=True)
        assert seen == [[1], "last"] or seen == [[1, 2], "last"]
        assert checkpointer.maybe_finalize(blocking=True) == [1, 2]
        assert len(seen) == 2


def _execute(rank: int, world_size: int, root: Path) -> list[Any]:
    with ckpt.Checkpointer(root, timeout=timedelta(seconds=20)) as checkpointer:
        for step in range(1, 5):  # more often than there are slots
            checkpointer.save_request(_state(step), step).execute_sync()
        again = checkpointer.save_request(_state(9.0), 4)
        with pytest.raises(CheckpointExistsError):
            again.execute_sync()
        checkpointer.save_request(_state(5.0), 5).execute_sync()
        return [checkpointer.maybe_finalize(), checkpointer.all_steps()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_execute_sync_has_the_same_effect(tmp_path: Path, world_size: int) -> None:
    for result in run_ranks(_execute, world_size, tmp_path):
        assert result.value == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        _assert_restored(checkpointer, 5, 5.0)


def test_function_of_the_users_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, torch, ckpt

        class Note:
            def __init__(self, text):
                self.text = text

        def write_note(note, path):
            with open(path, "w") as file:
                file.write(note.text)

        if __name__ == "__main__":
            with ckpt.Checkpointer(sys.argv[1]) as checkpointer:
                request = ckpt.AsyncRequest(write_note, (Note("hello"), sys.argv[2]), [lambda: print("done")])
                checkpointer.queue.schedule_async_request(request)
                checkpointer.async_save({"w": torch.ones(3)}, 7)
                print(checkpointer.maybe_finalize(blocking=True))
        """)
    )
    (result,) = run_ranks(script, 1, tmp_path / "root", tmp_path / "note")
    assert result.stdout.split("\n")[:2] == ["done", "[7]"]
    assert (tmp_path / "note").read_text() == "hello"


# -- closing -----------------------------------------------------------------------------------------------------------


def test_close_finalizes_and_raises_the_first_failure(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer = ckpt.Checkpointer(tmp_path / "root")
    checkpointer.save(_state(1.0), 1)
    checkpointer.async_save(_state(2.0), 1)
    checkpointer.async_save(_state(3.0), 3)
    with pytest.raises(CheckpointExistsError):
        checkpointer.close()
    checkpointer.close()
    assert checkpointer.all_steps() == [1, 3]
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.maybe_finalize()


@pytest.mark.parametrize("begun", [False, True])
def test_an_aborted_save_is_never_published(tmp_path: Path, leak_check: LeakCheck, begun: bool) -> None:
    root, gate = CheckpointRoot(str(tmp_path / "root")), Gate.create(tmp_path)
    checkpointer = ckpt.Checkpointer(root.path)
    checkpointer.save(_state(1.0), 1)
    if not begun:
        checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(functions.stop_at, (gate,), []))
        gate.wait_entered()
    request = checkpointer.save_request(_state(2.0), 2)
    request.add_finalize_fn(lambda: functions.fail("never called"))
    checkpointer.queue.schedule_async_request(with_writer(request, hold=str(tmp_path / "never")))
    if begun:
        wait_until(lambda: [PendingSave(root, save).parts_present() for save in root.pending()] == [{0}], "the part")
    checkpointer.queue.close(abort=True)
    checkpointer.close()
    assert root.steps() == [1]
    assert root.pending() == []
    with ckpt.Checkpointer(root.path) as after:
        assert after.restore(_state(0.0)) == 1
        after.save(_state(2.0), 2)


def test_a_queue_from_outside_stays_open_and_all_calls_are_finalized(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.AsyncCallsQueue(num_writers=2, timeout_s=30) as queue:
        checkpointer = ckpt.Checkpointer(tmp_path, queue=queue)
        checkpointer.save(_state(1.0), 1)
        checkpointer.async_save(_state(2.0), 1)
        checkpointer.async_save(_state(2.0), 2)
        queue.schedule_async_request(ckpt.AsyncRequest(functions.nothing, (), []))
        with pytest.raises(CheckpointExistsError):
            checkpointer.close()
        assert queue.get_num_unfinalized_calls() == 0
        assert checkpointer.all_steps() == [1, 2]
        assert "pid" in ask(queue, functions.report_identity)


def test_what_the_queue_refuses_takes_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "no descriptor is left")

    with ckpt.Checkpointer(tmp_path / "root", timeout=timedelta(seconds=20)) as checkpointer:
        checkpointer.warmup(_state(0.0))
        with monkeypatch.context() as patch:
            patch.setattr(call, "pickled", refuse)
            for step in range(4):
                with pytest.raises(ckpt.SaveAbandonedError, match=r"OSError: .*no descriptor"):
                    checkpointer.async_save(_state(1.0), step)
        checkpointer.queue.close()  # the next save starts another writer
        checkpointer.save(_state(1.0), 4)
        assert checkpointer.all_steps() == [4]


def _interrupted(rank: int, world_size: int, folder: Path, gate: Gate, where: str) -> None:
    state = {"w": torch.ones(1 << 20)}
    with contextlib.suppress(KeyboardInterrupt):
        with ckpt.Checkpointer(folder / "root", staging=ckpt.Staging(slots=1)) as checkpointer:
            checkpointer.restore(state)
            checkpointer.save(state, 1)
            checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(functions.stop_at, (gate,), []))
            gate.wait_entered()
            checkpointer.async_save(state, 2)
            os.write(1, b"there\n")
            if where == "async_save":
                checkpointer.async_save(state, 3)
            elif where == "maybe_finalize":
                checkpointer.maybe_finalize(blocking=True)
            elif where == "close":
                checkpointer.close()
            else:
                for _ in range(3000):  # in short steps: a signal that comes just before the wait does not end the wait
                    time.sleep(0.01)
        raise AssertionError("not interrupted")
    print("interrupted", flush=True)


@pytest.mark.parametrize("where", ["async_save", "maybe_finalize", "close", "training"])
def test_ctrl_c_leaves_nothing_and_loses_nothing(tmp_path: Path, where: str) -> None:
    """To the whole process group, as a terminal does. What was staged is written and published all the same."""
    gate = Gate.create(tmp_path)
    with launch_ranks(_interrupted, 1, tmp_path, gate, where, init_process_group=False) as group:
        group.wait_for_output(0, "^there\n")
        os.killpg(group.pid(0), signal.SIGINT)
        group.wait_for_output(0, "^interrupted")
        gate.open()
        group.wait(30)
        group.wait_for_no_survivors(30)
    assert CheckpointRoot(str(tmp_path / "root")).steps() == [1, 2]


# -- many saves --------------------------------------------------------------------------------------------------------


def test_many_saves_leave_nothing(tmp_path: Path, leak_check: LeakCheck) -> None:
    state = {"layers": [_state(i, 1000) for i in range(4)], "w": torch.ones(50_000)}
    own = psutil.Process()
    with ckpt.Checkpointer(tmp_path, keep=2) as checkpointer:

        def saves(first: int, count: int) -> tuple[int, dict[str, int]]:
            for step in range(first, first + count):
                state["w"] += 1
                checkpointer.async_save(state, step)
                checkpointer.maybe_finalize()
            checkpointer.maybe_finalize(blocking=True)
            removed = tmp_path / ".abandoned"
            wait_until(lambda: not any(removed.iterdir()), "removed steps, which the writer deletes beside saves")
            gc.collect()
            return own.memory_info().rss, ask(checkpointer.queue, functions.report_state)

        rss, writer = saves(0, 20)
        leak_check.rebase()
        rss_after, writer_after = saves(20, _SAVES)
        leak_check.check()
        assert writer_after["fds"] == writer["fds"]
        assert writer_after["rss_kb"] - writer["rss_kb"] < 8_000
        assert rss_after - rss < 16 * _MB
        assert checkpointer.all_steps() == [_SAVES + 18, _SAVES + 19]
        hidden = [".abandoned", ".owner", ".pending", ".retired"]
        assert sorted(os.listdir(tmp_path)) == [*hidden, *(f"step_{step:08}" for step in checkpointer.all_steps())]
        assert not os.listdir(tmp_path / ".pending")
        assert not os.listdir(tmp_path / ".abandoned")
        checkpointer.close()
        leak_check.rebase()


def test_retention_keeps_multiples_and_what_is_being_read(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, keep=ckpt.Latest(2) | ckpt.Every(4)) as checkpointer:
        for step in range(1, 6):
            save_here(checkpointer, _state(step, 100), step)
        assert checkpointer.all_steps() == [4, 5]
        reader = lock_shared(str(tmp_path / "step_00000005"))
        assert reader is not None
        with reader:
            for step in range(6, 9):
                save_here(checkpointer, _state(step, 100), step)
            assert checkpointer.all_steps() == [4, 5, 7, 8]
            with ckpt.Checkpointer(tmp_path, read_only=True) as other:
                _assert_restored(other, 5, 5.0, 100)
        save_here(checkpointer, _state(9, 100), 9)
        assert checkpointer.all_steps() == [4, 8, 9]


# -- what an earlier run left ------------------------------------------------------------------------------------------


class _Stop(BaseException):
    pass


def _leave_pending(root: Path, step: int, monkeypatch: pytest.MonkeyPatch, *, complete: bool) -> None:
    """A save that stops dead right before it is published, or before its part is there."""

    def stop(*_: Any, **__: Any) -> Any:
        raise _Stop

    with monkeypatch.context() as patch, ckpt.Checkpointer(root) as checkpointer:
        if complete:
            patch.setattr(write, "publish", stop)
        else:
            patch.setattr(PendingSave, "write_part", stop)
        with pytest.raises(_Stop):
            save_here(checkpointer, _state(step), step)


@pytest.mark.parametrize("how", ["recover", "restore", "save"])
def test_left_over_saves_are_decided_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    root = CheckpointRoot(str(tmp_path / "root"))
    with ckpt.Checkpointer(root.path) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
    _leave_pending(Path(root.path), 3, monkeypatch, complete=False)
    complete = tmp_path / "complete"
    _leave_pending(complete, 2, monkeypatch, complete=True)
    (left,) = CheckpointRoot(str(complete)).pending()
    os.rename(complete / ".pending" / left.name, Path(root.path) / ".pending" / left.name)
    assert [save.step for save in root.pending()] == [2, 3]
    with ckpt.Checkpointer(root.path) as checkpointer:
        state = _state(0.0)
        if how == "save":
            save_here(checkpointer, state, 4)
        else:
            if how == "recover":
                assert checkpointer.recover() == [1, 2]
            assert checkpointer.restore(state) == 2
            assert state["w"].equal(_state(2.0)["w"])
            assert "published step 2" in caplog.text
            assert "abandoned the unfinished save of step 3" in caplog.text
        assert root.pending() == []
        assert checkpointer.all_steps() == ([1, 2, 4] if how == "save" else [1, 2])
        save_here(checkpointer, _state(5.0), 3)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_slots_that_do_not_become_free_are_an_error_with_a_deadline(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path, timeout=timedelta(seconds=5)) as checkpointer:
        requests = [checkpointer.save_request(_state(step), step) for step in (1, 2)]
        with pytest.raises(CheckpointTimeoutError, match=r"no staging slot .* steps \[1, 2\]") as caught:
            checkpointer.save_request(_state(3.0), 3)
        assert caught.value.rank == 0
        for request in requests:
            checkpointer.queue.schedule_async_request(request)
        checkpointer.save(_state(3.0), 3)
        assert checkpointer.all_steps() == [1, 2, 3]


def test_a_wait_for_a_rank_that_does_not_save_has_a_deadline(tmp_path: Path) -> None:
    def train(rank: int, world_size: int) -> Any:
        import torch.distributed as dist

        with ckpt.Checkpointer(tmp_path, timeout=timedelta(seconds=5)) as checkpointer:
            checkpointer.warmup(_state(0.0))
            answer = _what_happens(checkpointer, _state(1.0), 1) if rank == 0 else None
            dist.barrier()
            return answer, _what_happens(checkpointer, _state(2.0), 2)

    (failed, after), (_, other) = (result.value for result in run_ranks(train, 2))
    assert "CheckpointTimeoutError" in failed["text"]
    assert "raise the timeout" in failed["text"]
    assert after == other == {"finalized": [2]}


# -- the decision itself -----------------------------------------------------------------------------------------------


def test_a_save_abandoned_before_it_began_never_begins(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path / "root"))
    root.make()
    pending = PendingSave(root, SaveId(1, root.ownership.claim(0), "0" * 16))
    reason = Failure(1, "StorageError", "rank 1 cannot")
    assert pending.abandon(reason) == Abandoned(reason) == pending.outcome()
    root.clean()
    with pytest.raises(CheckpointError, match="abandoned before it began"):
        pending.begin(2, "digest")
    assert pending.outcome() == Abandoned(reason)
    assert root.pending() == []


def _begun(root: CheckpointRoot) -> PendingSave:
    """A save of step 1 that has begun."""
    root.make()
    pending = PendingSave(root, SaveId(1, root.ownership.claim(0), "0" * 16))
    pending.begin(2, "digest")
    return pending


def test_the_reason_of_the_first_to_abandon_is_everybodys(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path / "root"))
    pending = _begun(root)
    answers = [pending.abandon(Failure(rank, "WriterError", f"rank {rank} died")) for rank in (1, 0)]
    assert answers[0] == answers[1] == pending.outcome()
    (Path(root.abandoned_path) / pending.save.name / "reason.json").unlink()
    outcome = pending.outcome()
    assert outcome is not None
    assert "no record" in str(outcome)


def test_a_published_step_keeps_nothing_of_ranks_that_tried_to_give_it_up(tmp_path: Path) -> None:
    """One was killed while it wrote the reason, one after that."""
    root = CheckpointRoot(str(tmp_path / "root"))
    pending = _begun(root)
    for name in ("reason.json", ".reason.json.0123456789abcdef.tmp"):
        (Path(pending.path) / name).write_text("{")
    assert pending.publish() == Published()
    assert sorted(os.listdir(root.step_path(1))) == ["intent.json", "parts"]


def test_pending_steps_are_those_that_are_not_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ckpt.pending_steps(tmp_path / "root") == []
    _leave_pending(tmp_path / "root", 2, monkeypatch, complete=True)
    assert ckpt.pending_steps(tmp_path / "root") == [2]
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.restore(_state(0.0)) == 2
    assert ckpt.pending_steps(tmp_path / "root") == []
