"""`Wrapper` makes a function restartable; a `CallWrapper` is one call of it on one rank."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from inprocess import rank_assignment as assignments
from inprocess.abort import AbortTorchDistributed, unblock_main_thread
from inprocess.agreement import Agreement
from inprocess.attribution import Cause
from inprocess.deferred_log import DeferredLog
from inprocess.exception import RestartAbort
from inprocess.group_store import GroupStore
from inprocess.hooks import Hooks
from inprocess.ipc.interpreter import interpreter
from inprocess.ipc.open_call import close_call, open_call
from inprocess.ipc.process_one import reap_adopted, warn_if_process_one
from inprocess.ipc.reported_step import collected_steps, report_step, reported_step
from inprocess.ipc.restart_index import announced_restart_index
from inprocess.ipc.uncopied import Uncopied
from inprocess.joining import newcomer_from_environment
from inprocess.main_thread.atomic import AtomicLock
from inprocess.main_thread.stacks import StackReporter
from inprocess.main_thread.thrower import MainThreadThrower
from inprocess.monitor_process.job_store import iteration_store
from inprocess.monitoring import Monitoring
from inprocess.node_layout import NodeLayout
from inprocess.process_state import children_end_here, excepthook_restored, frozen_heap
from inprocess.progress_watchdog import ProgressWatchdog
from inprocess.protocol import ITERATION_CODE, RestartProtocol
from inprocess.rank_environment import ranks_of_environment
from inprocess.repetition import PINGS, STEP
from inprocess.sections.gate import SectionGate
from inprocess.sections.making import SectionSettings
from inprocess.settings import Hook, Settings, require_main_thread, require_no_process_group
from inprocess.state import State
from inprocess.store import PrefixStore, TCPStore
from inprocess.torn_locks import held_locks
from inprocess.unblock.gloo_waits import watch_gloo_waits
from inprocess.unblock.process_groups import gloo_outlives_modules, watchdog_of_nccl_ends_nothing
from inprocess.unblock.store_waits import interruptible_store_connections

__all__ = ["CallWrapper", "Wrapper", "inject"]

_log = logging.getLogger(__name__)
_UNBLOCK_S = 0.02
_R = TypeVar("_R")
_DEFAULT_ASSIGNMENT = assignments.ShiftRanks()  # it holds nothing


@dataclass(kw_only=True, eq=False)
class Wrapper(Settings):
    """Makes a function restartable: after a fault on any rank it runs again, in the same processes.

        @inprocess.Wrapper(soft_timeout=timedelta(seconds=30), ...)
        def train(call: inprocess.CallWrapper | None = None): ...

    Times are `datetime.timedelta`. `store_factory(**store_kwargs)` makes the store through which the ranks agree; the
    default store outlives each single rank. `initialize`, `abort`, `finalize`, `health_check`, `completion` and
    `terminate` are hooks, `rank_assignment` (and the older `rank_filter`) numbers the ranks after a restart; see their
    modules.

    No progress of the main thread for `soft_timeout` restarts the job, for `hard_timeout` ends this process. A monitor
    process that is silent for `heartbeat_timeout` means that its node is lost. Ranks that others wait for,
    `barrier_timeout` after a fault or `completion_timeout` after the function has returned, are given up if they make
    no progress. `last_call_wait` limits how long reports of the same incident are collected. The intervals limit how
    long the threads sleep; no restart waits for one. Paths may contain ``{rank}``, the initial rank.

    The same fault (type, and place in the code, on whichever rank) without progress between ends the job when it comes
    for the `max_same_faults`-th time, and so do more than `max_faults_per_hour` faults: each rank raises its exception,
    the others RepeatedFault. The first restart is at once, the next ones wait for 1, 2, 4, ... seconds, at most
    `max_backoff`. Progress is a larger step than before (`CallWrapper.report_step`, or a save or restore of `ckpt`), or
    more pings; see docs/restart.md. ``ckpt_launcher`` has options that replace these; None is no limit.

    `rejoin` says when a process that ``ckpt_launcher`` has started in the place of a lost one makes the others restart:
    "now", as soon as it is ready (the default), "after=SECONDS", so long after that, or "next-restart", never. One that
    would only be a spare never does. The launcher's ``--ft-rejoin`` replaces it.

    `uninterrupted_modules` names modules and packages whose functions no restart interrupts, such as ``("pandas",)``,
    beside those that are known (see `main_thread.thrower`). Threads that an interrupted function has started and not
    ended get no process group, and are named in a warning; with `threads="error"` this rank leaves instead.

    With `sections`, a `fault_tolerance.FaultToleranceConfig`, a `fault_tolerance.RankMonitorClient` in the function
    needs no launcher: a section that is late by these settings restarts the job, one that is late for `hard_timeout -
    soft_timeout` more ends this process.

    TypeError or ValueError if arguments contradict each other; RuntimeError if no interpreter is known for the monitor
    processes.
    """

    hooks: Hooks = field(init=False, repr=False)
    store_factory: Any = TCPStore
    abort: Hook | None = AbortTorchDistributed()  # noqa: RUF009 - it holds nothing
    rank_assignment: Hook | None = _DEFAULT_ASSIGNMENT
    sections: SectionSettings | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank_assignment is _DEFAULT_ASSIGNMENT and NodeLayout.from_environment() is not None:
            self.rank_assignment = assignments.WholeNodes()
        interpreter()
        self.hooks = Hooks(self)

    @property
    def restart_health_check(self) -> Any:
        """What is checked after a fault: the user's checks, then those of the devices; None for nothing."""
        return self.hooks.restart_health_check_hook

    def __call__(self, function: Callable[..., _R]) -> Callable[..., _R | None]:
        """Return the restartable function; `function` itself if the wrapper is not enabled.

        It takes the arguments of `function` but those that are a `CallWrapper`, which a type cannot express.
        TypeError for coroutine functions and generator functions: their body runs after they have returned.
        """
        if not self.enabled:
            return function
        if _runs_later(function):
            raise TypeError(
                f"{function!r} returns before its body runs, which would not be protected: wrap a plain function, such "
                "as one that calls asyncio.run"
            )

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> _R | None:
            try:
                with CallWrapper(self) as call:
                    result: _R | None = call(function, args, kwargs)
            except RestartAbort:  # a decision, not a loss: what the program does with it counts
                close_call()
                raise
            close_call()
            return result

        return wrapped


