"""`PreemptionWatcher`: when a rank is asked to stop, all ranks save the same step and stop, before the time is over.

    signals ── pipe ──────────▶ watch thread ─┐               ┌─▶ all ranks: `should_stop` is True at one step
    file, user's function ────▶ ask thread ───┼─▶ agree thread ──▶ store of the process group
    end of the job's time ────▶ watch thread ─┘
                                watch thread ──▶ end of the process, when the grace is over

Each thread does one thing, so that a store or a file system that does not answer delays nothing else; above all not the
end of the process. `ranks/stop.py` has the rules by which the ranks agree, `signal_pipe` the way of a signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from ckpt.arguments import duration
from ckpt.errors import CheckpointError
from ckpt.events import Stopped
from ckpt.observing import emit
from ckpt.ranks.group import torch_distributed
from ckpt.ranks.stop import Outcome, StopAgreement, StopRequest
from ckpt.signal_pipe import SignalPipe, signal_name
from inprocess.ipc.threads import JoinableThread
from inprocess.ipc.uncopied import Uncopied

__all__ = ["PreemptionWatcher"]

_log = logging.getLogger("ckpt")
_ASKED_S = 0.1  # between looks at the store once the ranks are asked to stop
_LOOKS_PER_S = 5_000.0  # of all ranks together
_FILE_LOOKS_PER_S = 200.0  # of all nodes together
_END_TIME = "SLURM_JOB_END_TIME"
_LEAVING_PAUSES = 4  # between looks: so long before its end a process tells the others, and waits half of it
_LAST_WORDS_S = 1.0  # to log and flush before the process is ended
_JOIN_S = 5.0
_MOST_FAILURES = 16  # of saves in flight; a Checkpointer that is closed raises without end


@dataclass(slots=True)
class _Member:
    """This rank as a member of one process group, which is not kept alive."""

    group: Callable[[], Any]
    agreement: StopAgreement
    prefix: str | None = None  # of the agreement's keys in the group's store; for the agree thread


class Saves(Protocol):
    """What the watcher uses of a `Checkpointer`."""

    @property
    def current_step(self) -> int | None: ...
    def maybe_finalize(self, blocking: bool = False) -> list[int]: ...
    def save(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> bool: ...


class PreemptionWatcher(Uncopied):
    """Stops a job at one step on all ranks when one of them is asked to, with that step saved, in limited time.

    Every rank makes one, with the same arguments, in the main thread, and calls `should_stop` at the same steps::

        with ckpt.PreemptionWatcher(checkpointer) as watcher:
            for step in range(start, steps):
                ...
                if watcher.should_stop(step):
                    watcher.save(state, step)
                    break
        sys.exit(watcher.exit_code)

    Guarantees: all ranks stop at the same call of `should_stop`, or no rank does. At the latest when the grace is over
    the process ends, wherever its main thread is; then the newest published step stands. A watcher that is made outside
    of a function in `inprocess.Wrapper` carries a request over a restart. Without torch.distributed it works for the
    one process.
    """

    def __init__(
        self,
        checkpointer: Saves,
        *,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
        grace: timedelta | float = timedelta(seconds=25),
        notice: timedelta | float | None = None,
        stop_file: str | os.PathLike[str] | None = None,
        poll: Callable[[], bool | timedelta | None] | None = None,
        slurm_end_time: bool = True,
        exit_code: int = os.EX_TEMPFAIL,
        interval: timedelta | float = timedelta(seconds=1),
    ) -> None:
        """Install the signal handlers, and begin to watch.

        A rank is asked to stop by one of `signals`; by `stop_file`, when it exists; by `poll`, when it returns True or
        the time that is left; by the end of the job's time in the environment of Slurm (`slurm_end_time`); or by
        `request`. `poll` is called in a thread, about every `interval`, until it asks; what it raises is logged. File
        and `poll` are looked at by one process of each node (LOCAL_RANK 0).

        `grace` is the time from a signal to the end of the process. torchrun kills 30 s after a SIGTERM, so the default
        is less. `notice` is that time for all other requests (default: `grace`); near the end of the job's time it is
        how long before. If half of the time is over without an agreement, because a rank does not answer, all ranks
        leave at once. A second request does nothing but shorten the time, on its rank, if its own ends earlier.

        `exit_code` is the exit code of a process that has to be started again; the default is EX_TEMPFAIL (75). If the
        save at the stop fails and no other step of this run is published, it is EX_IOERR (74): to start the job again
        would repeat that.
        `interval` is how often each rank looks for the request of another one, less often with thousands of ranks.

        A handler that a signal had before is called after ours; default actions and SIG_IGN are not carried out. Forked
        children have the handlers that were there before.

        RuntimeError outside the main thread; ValueError for times that are not positive, and for a signal whose handler
        was not installed by Python.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "make a PreemptionWatcher in the main thread: only there signal handlers can be installed. A training "
                "function of Ray Train, which runs in a thread, asks ray.train.get_preemption_info() instead"
            )
        self._checkpointer = checkpointer
        self._grace_s = _seconds("grace", grace)
        self._notice_s = self._grace_s if notice is None else _seconds("notice", notice)
        self._interval_s = _seconds("interval", interval)
        self._exit_code = exit_code
        self._stop_file = None if stop_file is None else os.path.abspath(os.path.expanduser(stop_file))
        self._poll = poll
        self._lock = threading.Lock()  # for the next five
        self._why: str | None = None
        self._asked_rank = -1
        self._deadline = float("inf")  # monotonic, as all times here
        self._give_up_at = float("inf")
        self._member: _Member | None = None
        self._is_alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
        self._looked_at = time.monotonic()
        self._has_stopped = False
        self._began_at: tuple[int | None] | None = None  # the step that training began with
        self._has_failed = False  # the last save
        self._is_closed = False
        self._closing = threading.Event()
        self._asked = threading.Event()
        self._end_time_at = _end_of_job() if slurm_end_time else None
        self._signals = SignalPipe(signals)
        threads = {"preemption-watch": self._watch, "preemption-agree": self._agree}
        if (stop_file is not None or poll is not None) and int(os.environ.get("LOCAL_RANK") or 0) == 0:
            threads["preemption-ask"] = self._ask_around
        self._threads = [JoinableThread(target, name) for name, target in threads.items()]
        for thread in self._threads:
            thread.start()

    # -- for the training loop -----------------------------------------------------------------------------------------

    def should_stop(self, step: int) -> bool:
        """Return whether to save and stop after this step: the same answer on all ranks. Main thread.

        All ranks call it at the same steps, which grow from call to call by any amount (after a restart they may begin
        lower). While no rank is asked it takes microseconds. It waits for other ranks only at the step that is
        proposed for the stop, for a fraction of a second. If the ranks leave without a common step it does not return.
        """
        if self._began_at is None:
            self._began_at = (self._checkpointer.current_step,)
        member = self._current_member()
        if member is None:
            stops = self._is_alone and self._why is not None
        else:
            outcome = member.agreement.arrive(step)
            if outcome is Outcome.LEAVE:
                self._leave()
            stops = outcome is Outcome.STOP
        if stops and not self._has_stopped:
            self._has_stopped = True
            _log.warning("all ranks stop after step %d: %s", step, self._why)
            emit(Stopped(time.time(), self._own_rank(), step, self._why or ""))
        return stops

    def save(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Publish `state` as `step`, with all earlier saves, and return whether it is published. All ranks.

        A step that this job has published already is not saved again. An error of a save is logged: the process is
        about to end.
        """
        for _ in range(_MOST_FAILURES):
            try:
                self._checkpointer.maybe_finalize(blocking=True)
                break
            except CheckpointError as error:  # of one save; there may be others behind it
                _log.error("an earlier save has failed: %s", error)
        if self._checkpointer.current_step == step:
            self._has_failed = False
            return True
        try:
            saved = self._checkpointer.save(state, step, metrics=metrics)
        except CheckpointError as error:
            _log.error("step %d cannot be saved before the end; the newest published step stands: %s", step, error)
            saved = False
        self._has_failed = not saved
        if self._has_stopped and self._is_in_vain():
            _log.error(
                "nothing of this run is published: the exit code is %d, not %d, as the next run would do all of it "
                "again; make room or repair the root before it is started",
                self.exit_code,
                self._exit_code,
            )
        return saved

    @property
    def requested(self) -> str | None:
        """Why the ranks are to stop, as soon as this one knows; None if they are not. Any thread."""
        return self._why

    @property
    def exit_code(self) -> int:
        """The exit code for this process: that of the constructor if `should_stop` was True, else 0.

        EX_IOERR (74) after a stop at which `save` returned False, if this run has published nothing.
        """
        if not self._has_stopped:
            return 0
        return os.EX_IOERR if self._is_in_vain() else self._exit_code

    def _is_in_vain(self) -> bool:
        """Whether the last save has failed, and no step is published since the beginning, by `save` or elsewhere."""
        return self._has_failed and (self._checkpointer.current_step,) == (self._began_at or (None,))

    def request(self, why: str, left: timedelta | None = None) -> None:
        """Ask all ranks to stop. Any thread. `left` is the time until this process has to end (default: `notice`)."""
        self._ask(why, self._notice_s if left is None else _seconds("left", left))

    def close(self) -> None:
        """Stop watching and put the signal handlers back. Idempotent; main thread. No deadline applies any more.

        If the ranks are about to leave without a common step, this process ends here.
        """
        if self._is_closed:
            return
        if self._member is not None and self._member.agreement.leaves and not self._has_stopped:
            self._leave()
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("close a PreemptionWatcher in the main thread: only there handlers can be put back")
        self._signals.release()
        self._is_closed = True
        self._closing.set()
        self._asked.set()
        self._signals.nudge()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._threads[0].is_alive():  # the thread that reads
            self._signals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _ask(self, why: str, left_s: float, rank: int | None = None) -> None:
        """Note a request: of this process, or of another `rank`. Any thread, but no signal handler."""
        now = time.monotonic()
        with self._lock:
            if self._why is None:
                self._asked_rank = self._own_rank() if rank is None else rank
                self._why = why
            if now + left_s < self._deadline:
                self._deadline, self._give_up_at = now + left_s, now + left_s / 2
        self._asked.set()
        self._signals.nudge()

    def _own_rank(self) -> int:
        return int(os.environ.get("RANK") or 0) if self._member is None else self._member.agreement.rank

    def _ask_around(self) -> None:
        """The ask thread: look at the file, and call the user's function, until one of them asks."""
        nodes = int(os.environ.get("WORLD_SIZE") or 1) / int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        failed = False
        while not self._closing.is_set():
            if self._stop_file is not None and os.path.lexists(self._stop_file):
                self._ask(f"{self._stop_file} exists", self._notice_s)
                return
            try:
                answer = None if self._poll is None else self._poll()
                asks = isinstance(answer, timedelta) or bool(answer)
            except Exception:
                if not failed:
                    _log.exception("the function that says whether to stop has failed; it is called again")
                failed, asks = True, False
            if asks:
                left_s = answer.total_seconds() if isinstance(answer, timedelta) else self._notice_s
                self._ask("the function of the program says so", left_s)
                return
            self._closing.wait(max(self._interval_s, nodes / _FILE_LOOKS_PER_S))

    def _watch(self) -> None:
        """The watch thread: take signals from the pipe, and end the process when the time is over."""
        poller = select.poll()
        poller.register(self._signals, select.POLLIN)
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= self._deadline:
                self._end_process("the grace is over")
            ask_at = float("inf")
            if self._end_time_at is not None and self._why is None:
                ask_at = self._end_time_at - self._notice_s
                if now >= ask_at:
                    self._ask(f"{_END_TIME} is near", self._end_time_at - now)
                    continue
            wait_s = min(self._deadline, ask_at) - now
            poller.poll(None if wait_s == float("inf") else 1000 * min(wait_s, 3600) + 1)
            for number in self._signals.take():
                self._ask(f"signal {signal_name(number)}", self._grace_s)

    # -- agreement -----------------------------------------------------------------------------------------------------

    def _current_member(self) -> _Member | None:
        """Return this rank as a member of the present default group, a new one if that is new; None without a group."""
        distributed = torch_distributed()
        group = None if distributed is None else distributed.group.WORLD
        if group is None:
            return None
        with self._lock:
            member = self._member
            if member is None or member.group() is not group:
                try:
                    agreement = StopAgreement(distributed.get_rank(), distributed.get_world_size())
                except ValueError:  # destroyed meanwhile, by another thread
                    return None
                member = self._member = _Member(weakref.ref(group), agreement)
                self._is_alone = self._is_alone and agreement.world_size == 1
            return member

    def _agree(self) -> None:
        """The agree thread: look for requests of other ranks, and take part in the agreement."""
        is_told = False
        while not self._closing.is_set():
            if self._why is not None and not is_told:
                is_told = True
                left_s = self._deadline - time.monotonic()
                _log.warning("rank %d was asked to stop: %s; %.1f s are left", self._asked_rank, self._why, left_s)
            try:
                self._look()
            except Exception as error:  # PyTorch's stores raise many kinds, and groups that are being destroyed others
                _log.debug("the store of the process group failed: %r", error)
            (self._asked if self._why is None else self._closing).wait(self._pause_s())
        with contextlib.suppress(Exception):  # this watcher counts on all ranks, also if it was closed before it looked
            if (member := self._current_member()) is not None:
                self._store(member)

    def _pause_s(self) -> float:
        """Return the time between two looks at the store."""
        slowly_s = 0.0 if self._member is None else self._member.agreement.world_size / _LOOKS_PER_S
        return max(self._interval_s if self._why is None else min(self._interval_s, _ASKED_S), slowly_s)

    def _look(self) -> None:
        """Look at the store once."""
        idle_s, last_at, self._looked_at = self._pause_s(), self._looked_at, time.monotonic()
        member = self._current_member()
        store = None if member is None else self._store(member)
        if member is None or store is None:
            return
        agreement = member.agreement
        with self._lock:
            left_s = self._deadline - time.monotonic()
            own = None if self._why is None else StopRequest(self._why, self._asked_rank, left_s)
        ahead_s = min(2 * max(self._interval_s, idle_s), left_s / 4)
        request = agreement.look(store, own, ahead_s)
        if request is not None and own is None:  # it was made after the last look
            age_s = min(time.monotonic() - last_at, idle_s)
            self._ask(request.why, request.left_s - age_s, request.rank)
        if request is None or self._has_stopped:
            return
        in_time = self._deadline - _LEAVING_PAUSES * self._pause_s() if agreement.is_decided else self._give_up_at
        if time.monotonic() >= in_time:
            agreement.leave(store)
        if agreement.leaves and not self._closing.is_set():
            self._leave()

    def _store(self, member: _Member) -> Any:
        """Return the part of the group's store that is for this agreement; None if the group was replaced just now."""
        distributed = torch_distributed()
        if distributed is None:
            return None
        store = distributed.distributed_c10d._get_default_store()
        group = distributed.group.WORLD  # after the store
        if group is None or member.group() is not group:
            return None
        if member.prefix is None:  # several watchers, one after the other, can use the store of a group
            common = f"ckpt/{group.group_name}/stop"
            number = distributed.PrefixStore(common, store).add(f"watchers/{member.agreement.rank}", 1)
            member.prefix = f"{common}/{number}"
        return distributed.PrefixStore(member.prefix, store)

    def _leave(self) -> NoReturn:
        """End this process when all ranks know that they leave: a connection that breaks is no surprise then."""
        time.sleep(_LEAVING_PAUSES / 2 * self._pause_s())
        self._end_process("a rank does not answer, or did not come to the common step in time")

    def _end_process(self, why: str) -> NoReturn:
        """End this process now, with the exit code, from any thread. The main thread may hold any lock."""

        def last_words() -> None:
            what = "after the stop" if self._has_stopped else "without a stop; the newest published step stands"
            _log.error("%s: this process ends now, %s (asked: %s)", why, what, self._why)
            sys.stdout.flush()
            sys.stderr.flush()

        with contextlib.suppress(RuntimeError):  # Python is about to end
            helper = threading.Thread(target=last_words, daemon=True)
            helper.start()
            helper.join(_LAST_WORDS_S)
        os._exit(self._exit_code)


def _seconds(name: str, time_given: timedelta | float) -> float:
    return duration(name, time_given).total_seconds()


def _end_of_job() -> float | None:
    """Return when the time of a Slurm job is over, by the monotonic clock; None if that is not known or in the past."""
    text = os.environ.get(_END_TIME, "")
    left_s = int(text) - time.time() if text.isascii() and text.isdigit() else 0.0
    return time.monotonic() + left_s if left_s > 0 else None
