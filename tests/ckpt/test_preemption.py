"""A rank is asked to stop: all ranks save the same step and end, or all end in time and the newest step stands."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import ckpt
import ckpt.restart
import inprocess
from tests.support import LeakCheck, RankGroup, launch_ranks, rank_values, run_ranks
from tests.support.selection import FULL

_ASKED = os.EX_TEMPFAIL
_SHORT = timedelta(seconds=4)
_LONG = timedelta(seconds=40)
_INTERVAL = timedelta(seconds=0.1)
_DEADLINE_S = 30.0
_SCHEDULES = 50 if FULL else 15

_default_store = dist.distributed_c10d._get_default_store

AtStep = Callable[[int, ckpt.PreemptionWatcher], object]


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _say(*words: object) -> None:
    print(*words, flush=True)


def _train(
    rank: int,
    world_size: int,
    root: str,
    at_step: AtStep = lambda step, watcher: None,
    before_save: Callable[[int], object] = lambda step: None,
    **options: Any,
) -> None:
    """Train until told to stop. Step 5 is published first."""
    state = {"weight": torch.zeros(1000), "rank": ckpt.PerRank(rank)}
    options = {"grace": _LONG, "interval": _INTERVAL, **options}
    with ckpt.Checkpointer(root) as checkpointer, ckpt.PreemptionWatcher(checkpointer, **options) as watcher:
        for step in range(1, 1_000_000):
            dist.all_reduce(torch.ones(()))
            state["weight"].fill_(step)
            if step == 5:
                checkpointer.save(state, step)
                _say("published 5")
            at_step(step, watcher)
            if watcher.should_stop(step):
                before_save(step)
                _say("stops", step, watcher.save(state, step))
                break
            time.sleep(0.001)
    sys.exit(watcher.exit_code)


def _ends_alike(group: RankGroup, root: Path, code: int = _ASKED) -> int:
    """Assert that all ranks have stopped after the same step, which is published; return it."""
    results = group.wait(returncodes=dict.fromkeys(range(group.world_size), code))
    lines = {line for result in results for line in result.stdout.splitlines() if line.startswith("stops")}
    assert len(lines) == 1, lines
    _, step, published = lines.pop().split()
    assert published == "True"
    _assert_newest(root, int(step))
    group.wait_for_no_survivors()
    return int(step)


def _assert_newest(root: Path, step: int) -> None:
    """Assert that this is the newest published step, and that it is whole."""
    loaded = ckpt.load(root)
    assert max(ckpt.Checkpointer(root, read_only=True).all_steps()) == step
    assert torch.equal(loaded["weight"], torch.full((1000,), float(step)))


# -- one process -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _watching(root: Path, **options: Any) -> Iterator[ckpt.PreemptionWatcher]:
    with (
        ckpt.Checkpointer(root) as checkpointer,
        ckpt.PreemptionWatcher(checkpointer, **{"grace": _LONG, "interval": _INTERVAL, **options}) as watcher,
    ):
        yield watcher


def _stops(watcher: ckpt.PreemptionWatcher) -> str:
    """Why it stops."""
    _wait_until(lambda: watcher.requested)
    assert watcher.should_stop(7)
    assert watcher.exit_code == _ASKED
    assert watcher.requested is not None
    return watcher.requested


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGRTMIN + 3])
def test_a_signal(number: int, tmp_path: Path, leak_check: LeakCheck) -> None:
    earlier = signal.getsignal(number)
    with _watching(tmp_path / "root", signals=[number]) as watcher:
        assert not watcher.should_stop(6)
        assert (watcher.requested, watcher.exit_code) == (None, 0)
        os.kill(os.getpid(), number)
        assert "signal" in _stops(watcher)
        assert watcher.save({"weight": torch.full((1000,), 7.0)}, 7)
        assert watcher.save({"weight": torch.full((1000,), 8.0)}, 7), "it is published already"
    assert signal.getsignal(number) == earlier
    assert signal.set_wakeup_fd(-1) == -1
    _assert_newest(tmp_path / "root", 7)


def test_a_step_of_another_branch_is_not_taken_for_the_own_one(tmp_path: Path) -> None:
    """After a rollback, the stop may come at the step at which the earlier branch has ended."""
    root = tmp_path / "root"
    state = {"weight": torch.zeros(1000)}
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (2, 5):
            checkpointer.save({"weight": torch.full((1000,), step / 10)}, step)
    with ckpt.Checkpointer(root) as checkpointer, ckpt.PreemptionWatcher(checkpointer) as watcher:
        assert checkpointer.restore(state, step=2) == 2
        state["weight"].fill_(5.0)
        assert watcher.save(state, 5)
        assert watcher.save({"weight": torch.full((1000,), 9.0)}, 5), "it is published already"
    _assert_newest(root, 5)


def test_a_step_that_was_restored_from_memory_is_saved(tmp_path: Path) -> None:
    """A request to stop right after a restart: memory ends with the process."""
    root = tmp_path / "root"
    state = {"weight": torch.full((1000,), 4.0)}
    with ckpt.Checkpointer(root, snapshots=1) as checkpointer, ckpt.PreemptionWatcher(checkpointer) as watcher:
        checkpointer.save(state, 4)
        state["weight"].fill_(5.0)
        checkpointer.snapshot(state, 5)
        checkpointer.bridge.recover_from_fault(_LONG)
        assert checkpointer.restore(state) == 5
        assert watcher.save(state, 5)
    _assert_newest(root, 5)


def test_a_step_that_is_there_already_is_not_called_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training began anew in a root with steps."""
    state = {"weight": torch.full((1000,), 5.0)}
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(state, 5)
    with _watching(tmp_path / "root") as watcher:
        assert not watcher.save({"weight": torch.zeros(1000)}, 5)
    assert "step 5 is already published" in caplog.text
    _assert_newest(tmp_path / "root", 5)


