"""A background call, from its request to its end.

    AsyncRequest ──▶ Call: scheduled ──▶ begun ──▶ settled: done ────▶ finalized
                      │  ▲ again, if its writer     └────── failed ──▶ dropped
                      │  └ died before it began
                      └── Work, pickled, in a memfd ═══▶ writer process

A `Call` stays in the trainer, from the moment it is scheduled until it leaves the queue. `Work` is what crosses to the
writer process.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import sys
import time
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import cloudpickle

from ckpt.async_calls.request import Request, as_request, run_all, work_of
from ckpt.async_calls.settled import failed_elsewhere
from ckpt.errors import CheckpointError, WriterError
from ckpt.ranks.failure import Failure
from ckpt.ranks.group import own_rank
from inprocess.ipc.interpreter import import_path
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.uncopied import Uncopied


class CallTimer(Protocol):
    """The time limit of one running call.

    All methods are called in the trainer, from within methods of the queue, and must not raise.
    """

    def left_s(self) -> float | None:
        """Return how long the call may go on, None for no limit. At zero or less the writer is killed."""
        ...

    def overdue(self, pid: int | None) -> str:
        """Return why the writer, this process, is about to be killed, as the end of a sentence."""
        ...

    def end(self, taken_s: float | None) -> None:
        """The call is over, and took so long; None if it did not do its work."""
        ...


@runtime_checkable
class RecoverableCall(Protocol):
    """An `async_fn` that stays in the trainer, and learns there when its call can no longer be finalized.

    What runs in the writer is its `in_writer`. It may also define ``on_event(event: dict) -> None``, which the trainer
    calls with every event that the writer sends by `WriterContext.report`, in order, from within a method of the queue;
    and ``on_begun(at_ns: int) -> CallTimer | None``, which is called when its turn has come, with the time of
    CLOCK_MONOTONIC. Any `async_fn` may define these two.
    """

    @property
    def in_writer(self) -> Callable[..., Any]:
        """The function that is pickled, and called in the writer with the arguments of the request."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same in the trainer, for `AsyncRequest.execute_sync`."""
        ...

    def abandoned(self, error: CheckpointError) -> CheckpointError | None:
        """Return the error to raise for a call that cannot complete; None if it had done its work all the same.

        The call failed, its writer died or was killed, or (`no_dist=False`) it failed on another rank. Called once, in
        the trainer, from whichever method of the queue notices; again if an exception was thrown into it from another
        thread. Unless this returns None, no finalize function of the request will run.
        """
        ...