class CallWrapper(Uncopied):
    """One call of a wrapped function on this rank. The function gets it in parameters annotated with this class.

    A context manager. ValueError outside the main thread (only that thread can be freed from a blocking call), and if a
    process group exists already.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        require_main_thread()
        require_no_process_group()
        self.wrapper = wrapper
        self.state = State.from_env()
        open_call()
        ranks_of_environment().export_local()
        self._newcomer = newcomer_from_environment()
        if self._newcomer is not None:
            self.state.rank = self.state.initial_rank = self._newcomer.initial_rank
        self.base_store: Any = None
        self._pings = 0  # in this iteration
        self._cleanup = contextlib.ExitStack()
        try:
            self._set_up(wrapper)
        except BaseException:
            self.shutdown()
            raise

    def _set_up(self, settings: Settings) -> None:
        enter = self._cleanup.enter_context
        enter(DeferredLog())
        warn_if_process_one()
        self.held_locks = held_locks()  # before the heap is frozen: those of the caller
        enter(frozen_heap())  # takes a while, so before time limits count
        watch_gloo_waits()
        enter(watchdog_of_nccl_ends_nothing())
        self.atomic_lock = AtomicLock()
        self.thrower = enter(
            MainThreadThrower(self.atomic_lock.is_held_here, settings.uninterrupted_modules, ITERATION_CODE)
        )
        stacks = enter(StackReporter())
        self._sections = SectionGate(settings.sections)
        self._cleanup.callback(self._sections.close)
        if self._newcomer is not None:  # one that is not fit must not cost the others a restart
            self.wrapper.hooks.restart_health_check(self.state.freeze())
        self._monitoring = enter(
            Monitoring(settings, self.state, stacks, self._sections.fd, self._newcomer, self.wrapper.hooks.active_of)
        )
        self.monitor_process, self.base_store = self._monitoring.process, self._monitoring.store
        self.progress_watchdog = ProgressWatchdog(
            self.state.initial_rank, self.monitor_process, settings.progress_watchdog_interval
        )
        self.progress_watchdog.start()
        self._cleanup.callback(self.progress_watchdog.shutdown)
        self._group_store = GroupStore()
        self._cleanup.callback(self._group_store.close)

    # -- what the wrapped function uses --------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """How often the function was restarted."""
        return self.state.iteration

    @property
    def cause(self) -> Cause | None:
        """Why the function was restarted, the same on all ranks; None in the first iteration."""
        return self.state.cause

    @property
    def fencing_token(self) -> int:
        """A number that is larger in each iteration, and in each job that starts later; the same on all ranks.

        It is the time of the start in milliseconds, by the clock of one host, plus the iteration: if that clock is set
        back between two starts, the later one has smaller numbers until the time of the earlier one has passed.

        For storage of your own that several jobs could write to: if it refuses tokens smaller than the largest it has
        seen, a process that was stopped and continues later cannot do harm. Checkpoint roots have their own token.
        """
        return self._monitoring.first_token + self.state.iteration

    @property
    def store(self) -> Any:
        """The store of the current iteration: one of torch, for the wrapped function. None between iterations."""
        return self._group_store.store

    @property
    def newcomers(self) -> int:
        """How many processes wait to join the job, from the next restart on. Asks the coordination store.

        Under ``ckpt_launcher --ft-restart-policy=in-process`` these are the replacements of lost workers. Those that
        are needed ask for the restart themselves, see `rejoin` of `Wrapper`. StoreLostError.
        """
        return len(Agreement.newcomers(self.base_store))

    def ping(self) -> None:
        """Report progress of the function. After the first ping of an iteration, pings must continue."""
        self._pings += 1
        self.progress_watchdog.ping()

    def report_step(self, step: int) -> None:
        """Report a training step that was reached. A step larger than ever before is progress between two faults.

        Saves and restores of `ckpt` do this by themselves. Has nothing to do with time limits.
        """
        report_step(step)

    def atomic(self) -> AtomicLock:
        """Return the context manager of a section that no restart interrupts. It may be nested.

        Only the hard timeout ends a hang in it.
        """
        return self.atomic_lock.atomic()  # the lock itself: a context manager around it could be interrupted in between

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Suspend the soft and the hard timeout. Exceptions, and faults of other ranks, still restart."""
        self._disable_hang_protection()
        try:
            yield
        finally:
            self._enable_hang_protection()

    def _disable_hang_protection(self) -> None:
        self.monitor_process.disable_timeouts()
        self._sections.freeze()

    def _enable_hang_protection(self) -> None:
        self.progress_watchdog.reset()  # first, or the time that was not counted would count at once
        self._sections.thaw()
        self.monitor_process.enable_timeouts()

    # -- the call ------------------------------------------------------------------------------------------------------

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function` until all ranks have completed it."""

        pid = os.getpid()

        def run() -> Any:
            injected_args, injected_kwargs = inject(function, CallWrapper, self, args, kwargs)
            self._sections.begin(self.state.iteration)
            self._pings = 0
            with children_end_here(), announced_restart_index(self.state.iteration), gloo_outlives_modules():
                try:
                    return function(*injected_args, **injected_kwargs)
                finally:
                    if os.getpid() == pid:
                        self._sections.leave()

        place = self._monitoring.place
        if self._newcomer is not None:
            if not self._monitoring.takes_part:
                _log.warning("the job was completed without this process")
                return None
            self._newcomer.report_joined()
        protocol = RestartProtocol(self.state, self.wrapper, self.wrapper.hooks, self, run, place)
        with excepthook_restored(), interruptible_store_connections(), collected_steps():
            result = protocol.run()
        self.wrapper.hooks.complete(self.state.freeze())
        return result

    def shutdown(self) -> None:
        """Release everything: threads, the monitor process, the store. Idempotent."""
        self._cleanup.close()
        reap_adopted()  # the server of the store

    def __enter__(self) -> CallWrapper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # -- what the protocol uses ----------------------------------------------------------------------------------------

    def iteration_store(self, iteration: int) -> Any:
        """Return the store of an iteration, as hooks get it."""
        return PrefixStore(iteration, self.base_store)

    def agreement(self, iteration: int, world_size: int | None) -> Agreement:
        """Return the agreement of an iteration."""
        return self._monitoring.agreement(iteration, world_size)

    def progress(self) -> dict[str, int]:
        """Return how far the function has come on this rank, by kind; nothing for what it does not report."""
        return {kind: number for kind, number in ((STEP, reported_step()), (PINGS, self._pings)) if number > 0}

    def open_group_store(self) -> None:
        """Open the store for the process groups of this iteration. Waits for the process that is rank 0 in it."""
        settings = self.wrapper
        self._group_store.open(
            self.state.store,
            self._monitoring.local_host,
            serves=self.state.active_rank == 0,
            timeout_s=settings.barrier_timeout.total_seconds(),
            slice_s=settings.progress_watchdog_interval.total_seconds(),
        )

    def close_group_store(self) -> None:
        """Close the store for process groups: the iteration is over."""
        self._group_store.close()

    def stopped_clocks(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the clocks of sections stop, as this process waits by itself."""
        return self._sections.stopped()

    def wake_main_thread(self) -> None:
        """Try to bring a blocked main thread back to bytecode; to be repeated until it is there."""
        self._sections.interrupt()
        self.thrower.interrupter.wake()
        if self.wrapper.hooks.aborts:
            unblock_main_thread(_UNBLOCK_S)

    def forget_iteration(self, iteration: int) -> None:
        """Delete the keys of this iteration, which no process reads any more."""
        iteration_store(self.base_store, iteration).clear()


def _runs_later(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = function if inspect.isroutine(function) else type(function).__call__
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return any(is_of(code) for is_of in kinds)


def inject(
    function: Callable[..., Any], kind: type, value: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for `function`, with `value` for each parameter annotated `kind` or ``Optional[kind]``.

    It replaces what the caller passed. Arguments that do not fit are returned unchanged: the call itself raises the
    error.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that has no signature
        return args, kwargs
    names = [name for name in signature.parameters if _is(_annotations(function, signature).get(name), kind)]
    if not names:
        return args, kwargs
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:
        return args, kwargs
    for name in names:
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        bound.arguments[name] = value
    ordered = {name: bound.arguments[name] for name in signature.parameters if name in bound.arguments}
    bound.arguments = ordered
    return bound.args, bound.kwargs


def _annotations(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Return the annotations; as written, where names in them cannot be resolved."""
    raw = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    try:
        target = inspect.unwrap(function)
        return {**raw, **typing.get_type_hints(target if inspect.isroutine(target) else type(target).__call__)}
    except Exception:
        return raw


def _is(annotation: object, kind: type) -> bool:
    if isinstance(annotation, str):
        names = {part.strip().rpartition(".")[2] for part in annotation.replace("Optional[", "").rstrip("]").split("|")}
        return kind.__name__ in names and names <= {kind.__name__, "None"}
    if annotation is kind:
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = set(typing.get_args(annotation)) - {type(None)}
        return members == {kind}
    return False
