"""`on_failed_save`: training goes on after failed saves, on all ranks or on none, and is told what is lost."""

import contextlib
import errno
import logging
import os
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointTimeoutError,
    FencedError,
    SaveAbandonedError,
    StateError,
    StorageError,
    WriterError,
)
from ckpt.options import FailedSaves
from ckpt.ranks.collectives import Ranks
from ckpt.saving import patience
from ckpt.saving.patience import Patience
from ckpt.saving.save_failures import SaveFailures
from ckpt.storage import files
from tests.ckpt.async_calls import functions
from tests.ckpt.crash.killers import wait_until
from tests.ckpt.saving.full_disk import fill
from tests.support import launch_ranks, run_ranks
from tests.support.saves import save_here
from tests.support.selection import full_only

_MB = 1 << 20


def _state(value: float, count: int = _MB // 4) -> dict[str, Any]:
    return {"w": torch.arange(count, dtype=torch.float32) + value, "value": value}


@contextlib.contextmanager
def _files_are_limited(checkpointer: ckpt.Checkpointer, limit_bytes: int = 64 << 10) -> Any:
    """Those that the writer writes; one that is too large is no failure of a moment."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (limit_bytes, resource.RLIM_INFINITY):
        request = ckpt.AsyncRequest(resource.setrlimit, (resource.RLIMIT_FSIZE, (limit, hard)), [])
        checkpointer.queue.schedule_async_request(request)
        checkpointer.maybe_finalize(blocking=True)
        if limit == limit_bytes:
            yield


def _lines() -> list[tuple[str, str]]:
    """Return a list that gets what `ckpt` logs in this process: level and message."""
    lines: list[tuple[str, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelname, record.getMessage()))

    logger = logging.getLogger("ckpt")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    return lines


# -- training goes on --------------------------------------------------------------------------------------------------


def _train_on_a_disk(rank: int, world_size: int, root: Path, full: Path, freed: Path) -> Any:
    """As a training loop does, without a `try`."""
    lines, answers = _lines(), []
    with ckpt.Checkpointer(root, on_failed_save="warn", timeout=40) as checkpointer:
        for step in (1, 2, 3, 4):
            if step == 2:
                print("saved", flush=True)
                wait_until(full.exists, "the disk to be full")
            if step == 4:
                print("failed", flush=True)
                wait_until(freed.exists, "room")
            checkpointer.async_save(_state(step, 1000), step)
            answers.append((checkpointer.maybe_finalize(blocking=True), checkpointer.failed_steps))
    return answers, lines


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=full_only), 2])
def test_training_goes_on_while_the_disk_is_full(small_disk: Path, tmp_path: Path, world_size: int) -> None:
    full, freed = tmp_path / "full", tmp_path / "freed"
    with launch_ranks(_train_on_a_disk, world_size, small_disk / "root", full, freed) as group:
        for rank in range(world_size):
            group.wait_for_output(rank, "^saved")
        filler = fill(small_disk)
        full.touch()
        for rank in range(world_size):
            group.wait_for_output(rank, "^failed", timeout=45)
        filler.unlink()
        freed.touch()
        results = group.wait()
    for rank, result in enumerate(results):
        answers, lines = result.value
        assert answers == [([1], []), ([], [2]), ([], [2, 3]), ([4], [])]
        told = [(level, text) for level, text in lines if "training goes on (on_failed_save)" in text]
        assert [level for level, _ in told] == ["INFO" if rank else "WARNING"] * 2
        assert "is full" in told[0][1]
        assert "2 saves have failed since step 1 was published (steps 2, 3); training goes on" in told[1][1]
    assert ckpt.load(small_disk / "root")["value"] == 4


def _two_in_a_row(rank: int, world_size: int, root: Path) -> Any:
    answers: list[Any] = []
    allowed = ckpt.FailedSaves(in_a_row=2)
    with ckpt.Checkpointer(root, on_failed_save=allowed) as checkpointer:
        checkpointer.save(_state(1), 1)
        with _files_are_limited(checkpointer) if rank == 1 else contextlib.nullcontext():
            answers.append(checkpointer.save(_state(2), 2))
            for step in (3, 4):
                try:
                    answers.append(checkpointer.save(_state(step), step))
                except SaveAbandonedError as error:
                    answers.append((str(error), error.rank, error.step))
        torch.distributed.barrier()
        answers.append(checkpointer.save(_state(5), 5))
        return [*answers, checkpointer.failed_steps]


def test_so_many_in_a_row_are_raised_on_all_ranks(tmp_path: Path) -> None:
    for result in run_ranks(_two_in_a_row, 2, tmp_path / "root"):
        first, second, third, *rest = result.value
        assert first is False
        text, rank, step = second
        assert (rank, step) == (1, 3)
        assert text.startswith("2 saves have failed since step 1 was published (steps 2, 3), and on_failed_save allows")
        assert "2 in a row or failures for 6:00:00. The last failure: the save of step 3 was abandoned" in text
        assert "ulimit -f" in text
        assert third[0].startswith("3 saves have failed since step 1"), "it is raised until a save is published"
        assert rest == [True, []]


def _with_clocks_of_their_own(rank: int, world_size: int, root: Path) -> Any:
    """For rank 0 the time is over at the second failure, for rank 1 never."""
    answers = []
    allowed = ckpt.FailedSaves(longest=1e-6 if rank == 0 else None)
    with ckpt.Checkpointer(root, on_failed_save=allowed) as checkpointer:
        checkpointer.save(_state(1), 1)
        with _files_are_limited(checkpointer) if rank == 0 else contextlib.nullcontext():
            for step in range(2, 8):
                try:
                    answers.append(checkpointer.save(_state(step), step))
                except SaveAbandonedError as error:
                    answers.append(error.step)
        checkpointer.save(_state(9), 9)
    return answers


def test_what_the_first_rank_says_about_the_time_counts_for_all(tmp_path: Path) -> None:
    one, other = (result.value for result in run_ranks(_with_clocks_of_their_own, 2, tmp_path / "root"))
    assert one == other
    assert set(one) <= {False, *range(2, 8)}


def _without_a_slot_on_rank_0(rank: int, world_size: int, root: Path) -> Any:
    """Rank 0 fails in staging, and allows no failure; rank 1 learns that its save was abandoned, and allows some."""
    allowed = ckpt.FailedSaves(in_a_row=5 if rank else 1)
    slots = ckpt.Staging(slots=2 if rank else 1)
    with ckpt.Checkpointer(root, timeout=60 if rank else 2, on_failed_save=allowed, staging=slots) as checkpointer:
        request = checkpointer.save_request(_state(1, 10), 1)
        try:
            checkpointer.async_save(_state(2, 10), 2)
            checkpointer.maybe_finalize(blocking=True)
            raised = None
        except (CheckpointTimeoutError, SaveAbandonedError) as error:
            raised = str(error).partition(",")[0]
        failed = checkpointer.failed_steps
        torch.distributed.barrier()
        request.execute_sync()
        return raised, failed


def test_a_rank_that_fails_in_staging_and_one_whose_save_that_abandons_judge_alike(tmp_path: Path) -> None:
    one, other = (result.value for result in run_ranks(_without_a_slot_on_rank_0, 2, tmp_path / "root"))
    assert one == other
    assert one in ((None, [2]), ("1 save has failed since the start (step 2)", [2]))


def _fails_at_a_step_again(rank: int, world_size: int, root: Path) -> Any:
    """Step 5 is tried twice before the root is claimed: first it is the first failure, then the second one."""
    answers: list[Any] = []

    def save(step: int) -> bool | str:
        try:
            return checkpointer.save(_state(step, 10), step)
        except StorageError as error:
            return str(error)

    @contextlib.contextmanager
    def root_is_away() -> Any:
        checkpointer.restore(_state(0, 10), only="w")  # so that the next save claims the root anew
        torch.distributed.barrier()
        if rank == 0:
            root.rename(root.with_name("away"))
            root.write_text("not a directory")
        torch.distributed.barrier()
        yield
        torch.distributed.barrier()
        if rank == 0:
            root.unlink()
            root.with_name("away").rename(root)
        torch.distributed.barrier()

    with ckpt.Checkpointer(root, on_failed_save=ckpt.FailedSaves(in_a_row=2)) as checkpointer:
        answers.append(save(6))
        with root_is_away():
            answers.append(save(5))
        answers.append(save(7))
        with root_is_away():
            answers += [save(4), save(5)]
    return answers


def test_an_earlier_answer_about_a_step_does_not_count_again(tmp_path: Path) -> None:
    for result in run_ranks(_fails_at_a_step_again, 2, tmp_path / "root"):
        *before, last = result.value
        assert before == [True, False, True, False]
        assert "2 saves have failed since step 7 was published (steps 4, 5)" in str(last)


def test_the_time_begins_with_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("ckpt.saving.save_failures.time.monotonic", lambda: clock[0])
    failures = SaveFailures(FailedSaves(longest=timedelta(minutes=30)), Ranks())

    def fails(step: int, at: float) -> None:
        clock[0] = at
        error = SaveAbandonedError("no", rank=0, step=step)
        failures.note(error, StorageError, f"save {step}", step)
        failures.check(error)

    fails(1, at=1000.0)
    fails(2, at=2799.0)
    failures.published(3)
    fails(4, at=9000.0)
    fails(5, at=10_799.0)
    with pytest.raises(SaveAbandonedError, match=r"3 saves have failed since step 3 .*steps 4, 5, 6.*for 0:30:00"):
        fails(6, at=10_800.0)


def _claims_a_file(rank: int, world_size: int, root: Path, repaired: Path) -> Any:
    events: list[ckpt.events.Event] = []
    with ckpt.observe(events.append), ckpt.Checkpointer(root, on_failed_save="warn") as checkpointer:
        answers: list[Any] = [checkpointer.async_save(_state(1), 1), checkpointer.save(_state(2), 2)]
        answers.append(checkpointer.failed_steps)
        print("failed", flush=True)
        wait_until(repaired.exists, "the repair")
        return [*answers, checkpointer.save(_state(3), 3), checkpointer.failed_steps], [
            type(e).__name__ for e in events
        ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_root_that_cannot_be_claimed_is_a_failed_save(tmp_path: Path, world_size: int) -> None:
    root, repaired = tmp_path / "root", tmp_path / "repaired"
    root.write_text("not a directory")
    with launch_ranks(_claims_a_file, world_size, root, repaired) as group:
        for rank in range(world_size):
            group.wait_for_output(rank, "^failed")
        root.unlink()
        repaired.touch()
        for result in group.wait():
            answers, events = result.value
            assert answers == [None, False, [1, 2], True, []]
            assert events.count("SaveAbandoned") == 2


def test_a_slot_that_does_not_become_free_is_a_failed_save(tmp_path: Path) -> None:
    """The storage may not answer."""
    with ckpt.Checkpointer(tmp_path, timeout=2, on_failed_save="warn") as checkpointer:
        requests = [checkpointer.save_request(_state(step, 10), step) for step in (1, 2)]
        assert checkpointer.async_save(_state(3, 10), 3) is None
        assert checkpointer.failed_steps == [3]
        for request in requests:
            request.execute_sync()


# -- what is raised all the same ---------------------------------------------------------------------------------------


def test_mistakes_are_raised(tmp_path: Path) -> None:
    with (
        ckpt.Checkpointer(tmp_path, on_failed_save="warn") as one,
        ckpt.Checkpointer(tmp_path, on_failed_save="warn") as two,
    ):
        one.save(_state(1), 1)
        with pytest.raises(CheckpointExistsError):
            one.save(_state(1), 1)
        with pytest.raises(StateError, match="bad"):
            one.async_save({"bad": lambda: 0}, 2)
        two.save(_state(2), 2)
        with pytest.raises(FencedError):
            one.save(_state(3), 3)
        two.queue.schedule_async_request(ckpt.AsyncRequest(functions.fail, ("mine",), []))
        with pytest.raises(WriterError, match="mine"):
            two.maybe_finalize(blocking=True)
        assert one.failed_steps == two.failed_steps == []


def _diverges(rank: int, world_size: int, root: Path) -> str:
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.fill_(rank)
    with ckpt.Checkpointer(root, on_failed_save="warn") as checkpointer:
        with pytest.raises(SaveAbandonedError) as caught:
            checkpointer.save({"model": model}, 1)
        return str(caught.value)


def test_ranks_that_differ_are_an_error_of_on_divergence(tmp_path: Path) -> None:
    for result in run_ranks(_diverges, 2, tmp_path / "root"):
        assert "StateError: ranks have" in result.value


def _does_not_come(rank: int, world_size: int, root: Path) -> str:
    text = ""
    with ckpt.Checkpointer(root, timeout=1, on_failed_save="warn") as checkpointer:
        if rank == 0:
            with pytest.raises(CheckpointTimeoutError) as caught:
                checkpointer.async_save(_state(1), 1)
            text = str(caught.value)
        torch.distributed.barrier()
    return text


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    first, _ = run_ranks(_does_not_come, 2, tmp_path / "root")
    assert "rank 1 did not come within 1 s" in first.value


def test_without_the_option_each_failure_is_raised(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer, _files_are_limited(checkpointer):
        for step in (1, 2):
            with pytest.raises(SaveAbandonedError):
                checkpointer.save(_state(step), step)
        assert checkpointer.failed_steps == [1, 2]


# -- the end, restores and restarts ------------------------------------------------------------------------------------


def test_close_says_what_is_lost_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = ckpt.Checkpointer(tmp_path, on_failed_save="warn")
    checkpointer.save(_state(1), 1)
    limit = (resource.RLIMIT_FSIZE, (64 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(resource.setrlimit, limit, []))
    checkpointer.async_save(_state(2), 2)
    checkpointer.async_save(_state(3), 3)
    checkpointer.close()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == (
        "2 saves have failed since step 1 was published (steps 2, 3): what was trained since then is in no checkpoint"
    )


def test_close_raises_what_is_no_failed_save(tmp_path: Path) -> None:
    checkpointer = ckpt.Checkpointer(tmp_path, on_failed_save="warn")
    limit = (resource.RLIMIT_FSIZE, (64 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(resource.setrlimit, limit, []))
    checkpointer.async_save(_state(1), 1)
    checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(functions.fail, ("mine",), []))
    with pytest.raises(WriterError, match="mine"):
        checkpointer.close()


def test_training_that_goes_back_repeats_what_failed(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, on_failed_save=ckpt.FailedSaves(in_a_row=2)) as checkpointer:
        checkpointer.save(_state(1), 1)
        with _files_are_limited(checkpointer):
            assert not checkpointer.save(_state(2), 2)
            checkpointer.async_save(_state(3), 3)  # its error is not raised before the restore
            assert checkpointer.restore(_state(0)) == 1
            assert checkpointer.failed_steps == []
            assert checkpointer.maybe_finalize() == []
            assert not checkpointer.save(_state(2), 2)
            assert checkpointer.failed_steps == [2]
        assert checkpointer.save(_state(4), 4)


def test_a_save_that_fails_during_a_restart_is_given_up_as_others(tmp_path: Path) -> None:
    """What the finalize hook of `ckpt.restart` does."""
    with ckpt.Checkpointer(tmp_path, on_failed_save=ckpt.FailedSaves(in_a_row=1)) as checkpointer:
        checkpointer.save(_state(1), 1)
        limit = (resource.RLIMIT_FSIZE, (64 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(resource.setrlimit, limit, []))
        checkpointer.async_save(_state(2), 2)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=30))
        assert checkpointer.maybe_finalize() == []
        assert checkpointer.failed_steps == []
        checkpointer.queue.close()  # its writer has the limit
        assert checkpointer.save(_state(3), 3)


def test_the_last_save_before_a_preemption_says_that_it_failed(tmp_path: Path) -> None:
    with (
        ckpt.Checkpointer(tmp_path, on_failed_save="warn") as checkpointer,
        ckpt.PreemptionWatcher(checkpointer, signals=()) as watcher,
    ):
        with _files_are_limited(checkpointer):
            assert watcher.save(_state(1), 1) is False
        assert watcher.save(_state(2), 2) is True


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_is_told_of_a_step_that_is_not_published(small_disk: Path) -> None:
    """Its own `save` has ended then: it must not take the step for one that is there."""
    import torch.distributed.checkpoint as dcp

    from ckpt.integrations.dcp import Writer

    with (
        Writer(small_disk / "root", on_failed_save="warn", timeout=8) as writer,
        pytest.raises(dcp.CheckpointException, match="step 5 is not published"),
    ):
        dcp.save({"w": torch.ones(3_000_000)}, checkpoint_id=small_disk / "root" / "step_5", storage_writer=writer)


# -- failures of a moment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["_begin", "_write", "_manifest", "_decide"])
def test_a_disk_that_is_full_for_a_moment_is_not_noticed(
    moment: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer tries again; meanwhile there is room. A real disk, and a clock that this test sets.

    There is none for the intent, for the files of the pack, for the part manifest, and for what belongs to the step.
    """
    with ckpt.Checkpointer(small_disk / "root", timeout=40) as checkpointer, caplog.at_level(logging.INFO, "ckpt"):
        save_here(checkpointer, _state(1), 1)
        request = checkpointer.save_request(_state(2), 2)
        pauses: list[float] = []
        fillers: list[Path] = []

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            fillers[0].unlink(missing_ok=True)  # of several files, each in a thread, that have found no room

        monkeypatch.setattr(patience.time, "sleep", sleep)
        going_on = getattr(ckpt.saving.write.ShareWriter, moment)

        def on_a_full_disk(writer: Any, *given: Any) -> Any:
            fillers.append(fill(small_disk))
            return going_on(writer, *given)

        monkeypatch.setattr(ckpt.saving.write.ShareWriter, moment, on_a_full_disk)
        request.execute_sync()
        assert pauses
        assert checkpointer.all_steps() == [1, 2]
    assert "is full" in caplog.text
    assert ckpt.load(small_disk / "root")["value"] == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EFBIG, errno.EROFS, errno.ENOENT, errno.EEXIST])