class Call(Uncopied):
    """One call of a queue, in the trainer. Not thread-safe.

    It keeps its pickled work until it is settled, so that another writer can have it if this one dies before beginning.
    An exception may be thrown into every method from another thread (a restart does that): what was not done then is
    done when the method is called again.
    """

    def __init__(self, index: int, request: Request) -> None:
        """Run `preload_fn`, and pickle the work. Raises what these raise.

        ValueError for a closed region, or if there is no argument that `preload_fn` could replace.
        """
        self.index = index
        self.request = as_request(request, index)
        self.regions: dict[str, SharedMemory] = {}  # what the work refers to
        self.fd = -1
        self.attempts = 0  # of sending it
        self.timer: CallTimer | None = None
        self.settled = self.request.async_fn is None
        self.error: CheckpointError | None = None  # to raise if it failed; `abandoned` has been called then
        self._scheduled_ns = time.monotonic_ns()
        self._event_error: Exception | None = None
        # An iterator over the list itself: functions that are added to it before it ends are called, too.
        self._finalize_fns = iter(self.request.finalize_fns)
        fn = self.request.async_fn
        if fn is not None:
            work = work_of(self.request, getattr(fn, "in_writer", fn))  # of a `RecoverableCall`
            self.fd = pickled(work, self.regions)
        # The arguments are pickled: a call that waits does not keep them in memory a second time.
        self.request = self.request._replace(async_fn_args=(), async_fn_kwargs={}, preload_fn=None)

    @property
    def label(self) -> str:
        """The name of its function, for messages; of a partial, that of what it calls."""
        fn = self.request.async_fn
        return getattr(getattr(fn, "func", fn), "__qualname__", None) or type(fn).__qualname__

    # -- while it is with a writer -------------------------------------------------------------------------------------

    def begin(self, at_ns: int) -> None:
        """Start the clock, if the call has one that has not been started: its turn has come."""
        on_begun: Callable[[int], CallTimer | None] | None = getattr(self.request.async_fn, "on_begun", None)
        if self.timer is None and on_begun is not None:
            self.timer = on_begun(max(at_ns, self._scheduled_ns))

    def leave_writer(self, taken_s: float | None = None) -> None:
        """Release what a writer needs, and stop the clock. `taken_s`: how long it took, if it did its work."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.end(taken_s)

    # -- what becomes of it --------------------------------------------------------------------------------------------

    def take_event(self, event: dict[str, Any]) -> None:
        """Hand an event to `on_event`; if that raises, the call fails when it is over."""
        on_event: Callable[[dict[str, Any]], None] | None = getattr(self.request.async_fn, "on_event", None)
        if on_event is None:
            return
        try:
            on_event(event)
        except Exception as error:
            self._event_error = self._event_error or error

    def settle(self, error: CheckpointError | None) -> None:
        """Take the outcome: the error of a call that failed, or None."""
        if error is None and self._event_error is not None:
            error = WriterError(
                f"on_event of background call {self.index} raised {self._event_error!r}", rank=own_rank()
            )
            error.__cause__ = self._event_error
        if error is not None:
            self.abandon(error)
        self.settled = True

    def finalize(self) -> Exception | None:
        """Run the finalize functions, whatever they raise; return the first exception. None of them runs twice."""
        return run_all(self._finalize_fns)

    def abandon(self, error: CheckpointError) -> None:
        """Fail, unless that has happened before: tell the call and let it choose the error to raise.

        It may choose None: what it had to do is done all the same, and the call is not a failure.
        """
        if self.error is not None:
            return
        chosen: CheckpointError | None = error
        abandoned: Callable[[CheckpointError], CheckpointError | None] | None
        abandoned = getattr(self.request.async_fn, "abandoned", None)
        if abandoned is not None:
            try:
                chosen = abandoned(error)
            except Exception as problem:
                error.add_note(f"besides, abandoned() raised {problem!r}")
        if chosen is not None and chosen is not error and chosen.__cause__ is None:
            chosen.__cause__ = error.__cause__ or error
        self.error = chosen

    def own_failure(self) -> Failure | None:
        """Return why it failed here, for the other ranks; None if it did not."""
        return None if self.error is None else Failure.of(self.error, own_rank())

    def take_failures(self, failures: Sequence[Failure]) -> None:
        """Fail, as the call failed on these ranks, which may or may not include this one."""
        if self.error is None:
            error = failed_elsewhere(f"background call {self.index}", failures)
            self.abandon(error)
            self.error = self.error or error  # it failed elsewhere, whatever was done here
        elif len(failures) > 1:
            self.error.add_note(f"the call failed on ranks {[failure.rank for failure in failures]}")


# -- work on its way to a writer ---------------------------------------------------------------------------------------

_REDUCERS: Any = cloudpickle.Pickler.dispatch_table


@dataclass(frozen=True)
class _Surroundings:
    """The state of the trainer that a call finds in its writer, as it was when the call was scheduled.

    `import_path` may have changed since the writer was started. With `authkey`, the key of the trainer's
    `multiprocessing`, a call can use its managers and queues; None if the trainer does not use them.
    """

    import_path: list[str]
    authkey: bytes | None

    @classmethod
    def here(cls) -> _Surroundings:
        process = sys.modules.get("multiprocessing.process")
        return cls(import_path(), None if process is None else bytes(process.current_process().authkey))

    def enter(self) -> None:
        if self.import_path != sys.path:
            sys.path[:] = self.import_path
            importlib.invalidate_caches()
        if self.authkey is not None:
            multiprocessing.current_process().authkey = self.authkey


def pickled(value: Any, regions: dict[str, SharedMemory]) -> int:
    """Return a memfd with a value and its surroundings, pickled by value where needed.

    A region of shared memory is replaced by its id, and added to `regions`.
    """
    fd = os.memfd_create("ckpt-call", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file, _main_by_value():
            pickle.dump(_Surroundings.here(), file)
            _Pickler(file, regions).dump(value)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _main_by_value() -> Iterator[None]:
    """Pickle functions of the program's own script by value, also where it has been imported under another name.

    That is so in processes that `multiprocessing` has started by "spawn" or "forkserver".
    """
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def unpickled(fd: int, regions: Mapping[str, SharedMemory]) -> Any:
    """Return the value in `fd`, with its regions put back. Raises whatever importing and unpickling raise."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)  # the offset is shared with the process that wrote it
        surroundings: _Surroundings = pickle.load(file)
        surroundings.enter()
        return _Unpickler(file, regions).load()


def _reduced_code(code: types.CodeType) -> tuple[Any, ...]:
    make, args = _REDUCERS[types.CodeType](code)[:2]
    return _code_of_file, (make, args, code.co_filename)


def _code_of_file(make: Callable[..., types.CodeType], args: tuple[Any, ...], name: str) -> types.CodeType:
    return make(*args).replace(co_filename=name)


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions by value where needed, with their file names, so that tracebacks have their lines.

    From version 3.1.3 on cloudpickle leaves the names out.
    """

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _reduced_code}, _REDUCERS)


class _Pickler(CodePickler):
    def __init__(self, file: Any, regions: dict[str, SharedMemory]) -> None:
        super().__init__(file)
        self._regions = regions

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, SharedMemory):
            return None
        if value.closed:
            raise ValueError(f"{value!r} is an argument of a background call")
        self._regions[value.region_id] = value
        return value.region_id


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, regions: Mapping[str, SharedMemory]) -> None:
        super().__init__(file)
        self._regions = regions

    def persistent_load(self, region_id: str) -> SharedMemory:
        return self._regions[region_id]
