"""The queue of background calls: scheduled in order, run in parallel writers, finalized strictly in order.

    index    0    1    2    3    4            call i runs in writer i % num_writers
            done done fail run  run
             │    │    │
             │    │    └─ dropped: never finalized, abandoned() called, error raised
             └────┴────── finalize functions run here, in the trainer, by maybe_finalize_async_calls

A call is *settled* when it is done or failed. It leaves the queue only when it is settled on all ranks, and then in the
same way on all of them: finalized if it is done everywhere, dropped if it failed anywhere. With ``no_dist=True`` each
rank finalizes its own calls.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckpt.async_calls.compatible import WarmupPersistentCaller, remember
from ckpt.async_calls.request import AsyncRequest, Request
from ckpt.async_calls.runner import NO_CALL, CallRunner
from ckpt.async_calls.settled import SettledCalls, failed_elsewhere, not_closed, not_done, raised, with_note
from ckpt.async_calls.writer import WriterConfig, with_priorities
from ckpt.errors import CheckpointError, CheckpointTimeoutError, WriterError
from ckpt.keeper.trainer_side import Keeper
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.group import own_rank
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.uncopied import Uncopied

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_log = logging.getLogger("ckpt")
_ENDING_S = 10.0  # of the time for `close`, at most a quarter of it: to end processes, after the wait for calls


class AsyncCallsQueue(CallRunner):
    """Runs requests in background processes and finalizes them in the order scheduled, on all ranks together.

    All methods are for one thread of the trainer. All ranks schedule the same requests (`async_fn` may be None on some)
    and call the same methods with the same arguments, or say `no_dist`. In a process forked from the trainer every
    method raises RuntimeError. If the queue is dropped, or the trainer dies, the writers finish what was scheduled and
    end.
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
        no_dist: bool = False,
        num_writers: int = 1,
        config: WriterConfig | None = None,
        process_group: ProcessGroup | None = None,
        timeout_s: float = 1800.0,
        keeper: Keeper | None = None,
    ) -> None:
        """Starts no process (see `start`). `timeout_s` is the deadline of every blocking wait for calls.

        The writers are forked by `keeper`, which its owner closes after the queue; None: by one of the queue's own.

        `no_dist` is for methods that do not say it: False to finalize with all ranks of `process_group`, where
        torch.distributed is initialized; True for a queue of one rank, which makes no collective.

        The positional parameters are those of nvidia_resiliency_ext. `cpu_priority` (added to the niceness) and
        `io_priority` (the Linux scheduling class: 0 unchanged, 2 best-effort, 3 idle) override `config`. The others
        are accepted and have no effect: writers are always persistent; they outlive the trainer until they have
        finished what was scheduled, daemon or not; `close(abort=True)` kills them without a SIGTERM; and bytes in
        `SharedMemory` always go through shared memory.

        ValueError for a number of writers below 1, and for priorities that this process cannot give itself;
        RuntimeError if no interpreter is known for the writers.
        """
        config = with_priorities(config if config is not None else WriterConfig(), cpu_priority, io_priority)
        super().__init__(config, num_writers, keeper)
        self._no_dist = no_dist
        self._settled_calls = SettledCalls(Ranks(process_group, timeout_s))
        self._timeout_s = timeout_s
        self._finalizing = False
        self._unreported: deque[Exception] = deque()  # of calls that have left the queue; each is raised once
        remember(self)

    warmup_persistent_caller = WarmupPersistentCaller()
    """`start` under its name in nvidia_resiliency_ext; on the class it has no effect."""

    def schedule_async_request(self, async_request: Request) -> int:
        """Run `preload_fn`, queue the request and return its index: 0, 1, ... since the last `close`.

        Never waits: it pickles, and sends one message. What the arguments refer to may change afterwards, and functions
        that are added to `finalize_fns` before the call is finalized run, too. Requests of Megatron-LM and
        nvidia_resiliency_ext are accepted. A closed queue starts new writers.

        Raises what `preload_fn` and pickling raise, or ValueError if `preload_fn` has no argument to replace, and
        nothing is queued then. All other failures are those of the call, and are raised when it would be finalized.
        """
        self._check_usable()
        self._recover_if_given_up()
        return self._submit(async_request)

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool | None = None) -> list[int]:
        """Finalize the calls that are done on all ranks, in order, and return their indices.

        `blocking` first waits for all calls scheduled so far, at most `timeout_s`. All ranks must call this together:
        it makes one all_reduce of two numbers while a call is scheduled, and a small exchange if one failed. With
        `no_dist` (None: that of the queue) each rank finalizes its own calls, without any collective; both may be used
        for one queue, as a rank that has finalized a call alone still takes part when the others do.

        A failed call is dropped, and its error raised after the calls before it are finalized: a CheckpointError,
        `WriterError` or what the call's `abandoned` made of it, the traceback of the writer as its cause.
        CheckpointTimeoutError if the wait reached its deadline; the calls stay queued. An exception of a finalize
        function is raised after all others have run; its call counts as finalized. What `settle` has not raised is
        raised first, one exception at each call.
        """
        finalized = self._finalize(Deadline(self._timeout_s), blocking, self._is_alone(no_dist))
        if not self._unreported:
            return finalized
        error = self._unreported.popleft()
        if isinstance(error, CheckpointError):
            error.finalized = finalized
        else:
            error.add_note(f"finalized in this call: {finalized}")
        raise error

    def finalize_all(
        self,
        deadline: Deadline | None = None,
        no_dist: bool | None = None,
        check: Callable[[Exception], None] = raised,
    ) -> None:
        """Wait for all calls, and finalize them, until `deadline` (None: `timeout_s`); then raise the first failure.

        `check` is called with each failure, and raises what counts as one.
        CheckpointTimeoutError at the deadline, unless a call had failed before; the calls that are left stay queued.
        With ``no_dist=False`` all ranks finalize the same calls, and all of them stop when one is at its deadline.
        """
        alone, deadline = self._is_alone(no_dist), deadline or Deadline(self._timeout_s)
        finalized, before, left = list[int](), -1, self._count_left(alone)
        # A round that settles no call has waited until the deadline, of this rank or of another one.
        while left != before:
            finalized += self._finalize(deadline, True, alone)
            before, left = left, self._count_left(alone)
        if alone and not self._pending:
            # What ran here is done, and had no need of an agreement (saves have theirs in storage): ranks may have
            # scheduled different calls, such as saves that one of them could not make. They count from here.
            self._settled_calls.restart(self._next_index)
        failures: list[Exception] = []
        while self._unreported:
            try:
                check(self._unreported.popleft())
            except Exception as error:
                failures.append(error)
        if failures:
            if isinstance(failures[0], CheckpointError):
                failures[0].finalized = finalized
            raise failures[0]

    def raise_later(self, failures: Iterable[Exception]) -> None:
        """Let later `maybe_finalize_async_calls` raise these: failures that `check` got, of calls of another owner."""
        self._unreported.extend(failures)

    def _is_alone(self, no_dist: bool | None) -> bool:
        """Return whether this rank finalizes its calls without the others."""
        return (self._no_dist if no_dist is None else no_dist) or own_rank() is None

    def _count_left(self, alone: bool) -> int:
        """Return a number of calls to finalize, which is the same on all ranks unless this one is alone."""
        return len(self._pending) if alone else self._settled_calls.count_left(self._next_index)

    def _finalize(self, deadline: Deadline, blocking: bool, alone: bool) -> list[int]:
        """Finalize what is done, and return the indices; errors are in `_unreported`."""
        self._check_usable()
        self._recover_if_given_up()
        self._call_listeners()
        self.pump()
        alone = alone or not self._settled_calls.count_left(self._next_index)
        if blocking:
            self._wait_until_settled(deadline, stop_at_failure=alone)
        settled, failed = self._leading()
        if not alone:
            settled, failed = self._settled_calls.decide(settled, failed)
        # Calls that failed are dropped, and counted as agreed, before functions of the program run: what one of these
        # throws into the queue, such as KeyboardInterrupt, loses no error, and does not make ranks differ.
        error: Exception | None = None
        if failed < settled:
            error = self._drop(failed, alone)
            self._unreported.append(error)
        if not alone:
            self._settled_calls.note(min(settled, failed + 1))
        finalized, finalize_error = self._finalize_before(min(settled, failed))
        if error is None and blocking and settled < self._next_index:
            error = not_done(settled, self._next_index - 1, deadline.timeout_s)
            self._unreported.append(error)
        if error is not None:
            with_note(error, finalize_error)
        elif finalize_error is not None:
            self._unreported.append(finalize_error)
        return finalized

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

    def recover(self, timeout_s: float) -> list[int]:
        """Empty the queue, whatever a method was doing when an exception was thrown into it.

        Calls that are done, now or within `timeout_s`, are finalized; what their finalize functions raise is logged.
        The others are given up: their writers are killed, `abandoned` is called, no finalize function runs. Returns
        the finalized indices. Makes no collective and raises nothing. Indices go on from where they were.

        If ranks finalize together, all of them must recover before they schedule the next request.
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
        self._settled_calls.restart(self._next_index)
        return finalized

    def _recover_if_given_up(self) -> None:
        if self._given_up:
            self._given_up = False
            self.recover(0.0)

    def close(
        self,
        abort: bool = False,
        *,
        no_dist: bool | None = None,
        timeout_s: float | None = None,
        check: Callable[[Exception], None] = raised,
    ) -> None:
        """Wait for all calls and finalize them, end all processes, then raise the first failure; see `finalize_all`.

        All ranks finalize the same calls, together, as in `maybe_finalize_async_calls`; with `no_dist` (None: that of
        the queue), or if no call is left, there is no collective. A request that is scheduled later starts new
        processes, and gets the index 0. Idempotent.

        Takes at most `timeout_s` in all (None: that of the queue), whatever writers and storage do; with all ranks, if
        one does not call this, at most the timeout of the process group. The wait for calls
        ends a little before: then, or with `abort` at once, the writers are killed, no call that has not settled
        completes, `abandoned` is called for every call still in the queue (in another thread), and none of their
        finalize functions runs. CheckpointTimeoutError says so; with `abort` nothing is raised, and no collective made.
        """
        if self._is_closed:
            return
        self._check_usable()
        ending = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        failure: Exception | None = None
        try:
            if abort:
                ending = ending.within(self._config.close_timeout_s)
            else:
                failure = self._drain(ending, no_dist, check)
            if self._pending:
                self._abort(ending)
            self._stop_writers(ending)
            self._close_keeper(ending)
        finally:
            self._end()
        if failure is not None:
            raise failure

    def _end(self) -> None:
        super()._end()
        self._unreported.clear()
        self._settled_calls.restart(0)

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
            self._end()

    def _leading(self) -> tuple[int, int]:
        """Return the index up to which all calls are settled, and that of the first failed call among these."""
        failed = NO_CALL
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

    def _drop(self, index: int, alone: bool) -> CheckpointError:
        """Remove a call that failed here or on another rank; return the error to raise."""
        call = next((each for each in self._pending if each.index == index), None)
        try:
            failures = [] if alone else self._settled_calls.exchange(None if call is None else call.own_failure())
        except CheckpointError as error:  # another rank did not come
            if call is not None and call.error is not None:
                error.add_note(f"background call {index} has failed on this rank: {call.error}")
            raise
        if call is None:  # this rank has finalized it before, alone
            return failed_elsewhere(f"background call {index}", failures)
        if not alone:
            call.take_failures(failures)
        self._pending.remove(call)
        assert call.error is not None
        return call.error

    def _drain(self, ending: Deadline, no_dist: bool | None, check: Callable[[Exception], None]) -> Exception | None:
        """Finalize all calls that are done in time; return the first failure."""
        try:
            self.finalize_all(ending.before_end(min(_ENDING_S, ending.timeout_s / 4)), no_dist, check)
        except Exception as error:
            failure = error
        else:
            return None
        if not self._pending or not isinstance(failure, CheckpointTimeoutError):
            return failure
        return not_closed(self._pending[0].index, self._next_index - 1, ending.timeout_s)


class DistributedAsyncCaller(Uncopied):
    """Runs one function at a time in a background process. For one thread of the trainer."""

    def __init__(
        self, config: WriterConfig | None = None, process_group: ProcessGroup | None = None, timeout_s: float = 1800.0
    ) -> None:
        self._queue = AsyncCallsQueue(config=config, process_group=process_group, timeout_s=timeout_s)

    def schedule_async_call(
        self,
        async_fn: Callable[..., Any] | None,
        save_args: Sequence[Any],
        save_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start the call in the background. Raises RuntimeError while the previous one is not known to be done."""
        if self._queue.get_num_unfinalized_calls():
            raise RuntimeError(
                "the previous call is still running; wait with is_current_async_call_done(blocking=True)"
            )
        self._queue.schedule_async_request(AsyncRequest(async_fn, save_args, [], save_kwargs))

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether no call is running on any rank; all ranks must call this. With `no_dist` only on this one.

        Raises a CheckpointError when the call failed (once; the next call gets a new writer if need be),
        CheckpointTimeoutError as `AsyncCallsQueue.maybe_finalize_async_calls` does.
        """
        self._queue.maybe_finalize_async_calls(blocking, no_dist)
        return self._queue.get_num_unfinalized_calls() == 0

    def close(self, abort: bool = False) -> None:
        """Wait for the call, or kill it with `abort`, and end the process. Idempotent."""
        self._queue.close(abort)
