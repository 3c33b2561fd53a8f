"""The queue of background calls: scheduled in order, run in parallel writers, finalized strictly in order.

    index    0    1    2    3    4            call i runs in writer i % num_writers
            done done fail run  run
             │    │    │
             │    │    └─ dropped: never finalized, abandoned() called, error raised
             └────┴────── finalize functions run here, in the trainer, by maybe_finalize_async_calls

A call is *settled* when it is done or failed. With ``no_dist=False`` a call leaves the queue only when it is settled on
all ranks, and then in the same way on all of them: finalized if it is done everywhere, dropped if it failed anywhere.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckpt.async_calls.call import AsyncRequest, Call
from ckpt.async_calls.compatible import WarmupPersistentCaller, remember
from ckpt.async_calls.config import WriterConfig, with_priorities
from ckpt.async_calls.failures import not_closed, not_done, with_note
from ckpt.async_calls.messages import Event
from ckpt.async_calls.writer import CallOutcome, Writer, WriterPool, wait_for_any
from ckpt.errors import CheckpointError, CheckpointTimeoutError, WriterError
from ckpt.keeper.trainer_side import Keeper
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.distributed import own_rank
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import Origin
from inprocess.ipc.interpreter import interpreter
from inprocess.ipc.threads import finishes_within
from inprocess.ipc.uncopied import Uncopied
from inprocess.ipc.wakeup import Wakeup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AsyncCallsQueue"]

_log = logging.getLogger("ckpt")
_NEVER = 2**62  # above the index of any call
_ENDING_S = 10.0  # of the time for `close`, at most a quarter of it: to end processes, after the wait for calls


class AsyncCallsQueue(Uncopied):
    """Runs requests in background processes and finalizes them in the order scheduled.

    All methods are for one thread of the trainer. Only `maybe_finalize_async_calls` with ``no_dist=False`` makes
    collectives. In a process forked from the trainer every method raises RuntimeError. If the queue
    is dropped, or the trainer dies, the writers finish what was scheduled and end.
    """

    def __init__(
        self,
        persistent: bool = False,
        is_daemon: bool = True,
        cpu_priority: int | None = None,
        io_priority: int | None = None,
        sigterm_timeout: float | None = None,
        cpu_shm_mode: bool = True,
        *,
        num_writers: int = 1,
        config: WriterConfig | None = None,
        process_group: ProcessGroup | None = None,
        timeout_s: float = 1800.0,
        keeper: Keeper | None = None,
    ) -> None:
        """Starts no process (see `start`). `timeout_s` is the deadline of every blocking wait for calls.

        The writers are forked by `keeper`, which its owner closes after the queue; None: by one of the queue's own.

        The positional parameters are those of nvidia_resiliency_ext. `cpu_priority` (added to the niceness) and
        `io_priority` (the Linux scheduling class: 0 unchanged, 2 best-effort, 3 idle) override `config`. The others
        are accepted and have no effect: writers are always persistent; they outlive the trainer until they have
        finished what was scheduled, daemon or not; `close(abort=True)` kills them without a SIGTERM; and bytes in
        `SharedMemory` always go through shared memory.

        ValueError for a number of writers below 1, and for priorities that this process cannot give itself;
        RuntimeError if no interpreter is known for the writers.
        """
        interpreter()
        if num_writers < 1:
            raise ValueError(f"num_writers must be at least 1, not {num_writers}")
        self._config = with_priorities(config if config is not None else WriterConfig(), cpu_priority, io_priority)
        self._ranks = Ranks(process_group, timeout_s)
        self._timeout_s = timeout_s
        self._origin = Origin()
        self._pending: deque[Call] = deque()  # in order of index, without gaps
        self._results: deque[CallOutcome | Event] = deque()  # of the writers, not yet passed to their calls
        self._unreported: deque[Exception] = deque()  # of calls that `settle` removed; each is raised once
        self._finalizing = False
        self._next_index = 0
        self._owned_keeper: Keeper | None = None
        if keeper is None:
            keeper = self._owned_keeper = Keeper()
        self._pool = WriterPool(self._config, num_writers, keeper)
        self._intact = True  # False while a method changes `_pool`; if it stays so, the method was interrupted
        self._left: list[WriterPool] = []  # after an interrupt; they finish what they were sent, until `recover`
        self._interrupted = Wakeup()
        self._listeners: list[Callable[[], float]] = []
        self._given_up = False  # by another thread: the next method does what `recover` does
        self._release = weakref.finalize(self, _release, self._pool, self._interrupted, self._owned_keeper)
        remember(self)

    def start(self) -> None:
        """Start the writer processes in the background, so that the first request finds them ready.

        Returns at once. Raises OSError when no process can be started; it can be ignored, as requests then fail, too.
        """
        self._check_usable()
        intact, self._intact = self._intact, False
        for writer in self._writers:
            writer.start()
        self._intact = intact

    warmup_persistent_caller = WarmupPersistentCaller()
    """`start` under its name in nvidia_resiliency_ext; on the class it has no effect."""

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Queue the request and return its index (0, 1, ...). Never waits: it pickles, and sends one message.

        Raises what pickling raises, or ValueError if `preload_fn` has no argument to replace, and nothing is
        queued then. All other failures are those of the call, and are raised when it would be finalized.
        """
        self._check_usable()
        self._recover_if_given_up()
        self.pump()
        call = Call(self._next_index, async_request)
        intact, self._intact = self._intact, False
        if not call.settled:
            self._writers[call.index % len(self._writers)].submit(call)
        self._next_index += 1
        self._pending.append(call)
        self._intact = intact
        return call.index

    def get_num_unfinalized_calls(self) -> int:
        """Return how many calls are scheduled and neither finalized nor dropped."""
        return len(self._pending)

    def functions(self) -> list[Callable[..., Any] | None]:
        """Return the `async_fn` of every call in the queue, in order."""
        return [call.request.async_fn for call in self._pending]

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = True) -> list[int]:
        """Finalize the calls that are done, in order, and return their indices.

        `blocking` first waits for all calls scheduled so far, at most `timeout_s`. With ``no_dist=False`` all ranks
        must call this together; it makes one all_reduce of two numbers (and one small all_gather if a call failed), and
        all ranks finalize or drop the same calls.

        A failed call is dropped, and its error raised after the calls before it are finalized: a CheckpointError,
        `WriterError` or what the call's `abandoned` made of it, the traceback of the writer as its cause.
        CheckpointTimeoutError if the wait reached its deadline; the calls stay queued. An exception of a finalize
        function is raised after all others have run; its call counts as finalized. What `settle` has not raised is
        raised first, one exception at each call.
        """
        return self._finalize(Deadline(self._timeout_s), blocking, no_dist)

    def finalize_all(self, deadline: Deadline) -> None:
        """Wait for all calls, and finalize them, until `deadline`; then raise the first failure. No collective.

        CheckpointTimeoutError at the deadline, unless a call had failed before; the calls that are left stay queued.
        """
        first: Exception | None = None
        while self._pending or self._unreported:
            try:
                self._finalize(deadline, blocking=True)
            except CheckpointTimeoutError as error:
                raise first or error from None
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _finalize(self, deadline: Deadline, blocking: bool, no_dist: bool = True) -> list[int]:
        self._check_usable()
        self._recover_if_given_up()
        self._call_listeners()
        self.pump()
        distributed = not no_dist and own_rank() is not None
        if blocking:
            self._wait_until_settled(deadline, stop_at_failure=not distributed)
        settled, failed = self._leading()
        if distributed:
            settled, failed = self._ranks.minimum(settled, failed)
        finalized, error = self._finalize_before(min(settled, failed))
        if failed < settled:
            error = self._drop_first(distributed, error)
        elif blocking and settled < self._next_index:
            error = with_note(not_done(settled, self._next_index - 1, deadline.timeout_s), error)
        if self._unreported:
            if error is not None:
                self._unreported.append(error)
            error = self._unreported.popleft()
        if error is None:
            return finalized
        if isinstance(error, CheckpointError):
            error.finalized = finalized
        else:
            error.add_note(f"finalized in this call: {finalized}")
        raise error

    def wait_for(self, functions: Collection[object], timeout_s: float) -> list[Call]:
        """Wait until the calls of these functions are settled, at most `timeout_s`, and return them.

        Finalizes nothing, and makes no collective.
        """
        self._check_usable()
        deadline = Deadline(timeout_s)
        self.pump()
        wanted = [call for call in self._pending if any(call.request.async_fn is each for each in functions)]
        while not all(call.settled for call in wanted) and not deadline.is_over:
            self.wait_for_events(min(deadline.left_s, self._call_listeners()))
        return wanted

    def settle(self, functions: Collection[object], timeout_s: float) -> None:
        """Do what `wait_for` does, then finalize or drop those of these calls that lead the queue and are settled.

        Failures are logged here and raised by later `maybe_finalize_async_calls`.
        """
        wanted = self.wait_for(functions, timeout_s)
        while not self._finalizing and self._pending and self._pending[0] in wanted and self._pending[0].settled:
            call = self._pending[0]
            error = call.error or self._finalize_first()
            if call.error is not None:
                self._pending.popleft()
            if error is not None:
                _log.warning("background call %d: %s", call.index, error)
                self._unreported.append(error)

    def pump(self) -> None:
        """Take in messages of the writers, without waiting or finalizing.

        Events are passed to `on_event`, failures to `abandoned`.
        """
        self._check_usable()
        intact, self._intact = self._intact, False
        for writer in self._writers:
            self._results.extend(writer.poll())
        self._intact = intact
        calls = {call.index: call for call in self._pending}
        while self._results:
            result = self._results.popleft()
            call = calls.get(result.index)
            if call is None or call.settled:
                continue
            if isinstance(result, Event):
                call.take_event(result.event)
            else:
                call.settle(result.error)

    def wait_for_events(self, timeout_s: float) -> None:
        """Wait until a writer sends something or dies, at most `timeout_s`, then `pump`."""
        self._check_usable()
        wait_for_any(self._writers, timeout_s, self._interrupted)
        self.pump()

    def listen(self, listener: Callable[[], float]) -> None:
        """Call `listener` at the start of each `maybe_finalize_async_calls`, and again and again while that waits.

        It must be quick, and returns after how many seconds it is to be called again at the latest.
        """
        self._listeners.append(listener)

    def stop_listening(self, listener: Callable[[], float]) -> None:
        """Undo `listen`."""
        self._listeners.remove(listener)

    def nudge(self) -> None:
        """Ask the running functions to look now at what they wait for; see `WriterContext.nudges`. Never waits."""
        for writer in self._writers:
            writer.nudge()

    def repair(self) -> None:
        """Make the queue usable again after an exception from another thread has interrupted one of its methods.

        Writers whose state is unknown then get no more calls, finish what they were sent, and are replaced: their calls
        settle in `recover`.
        """
        self._check_usable()
        if not self._intact:
            self._left.append(self._pool.replace_all(self._config))
            self._intact = True

    def recover(self, timeout_s: float) -> list[int]:
        """Empty the queue, whatever a method was doing when an exception was thrown into it.

        Calls that are done, now or within `timeout_s`, are finalized; what their finalize functions raise is logged.
        The others are given up: their writers are killed, `abandoned` is called, no finalize function runs. Returns
        the finalized indices. Makes no collective and raises nothing. Indices go on from where they were.
        """
        self.repair()
        deadline = Deadline(timeout_s)
        while any(writer.busy for writer in self._writers) and not deadline.is_over:
            self.wait_for_events(deadline.left_s)
        self.pump()
        while self._left:
            self._left[-1].discard()
            self._left.pop()
        for writer in self._writers:
            writer.forget_calls()
        self._results.clear()
        self._unreported.clear()  # they are logged, as the failures below are
        finalized: list[int] = []
        while self._pending:
            call = self._pending[0]
            if not call.settled:
                call.abandon(WriterError(f"background call {call.index} was given up after a fault", rank=own_rank()))
            if call.error is not None:
                _log.warning("background call %d is not finalized: %s", call.index, call.error)
            else:
                finalized.append(call.index)
                error = call.finalize()
                if error is not None:
                    _log.error("a finalize function of background call %d failed", call.index, exc_info=error)
            self._pending.popleft()
        return finalized

    def interrupt(self) -> None:
        """Wake a waiting method, so that it runs Python code before it goes on waiting. From any thread."""
        self._interrupted.set()

    def give_up_calls(self) -> None:
        """Kill the writers and give up all calls, from any thread; see `abort_nvrx_checkpoint`."""
        if self._release.alive and self._origin.is_here:
            self._given_up = True
            for writer in self._writers:
                writer.kill_from_any_thread()
            self.interrupt()

    def _recover_if_given_up(self) -> None:
        if self._given_up:
            self._given_up = False
            self.recover(0.0)

    def close(self, abort: bool = False, *, timeout_s: float | None = None) -> None:
        """Wait for all calls and finalize them, end all processes, then raise the first failure. Idempotent.

        Takes at most `timeout_s` in all (None: that of the queue), whatever writers and storage do. The wait for calls
        ends a little before: then, or with `abort` at once, the writers are killed, no call that has not settled
        completes, `abandoned` is called for every call still in the queue (in another thread), and none of their
        finalize functions runs. CheckpointTimeoutError says so; with `abort` nothing is raised. Makes no collective: to
        finalize together with other ranks, do so before.
        """
        if not self._release.alive:
            return
        self._check_usable()
        ending = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        failure: Exception | None = None
        try:
            if abort:
                ending = ending.within(self._config.close_timeout_s)
            else:
                failure = self._drain(ending)
            if self._pending:
                self._abort(ending)
            self._stop_writers(ending)
            if self._owned_keeper is not None:
                self._owned_keeper.close(ending.within(self._config.close_timeout_s))
        finally:
            self._release()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, without waiting: the writers finish what was scheduled and end by themselves.

        In a fork of the trainer this has no effect on the queue of the trainer.
        """
        if error is None and self._origin.is_here:
            self.close()
        else:
            self._release()

    def _check_usable(self) -> None:
        if not self._origin.is_here:
            raise RuntimeError("AsyncCallsQueue belongs to the process that created it; this is a fork of that process")
        if not self._release.alive:
            raise RuntimeError("AsyncCallsQueue is closed")

    def _leading(self) -> tuple[int, int]:
        """Return the index up to which all calls are settled, and that of the first failed call among these."""
        failed = _NEVER
        for call in self._pending:
            if not call.settled:
                return call.index, failed
            if call.error is not None:
                failed = min(failed, call.index)
        return self._next_index, failed

    def _wait_until_settled(self, deadline: Deadline, stop_at_failure: bool) -> None:
        while not deadline.is_over:
            settled, failed = self._leading()
            if settled == self._next_index or (stop_at_failure and failed < settled):
                return
            self.wait_for_events(min(deadline.left_s, self._call_listeners()))

    def _call_listeners(self) -> float:
        """Return after how many seconds they are to be called again."""
        return min((listener() for listener in self._listeners), default=_NEVER)

    def _finalize_before(self, end: int) -> tuple[list[int], Exception | None]:
        finalized: list[int] = []
        first: Exception | None = None
        while self._pending and self._pending[0].index < end:
            finalized.append(self._pending[0].index)
            error = self._finalize_first()
            first = first or error
        return finalized, first

    def _finalize_first(self) -> Exception | None:
        """Finalize the first call and remove it; return what its finalize functions raised. One may restore."""
        self._finalizing = True
        try:
            error = self._pending[0].finalize()
        finally:
            self._finalizing = False
        self._pending.popleft()
        return error

    def _drop_first(self, distributed: bool, finalize_error: Exception | None) -> CheckpointError:
        """Remove the first call, which failed here or on another rank; return the error to raise."""
        call = self._pending.popleft()
        if distributed:
            call.fail_on_all(self._ranks)
        assert call.error is not None
        return with_note(call.error, finalize_error)

    def _drain(self, ending: Deadline) -> Exception | None:
        """Finalize all calls that are done in time; return the first failure."""
        try:
            self.finalize_all(ending.before_end(min(_ENDING_S, ending.timeout_s / 4)))
        except Exception as error:
            failure = error
        else:
            return None
        if not self._pending or not isinstance(failure, CheckpointTimeoutError):
            return failure
        return not_closed(self._pending[0].index, self._next_index - 1, ending.timeout_s)

    def _abort(self, ending: Deadline) -> None:
        """Kill the writers, wait until they have no effect any more, and give up all calls."""
        for writer in self._writers:
            writer.kill()
        self._stop_writers(ending.before_end(ending.left_s / 2))
        calls = list(self._pending)
        self._pending.clear()

        def abandon() -> None:
            for call in calls:
                message = f"background call {call.index} was aborted: its queue was closed"
                call.abandon(WriterError(message, rank=own_rank()))

        # The calls may use storage that does not answer.
        if not finishes_within(ending, abandon, "ckpt-abandon"):
            _log.warning("calls were given up without a record, as they do not answer: %s", [c.label for c in calls])

    def _stop_writers(self, ending: Deadline) -> None:
        for writer in self._writers:
            writer.close(ending.within(self._config.close_timeout_s))

    @property
    def _writers(self) -> list[Writer]:
        return self._pool.writers


def _release(pool: WriterPool, interrupted: Wakeup, keeper: Keeper | None) -> None:
    interrupted.close()
    pool.release()
    if keeper is not None:
        keeper.release()