@pytest.mark.parametrize("has_progress", [False, True])
def test_a_run_that_has_saved_nothing_is_not_to_be_requeued(
    has_progress: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The save at the stop fails: its state cannot be stored."""
    root = tmp_path / "root"
    events: list[Any] = []
    state = {"weight": torch.zeros(1000)}
    with (
        ckpt.observe(events.append),
        ckpt.Checkpointer(root) as checkpointer,
        ckpt.PreemptionWatcher(checkpointer, grace=_LONG, interval=_INTERVAL) as watcher,
    ):
        assert not watcher.should_stop(1)
        if has_progress:
            checkpointer.save(state, 4)
        watcher.request("enough")
        assert watcher.should_stop(5)
        assert watcher.exit_code == _ASKED
        assert not watcher.save({"weight": object()}, 5)
        assert watcher.exit_code == (_ASKED if has_progress else os.EX_IOERR)
        assert ("nothing of this run is published" in caplog.text) is not has_progress
        if not has_progress:
            assert watcher.save(state, 6)
        assert watcher.exit_code == _ASKED
    ends = [(type(each).__name__, getattr(each, "cause", "")) for each in events if type(each).__name__ in _ENDS]
    assert ends == [("Stopped", "enough"), ("Closed", "")]


@pytest.mark.parametrize("at_the_stop", [True, False])
def test_a_step_that_is_published_after_a_save_that_failed_counts(at_the_stop: bool, tmp_path: Path) -> None:
    """It is that of the stop, or the program has published it by its own call after the stop."""
    state = {"weight": torch.zeros(1000)}
    with (
        ckpt.Checkpointer(tmp_path / "root") as checkpointer,
        ckpt.PreemptionWatcher(checkpointer, grace=_LONG, interval=_INTERVAL) as watcher,
    ):
        assert not watcher.should_stop(1)
        assert not watcher.save({"weight": object()}, 3)
        if at_the_stop:
            checkpointer.async_save(state, 5)
        watcher.request("enough")
        assert watcher.should_stop(5)
        assert watcher.exit_code == os.EX_IOERR
        if at_the_stop:
            assert watcher.save(state, 5)
        else:
            checkpointer.save(state, 5)
        assert watcher.exit_code == _ASKED
    assert watcher.exit_code == _ASKED


_ENDS = ("Stopped", "Closed")


@pytest.mark.parametrize("last", ["closed", "read only", "unused", "left", "finally", "open"])
def test_the_work_is_done_unless_the_last_checkpointer_failed_or_is_open(last: str, tmp_path: Path) -> None:
    events: list[Any] = []
    state = {"weight": torch.zeros(10)}
    with contextlib.ExitStack() as ends, ckpt.observe(events.append):
        for step in (1, 2):
            with ckpt.Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(state, step)
        checkpointer = ckpt.Checkpointer(tmp_path, read_only=last == "read only")
        if last == "open":
            ends.callback(checkpointer.close)
        if last != "unused":
            checkpointer.restore(state)
        with contextlib.suppress(KeyError):
            if last == "left":
                with checkpointer:
                    raise KeyError
            if last == "finally":
                try:
                    raise KeyError
                finally:
                    checkpointer.close()
        if last != "open":
            checkpointer.close()
    ended = [(type(each).__name__, each.rank) for each in events if type(each).__name__ in _ENDS]
    assert ended == ([("Closed", 0)] if last in ("closed", "read only", "unused") else [])


@pytest.mark.parametrize("in_flight", [True, False])
def test_earlier_saves_that_failed_do_not_count(in_flight: bool, tmp_path: Path) -> None:
    root = tmp_path / "root"
    state = {"weight": torch.full((1000,), 7.0)}
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (4, 5):
            checkpointer.save(state, step)
    with (
        ckpt.Checkpointer(root, staging=ckpt.Staging(slots=3)) as checkpointer,
        ckpt.PreemptionWatcher(checkpointer) as watcher,
    ):
        checkpointer.restore({"weight": torch.zeros(1000)})
        for step in (4, 5, 7) if in_flight else (4, 5):
            checkpointer.async_save(state, step)  # the first two are refused, as they are there already
        assert watcher.save({"weight": torch.zeros(1000)} if in_flight else state, 7)
        assert checkpointer.latest_step() == 7
    _assert_newest(root, 7)


def test_a_file_that_appears(tmp_path: Path) -> None:
    with _watching(tmp_path / "root", stop_file=tmp_path / "stop") as watcher:
        assert not watcher.should_stop(1)
        (tmp_path / "stop").touch()
        assert _stops(watcher) == f"{tmp_path}/stop exists"


@pytest.mark.parametrize("answer", [True, timedelta(seconds=30)])
def test_a_function_that_is_polled(answer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = [False, None, 0, "", numpy.False_, OSError("no metadata"), answer]

    def poll() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with _watching(tmp_path / "root", poll=poll) as watcher:
        _stops(watcher)
    assert "no metadata" in caplog.text


def test_the_time_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    with _watching(tmp_path / "root", notice=timedelta(seconds=300)) as watcher:
        assert _stops(watcher) == "SLURM_JOB_END_TIME is near"
    with _watching(tmp_path / "root", notice=timedelta(seconds=300), slurm_end_time=False) as watcher:
        assert not watcher.should_stop(1)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 60))
    with _watching(tmp_path / "root", notice=timedelta(seconds=300)) as watcher:
        watcher.request("no other reason")
        assert _stops(watcher) == "no other reason"


def test_handlers_that_were_there_still_run(tmp_path: Path) -> None:
    seen: list[int] = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    try:
        with _watching(tmp_path / "root") as outer, _watching(tmp_path / "root") as watcher:
            for count in (1, 2, 3):  # a second signal does no harm
                os.kill(os.getpid(), signal.SIGUSR1)
                _wait_until(lambda count=count: len(seen) == count)
            _stops(watcher)
            _stops(outer)
        assert signal.getsignal(signal.SIGUSR1) is mine
        os.kill(os.getpid(), signal.SIGUSR1)
        _wait_until(lambda: len(seen) == 4)
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_watchers_are_closed_in_any_order(tmp_path: Path, leak_check: LeakCheck) -> None:
    with _watching(tmp_path / "root") as first, _watching(tmp_path / "root") as second:
        first.close()
        others = [os.open(tmp_path / f"other{number}", os.O_RDWR | os.O_CREAT) for number in range(4)]
        os.kill(os.getpid(), signal.SIGUSR1)
        _stops(second)
        for other in others:  # they may have the numbers of the descriptors that the first one had
            assert os.fstat(other).st_size == 0
            os.close(other)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_a_child_of_a_process_with_two_watchers_can_be_ended(tmp_path: Path) -> None:
    with _watching(tmp_path / "root") as first, _watching(tmp_path / "root") as second:
        child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
        child.start()
        child.terminate()
        child.join(_DEADLINE_S)
        ended, _ = child.exitcode, child.kill()
        assert ended == -signal.SIGTERM
        assert (first.requested, second.requested) == (None, None)


def test_an_event_loop_gets_its_signals(tmp_path: Path) -> None:
    async def main() -> None:
        got = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, got.set)
        with _watching(tmp_path / "root") as watcher:
            os.kill(os.getpid(), signal.SIGUSR2)
            await asyncio.wait_for(got.wait(), _DEADLINE_S)
            assert watcher.requested is None
            os.kill(os.getpid(), signal.SIGTERM)
            _stops(watcher)
        got.clear()
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.wait_for(got.wait(), _DEADLINE_S)

    asyncio.run(main())


def test_a_loop_that_takes_the_signals_over_delays_them_only(tmp_path: Path) -> None:
    with _watching(tmp_path / "root") as watcher:

        async def main() -> None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)
            os.kill(os.getpid(), signal.SIGTERM)
            _stops(watcher)

        asyncio.run(main())


def test_signals_to_children_are_theirs(tmp_path: Path) -> None:
    """A data loader ends its workers by SIGTERM."""
    with _watching(tmp_path / "root") as watcher:
        child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
        child.start()
        child.terminate()
        child.join(_DEADLINE_S)
        assert child.exitcode == -signal.SIGTERM
        loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=2, persistent_workers=True)
        assert len(list(loader)) == 8
        del loader
        assert watcher.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        _stops(watcher)


def _ignore_sigterm(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_workers_of_a_loader_can_ignore_the_signal_to_all(tmp_path: Path) -> None:
    """As torchrun sends it."""

    def main(rank: int, world_size: int) -> None:
        loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=2, worker_init_fn=_ignore_sigterm)
        with _watching(tmp_path / "root") as watcher:
            items = iter(loader)
            next(items)
            next(items)  # one of each worker
            os.killpg(os.getpid(), signal.SIGTERM)
            _stops(watcher)
            assert len(list(items)) == 6

    run_ranks(main, 1, init_process_group=False)


def test_what_is_refused(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        with pytest.raises(ValueError, match="grace must be positive"):
            ckpt.PreemptionWatcher(checkpointer, grace=timedelta(0))
        with pytest.raises((ValueError, OSError)):
            ckpt.PreemptionWatcher(checkpointer, signals=[signal.SIGTERM, signal.SIGKILL])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                ckpt.PreemptionWatcher(checkpointer)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(_DEADLINE_S)
        assert "main thread" in str(errors[0])


def test_a_handler_that_python_does_not_know_is_not_replaced(tmp_path: Path) -> None:
    """Replaced, it would write no stacks any more, and the signal would end the process later."""
    with open(tmp_path / "stacks", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
                with pytest.raises(ValueError, match=r"SIGUSR1 has a handler .*faulthandler"):
                    ckpt.PreemptionWatcher(checkpointer)
                with ckpt.PreemptionWatcher(checkpointer, signals=[signal.SIGTERM]):
                    os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert (tmp_path / "stacks").read_text().count("most recent call first") >= 2


def test_the_process_ends_when_the_grace_is_over(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> None:
        with _watching(tmp_path / "root", grace=timedelta(seconds=0.5), exit_code=12):
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()

    (result,) = run_ranks(main, 1, init_process_group=False, returncodes={0: 12})
    assert "the grace is over: this process ends now" in result.stderr


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_all_ranks_stop_at_one_step(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with launch_ranks(_train, 3, str(root)) as group:
        for rank in range(3):
            group.wait_for_output(rank, "published 5")
        group.kill(1, signal.SIGTERM)
        group.kill(2, signal.SIGUSR1)
        assert _ends_alike(group, root) > 5


def test_a_rank_is_asked_while_its_main_thread_is_in_a_collective(tmp_path: Path) -> None:
    """The first rank enters the collective only when it knows; the others are in it until then."""

    def at_step(step: int, watcher: ckpt.PreemptionWatcher) -> None:
        if step == 6:
            if dist.get_rank() == 0:
                _wait_until(lambda: watcher.requested)
            _say("in a collective")
            dist.all_reduce(torch.ones(()))

    root = tmp_path / "root"
    with launch_ranks(functools.partial(_train, at_step=at_step), 2, str(root)) as group:
        group.wait_for_output(1, "in a collective")
        group.kill(1, signal.SIGTERM)
        _ends_alike(group, root)


def test_a_rank_is_asked_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """It is noticed at once, and that save is published, too."""

    def main(rank: int, world_size: int) -> int:
        with _watching(tmp_path / "root") as watcher:
            checkpointer = watcher._checkpointer
            module = torch.nn.Linear(1, 1)
            state = {"weight": torch.zeros(1000), "module": module}

            def ask(*args: Any) -> None:
                if rank == 1 and watcher.requested is None:
                    os.kill(os.getpid(), signal.SIGTERM)
                    _wait_until(lambda: watcher.requested)

            for step in range(1, 1_000_000):
                dist.all_reduce(torch.ones(()))
                state["weight"].fill_(step)
                if step == 6:
                    hook = module.register_state_dict_pre_hook(ask)
                    checkpointer.async_save(state, step)  # type: ignore[attr-defined]
                    hook.remove()
                    assert rank == 0 or watcher.requested
                if watcher.should_stop(step):
                    assert watcher.save(state, step)
                    return step
        return 0

    first, second = (result.value for result in run_ranks(main, 2))
    assert first == second > 6
    assert 6 in ckpt.Checkpointer(tmp_path / "root", read_only=True).all_steps()
    _assert_newest(tmp_path / "root", first)


def test_a_request_during_evaluation_waits_for_its_end(tmp_path: Path) -> None:
    """No call of should_stop for long, on no rank; then all stop at the first one."""

    def at_step(step: int, watcher: ckpt.PreemptionWatcher) -> None:
        if step == 6:
            _say("evaluates")
            _wait_until(lambda: watcher.requested)
            time.sleep(0.5)

    root = tmp_path / "root"
    with launch_ranks(functools.partial(_train, at_step=at_step), 2, str(root)) as group:
        group.wait_for_output(0, "evaluates")
        group.wait_for_output(1, "evaluates")
        group.kill(0, signal.SIGTERM)
        group.kill(0, signal.SIGTERM)
        _ends_alike(group, root)


def _stop_self(step: int, watcher: ckpt.PreemptionWatcher) -> None:
    if step == 6 and dist.get_rank() == 1:
        _say("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)


def _hang(step: int, watcher: ckpt.PreemptionWatcher) -> None:
    if step == 6 and dist.get_rank() == 1:
        _say("hangs")
        threading.Event().wait()


def _die_when_asked(step: int, watcher: ckpt.PreemptionWatcher) -> None:
    if step == 6 and dist.get_rank() == 1:
        _wait_until(lambda: watcher.requested)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_stopped_rank_does_not_keep_the_others(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with launch_ranks(functools.partial(_train, at_step=_stop_self, grace=_SHORT), 3, str(root)) as group:
        group.wait_for_output(1, "stopped")
        group.kill(0, signal.SIGTERM)
        codes = {0: _ASKED, 2: _ASKED, 1: None}
        deadline = time.monotonic() + 40
        while group.results()[0].returncode is None or group.results()[2].returncode is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        group.kill(1)
        results = group.wait(returncodes=codes)
        assert "a rank does not answer" in results[0].stderr
    _assert_newest(root, 5)


def test_a_rank_that_hangs_does_not_keep_the_others(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with launch_ranks(functools.partial(_train, at_step=_hang, grace=_SHORT), 2, str(root)) as group:
        group.wait_for_output(1, "hangs")
        group.kill(0, signal.SIGTERM)
        results = group.wait(returncodes={0: _ASKED, 1: _ASKED})
        assert "or did not come to the common step in time" in results[1].stderr
        assert "stops" not in results[0].stdout
    _assert_newest(root, 5)


def test_a_rank_that_dies_when_it_is_asked(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with launch_ranks(functools.partial(_train, at_step=_die_when_asked, grace=_SHORT), 2, str(root)) as group:
        group.wait_for_output(0, "published 5")
        group.kill(0, signal.SIGTERM)
        group.wait(returncodes={0: None, 1: -signal.SIGKILL})
    _assert_newest(root, 5)


def test_a_rank_that_dies_before_the_save(tmp_path: Path) -> None:
    def die(step: int) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    root = tmp_path / "root"
    with launch_ranks(functools.partial(_train, before_save=die, grace=_SHORT), 2, str(root)) as group:
        group.wait_for_output(0, "published 5")
        group.kill(0, signal.SIGTERM)
        results = group.wait(returncodes={0: _ASKED, 1: -signal.SIGKILL})
        assert "True" not in results[0].stdout
    _assert_newest(root, 5)


def test_what_all_ranks_have_staged_is_published_even_if_one_dies_then(tmp_path: Path) -> None:
    def die(step: int, state: Any, checkpointer: ckpt.Checkpointer) -> None:
        checkpointer.async_save(state, step)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def train(rank: int, world_size: int) -> None:
        state = {"weight": torch.zeros(1000)}
        with (
            ckpt.Checkpointer(root) as checkpointer,
            ckpt.PreemptionWatcher(checkpointer, grace=_LONG, interval=_INTERVAL) as watcher,
        ):
            for step in range(1, 1_000_000):
                dist.all_reduce(torch.ones(()))
                state["weight"].fill_(step)
                if step == 3:
                    checkpointer.save(state, step)
                    os.kill(os.getpid(), signal.SIGTERM)
                if watcher.should_stop(step):
                    die(step, state, checkpointer)
                    _say("stops", step, watcher.save(state, step))
                    break
        sys.exit(watcher.exit_code)

    root = tmp_path / "root"
    with launch_ranks(train, 2) as group:
        results = group.wait(returncodes={0: _ASKED, 1: -signal.SIGKILL})
    _, step, published = results[0].stdout.split()
    assert published == "True"
    _assert_newest(root, int(step))


def test_a_watcher_that_was_closed_before_it_looked_counts(tmp_path: Path) -> None:
    """Watchers of several ranks belong together by their number, one after the other."""

    def main(rank: int, world_size: int) -> int:
        interval = timedelta(seconds=60 if rank == 0 else 0.01)  # rank 0 does not look before it closes the first one
        with _watching(tmp_path / "root", interval=interval):
            dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
            if rank == 1:
                store = dist.PrefixStore(f"ckpt/{dist.group.WORLD.group_name}/stop", _default_store())
                _wait_until(lambda: store.check(["watchers/1"]))
            dist.barrier()
        with _watching(tmp_path / "root") as watcher:
            if rank == 0:
                watcher.request("one rank asks")
            for step in range(1, 1_000_000):
                dist.all_reduce(torch.ones(()))
                if watcher.should_stop(step):
                    return step
        return 0

    results = run_ranks(main, 2, init_process_group=False)
    assert results[0].value == results[1].value > 0


def test_a_look_while_the_groups_are_being_destroyed(tmp_path: Path) -> None:
    """Torch forgets the store of a group after the group, so there is a moment when it finds none."""

    class Torn(dict[Any, Any]):
        def __init__(self) -> None:
            super().__init__()
            self.looked = threading.Event()

        def __getitem__(self, key: Any) -> Any:
            self.looked.set()
            raise KeyError(key)

    def main(rank: int, world_size: int) -> int:
        groups = dist.distributed_c10d._world
        with _watching(tmp_path / "root") as watcher:
            whole = dict(groups.pg_map)
            torn = Torn()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist.distributed_c10d, "_pg_map", torn)
                assert groups.pg_map is torn
                assert torn.looked.wait(_DEADLINE_S)
            assert groups.pg_map == whole
            if rank == 0:
                watcher.request("one rank asks")
            for step in range(1, 1_000_000):
                dist.all_reduce(torch.ones(()))
                if watcher.should_stop(step):
                    return step
        return 0

    results = run_ranks(main, 2)
    assert results[0].value == results[1].value > 0


def test_one_watcher_after_the_other_and_one_group_after_the_other(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> list[int]:
        stops = []
        for number in range(4):
            if number == 2:  # the same store
                store = dist.distributed_c10d._get_default_store()
                dist.destroy_process_group()
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            with _watching(tmp_path / "root", slurm_end_time=False) as watcher:
                if rank == number % 2:
                    watcher.request(f"request {number}")
                for step in range(1, 1_000_000):
                    dist.all_reduce(torch.ones(()))
                    if watcher.should_stop(step):
                        stops.append(step)
                        assert watcher.requested == f"request {number}"
                        break
        return stops

    results = run_ranks(main, 2)
    assert results[0].value == results[1].value
    assert len(results[0].value) == 4


@pytest.mark.timeout(120)
def test_schedules(tmp_path: Path) -> None:
    """Ranks without collectives, so with any skew: all stop at the same step."""

    def main(rank: int, world_size: int) -> list[tuple[int, int]]:
        import random

        stops = []
        for seed in range(_SCHEDULES):
            dist.barrier()
            common, own = random.Random(seed), random.Random(f"{seed} {rank}")
            asked = {r: common.randint(1, 40) for r in common.sample(range(world_size), common.randint(1, 2))}
            stride = common.choice((1, 2, 7))
            with _watching(tmp_path / "root", interval=timedelta(seconds=0.02)) as watcher:
                slow = own.choice((0.0005, 0.001, 0.003))
                for call in range(1_000_000):
                    time.sleep(slow * own.random())
                    if asked.get(rank) == call:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    if watcher.should_stop(call * stride):
                        stops.append((seed, call))
                        break
        return stops

    values = [result.value for result in run_ranks(main, 3, timeout=100)]
    assert len(values[0]) == _SCHEDULES
    assert values[0] == values[1] == values[2]


# -- in the wrapper ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, "before the stop", "before the save"])
def test_in_the_restart_wrapper(fault: str | None, tmp_path: Path) -> None:
    """A preemption is no fault, and a fault does not lose the request."""

    def main(rank: int, world_size: int) -> Any:
        iterations: list[int] = []
        checkpointer = ckpt.Checkpointer(tmp_path / "root")
        watcher = ckpt.PreemptionWatcher(checkpointer, grace=_LONG, interval=_INTERVAL)

        @inprocess.Wrapper(
            abort=inprocess.Compose(
                ckpt.restart.CheckpointAbort(checkpointer), inprocess.abort.AbortTorchDistributed()
            ),
            finalize=ckpt.restart.CheckpointFinalize(checkpointer),
        )
        def train(call: inprocess.CallWrapper | None = None) -> int:
            assert call is not None
            iterations.append(call.iteration)
            dist.init_process_group("gloo")
            state = {"weight": torch.zeros(1000)}
            start = checkpointer.restore(state) or 0
            for step in range(start + 1, 1_000_000):
                dist.all_reduce(torch.ones(()))
                state["weight"].fill_(step)
                is_first = call.iteration == 0 and rank == 1
                if step == 5:
                    checkpointer.save(state, step)
                    if is_first:
                        os.kill(os.getpid(), signal.SIGTERM)
                        _wait_until(lambda: watcher.requested)
                        if fault == "before the stop":
                            raise RuntimeError("a fault")
                if watcher.should_stop(step):
                    if fault == "before the save" and is_first:
                        raise RuntimeError("a fault")
                    assert watcher.save(state, step)
                    dist.destroy_process_group()
                    return step
            raise AssertionError

        step = train()
        watcher.close()
        checkpointer.close()
        return step, watcher.exit_code, iterations

    first, second = rank_values(main, 2)
    assert first == second
    step, code, iterations = first
    assert code == _ASKED
    assert iterations == ([0] if fault is None else [0, 1])
    _assert_newest(tmp_path / "root", step)


def test_a_rank_that_hangs_in_the_restart_wrapper(tmp_path: Path) -> None:
    """The grace is shorter than the soft timeout: all ranks leave, and leave nothing behind.

    Each leaves when its own time is over; one that sees another leave first begins to restart, and leaves then.
    """

    def main(rank: int, world_size: int) -> None:
        checkpointer = ckpt.Checkpointer(tmp_path / "root")
        watcher = ckpt.PreemptionWatcher(checkpointer, grace=_SHORT, interval=_INTERVAL)

        @inprocess.Wrapper()
        def train(call: inprocess.CallWrapper | None = None) -> None:
            assert call is not None
            _say("iteration", call.iteration)
            dist.init_process_group("gloo")
            state = {"weight": torch.zeros(1000)}
            for step in range(1, 1_000_000):
                dist.all_reduce(torch.ones(()))
                state["weight"].fill_(step)
                if step == 5:
                    checkpointer.save(state, step)
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                        threading.Event().wait()
                watcher.should_stop(step)

        train()

    results = run_ranks(main, 2, init_process_group=False, returncodes={0: _ASKED, 1: _ASKED}, survivors_timeout=30.0)
    for result in results:
        assert result.stdout in ("iteration 0\n", "iteration 0\niteration 1\n")
    _assert_newest(tmp_path / "root", 5)