def test_what_waiting_does_not_mend_fails_at_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience.time, "sleep", functions.fail)
    error = StorageError("cannot write")
    error.__cause__ = OSError(number, os.strerror(number))
    assert not Patience(600.0)(error)


def test_a_sync_that_fails_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[StorageError] = []

    def fail(path: str) -> None:
        with files.storage_errors("sync", path):
            raise OSError(errno.EIO, "the kernel has dropped it")

    monkeypatch.setattr(Patience, "__call__", lambda patience, error: tried.append(error) or True)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, _state(1), 1)
        monkeypatch.setattr(files, "_sync", fail)
        with pytest.raises(SaveAbandonedError, match=r"cannot sync .*the kernel has dropped it"):
            save_here(checkpointer, _state(2), 2)
    assert tried == []


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all files of a save together; with a shorter timeout earlier, as other ranks wait."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(patience.time, "sleep", sleep)
    monkeypatch.setattr(patience.time, "monotonic", lambda: now)
    error = StorageError("cannot write")
    error.__cause__ = OSError(errno.ENOSPC, "full")
    for timeout_s, longest_s in ((600.0, 8.0), (16.0, 2.0)):
        tries_again, begin = Patience(timeout_s), now
        while tries_again(error):
            pass
        assert now - begin == pytest.approx(longest_s)
        assert not tries_again(error)


# -- what is logged ----------------------------------------------------------------------------------------------------


def _logged(rank: int, world_size: int, root: Path) -> Any:
    lines = _lines()
    with ckpt.Checkpointer(root) as checkpointer:
        begin = time.monotonic()
        checkpointer.save(_state(1), 1)
        seconds = time.monotonic() - begin
    return [text for level, text in lines if level == "INFO" and "is published" in text], seconds


def test_a_line_for_each_published_step(tmp_path: Path) -> None:
    """One for the job, with the bytes of all ranks."""
    (first, seconds), (second, _) = (result.value for result in run_ranks(_logged, 2, tmp_path / "root"))
    assert second == []
    (line,) = first
    words = line.split()
    assert words[:5] == ["step", "1", "is", "published:", words[4]]
    assert _MB <= int(words[4]) < 1.1 * _MB
    assert words[5:7] == ["bytes", "in"]
    assert 0 < float(words[7]) <= seconds
    assert words[8:13] == ["s,", "of", "which", "training", "waited"]
    assert 0 < float(words[13]) <= float(words[7])
