"""The writers of a queue and the calls that they run, in the trainer. Nothing is finalized here.

new ──schedule, start──▶ open ──close, end of `with`──▶ closed      a closed one has no process, no descriptor
                          ▲                                │        and no call
                          └──────────schedule, start───────┘
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from ckpt.async_calls.call import Call
from ckpt.async_calls.request import Request
from ckpt.async_calls.writer import CallOutcome, WriterConfig, WriterPool, WriterProcess, wait_for_any
from ckpt.errors import WriterError
from ckpt.keeper.messages import Notice
from ckpt.keeper.trainer_side import Keeper
from ckpt.ranks.group import own_rank
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import Origin
from inprocess.ipc.interpreter import interpreter
from inprocess.ipc.threads import finishes_within
from inprocess.ipc.uncopied import Uncopied
from inprocess.ipc.wakeup import Wakeup

_log = logging.getLogger("ckpt")
NO_CALL = 2**62  # above the index of any call


class CallRunner(Uncopied):
    """Runs calls in background processes, and knows which are settled. For one thread of the trainer."""

    def __init__(self, config: WriterConfig, num_writers: int, keeper: Keeper | None) -> None:
        """The writers are forked by `keeper`; None: by one of its own.

        ValueError for a number of writers below 1; RuntimeError if no interpreter is known for the writers."""
        interpreter()
        if num_writers < 1:
            raise ValueError(f"num_writers must be at least 1, not {num_writers}")
        self._config = config
        self._num_writers = num_writers
        self._keeper = Keeper() if keeper is None else keeper
        self._owns_keeper = keeper is None
        self._origin = Origin()
        self._listeners: list[Callable[[], float]] = []
        self._forget_calls()
        self._open()

    def _open(self) -> None:
        """Prepare writers, without starting them."""
        self._pool = WriterPool(self._config, self._num_writers, self._keeper)
        self._intact = True  # False while a method changes `_pool`; if it stays so, the method was interrupted
        self._left: list[WriterPool] = []  # after an interrupt; they finish what they were sent, until `recover`
        self._given_up = False  # by another thread: the next method does what `recover` does
        self._interrupted = Wakeup()
        self._release = weakref.finalize(
            self, _release, self._pool, self._interrupted, self._keeper if self._owns_keeper else None
        )

    def _forget_calls(self) -> None:
        """Begin with no call and the index 0."""
        self._pending: deque[Call] = deque()  # in order of index, without gaps
        self._results: deque[CallOutcome | Notice] = deque()  # of the writers, not yet passed to their calls
        self._next_index = 0

    def start(self) -> None:
        """Start the writer processes in the background, so that the first request finds them ready.

        Returns at once. Raises OSError when no process can be started; it can be ignored, as requests then fail, too.
        """
        self._check_usable()
        if self._is_closed:
            self._open()
        intact, self._intact = self._intact, False
        for writer in self._writers:
            writer.start()
        self._intact = intact

    def _submit(self, request: Request) -> int:
        """Give the request to a writer, and return its index. Raises what `Call` raises; nothing has changed then."""
        self.pump()
        call = Call(self._next_index, request)
        if self._is_closed:
            self._open()
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
            if isinstance(result, Notice):
                call.take_event(result.event)
            else:
                call.settle(result.error)

    def wait_for_events(self, timeout_s: float) -> None:
        """Wait until a writer sends something or dies, at most `timeout_s`, then `pump`."""
        self._check_usable()
        if self._is_closed:
            self._open()
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

    def interrupt(self) -> None:
        """Wake a waiting method, so that it runs Python code before it goes on waiting. From any thread."""
        self._interrupted.set()

    def give_up_calls(self) -> None:
        """Kill the writers and give up all calls, from any thread; see `abort_nvrx_checkpoint`."""
        if not self._is_closed and self._origin.is_here:
            self._given_up = True
            for writer in self._writers:
                writer.kill_from_any_thread()
            self.interrupt()

    def _end(self) -> None:
        """Close all connections: writers that are alive finish what they were sent, and end. Forget all calls."""
        for pool in self._left:
            pool.release()
        self._release()
        self._forget_calls()

    @property
    def _is_closed(self) -> bool:
        return not self._release.alive

    def _check_usable(self) -> None:
        if not self._origin.is_here:
            raise RuntimeError("AsyncCallsQueue belongs to the process that created it; this is a fork of that process")

    def _call_listeners(self) -> float:
        """Return after how many seconds they are to be called again."""
        return min((listener() for listener in self._listeners), default=NO_CALL)

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

    def _close_keeper(self, ending: Deadline) -> None:
        if self._owns_keeper:
            self._keeper.close(ending.within(self._config.close_timeout_s))

    @property
    def _writers(self) -> list[WriterProcess]:
        return self._pool.writers


def _release(pool: WriterPool, interrupted: Wakeup, keeper: Keeper | None) -> None:
    interrupted.close()
    pool.release()
    if keeper is not None:
        keeper.release()
