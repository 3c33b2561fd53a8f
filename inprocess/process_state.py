"""State of the process that outlives an iteration, or must not: globals of libraries, forked children, hooks, the heap.

Libraries such as accelerate are told once per process who is rank 0, how many ranks there are, and which groups they
have. After a restart that is no longer true, and the wrapped function cannot know. A library that keeps such state and
is not in `_RESETS` is reset by the user, in a hook.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

__all__ = [
    "causes_of",
    "children_end_here",
    "excepthook_restored",
    "frozen_heap",
    "handler_errors_logged",
    "release_frames",
    "reset_libraries",
]

_log = logging.getLogger(__name__)
_KILL_S = 5.0
_MOST_COLLECTIONS = 3  # destructors may make new garbage


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, those that caused it, and those in groups, each once."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions


def release_frames(error: BaseException) -> None:
    """Free the local variables of the frames that raised `error`, and of its causes; then collect the garbage.

    Main thread, while the monitor process still reports that this rank is alive: destructors may take seconds. The
    traceback keeps its lines, so it can be printed. Frames are cleared before the collection because objects that the
    collector frees may find what they need for it freed already: the iterator of a DataLoader then waits 5 s for each
    of its workers.
    """
    for each in causes_of(error):
        traceback.clear_frames(each.__traceback__)
    for _ in range(_MOST_COLLECTIONS):
        if not gc.collect():
            break


def reset_libraries() -> None:
    """Reset the loaded libraries after an iteration has ended.

    Main thread, between two iterations, when no process group is left and RANK and WORLD_SIZE are those of the next
    one. Imports nothing. Does not raise; errors are logged.
    """
    for name, reset in _RESETS.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            reset(module)
        except Exception:
            _log.exception("the state of %s cannot be reset; it may use the ranks of the previous iteration", name)


def _reset_device_meshes(device_mesh: Any) -> None:
    """Remove meshes whose `with` block was interrupted while it was entered: they would stay the current one."""
    device_mesh._mesh_resources.mesh_stack.clear()


def _reset_dtensor_caches(api: Any) -> None:
    """Clear the plans, which are looked up by the shape of a mesh: they refer to the old mesh and its groups."""
    cached = api.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    cached.cache_clear() if hasattr(cached, "cache_clear") else cached.cache.cache_clear()
    getattr(sys.modules["torch._C"], "_clear_DTensor_sharding_propagator_cache", lambda: None)()  # newer torch


def _reset_dtensor_random(random: Any) -> None:
    """Drop the tracker of random numbers, which belongs to the old mesh; a new one is created on demand."""
    random._rng_tracker = None


def _end_checkpoint_process(executor: Any) -> None:
    """Kill the process of `async_save`, which has groups with the processes of the old ranks; the next save starts one.

    A save that it has not ended belongs to the old iteration, and fails. Another thread may just be waiting for the
    process to start, and then keep it for the next iterations.
    """
    starting = [
        frame.f_locals["self"]
        for innermost in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(innermost)
        if frame.f_code is executor._AsyncCheckpointProcess.__init__.__code__
    ]
    kept, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    for each in (*starting, kept):
        process = getattr(each, "_save_process", None)
        if process is not None:
            process.kill()
            process.join(_KILL_S)  # its destructor would wait for it to end by itself


def _reset_megatron(parallel_state: Any) -> None:
    """Forget the groups, their sizes and the schedule of microbatches, which are initialized only if there are none."""
    parallel_state.destroy_model_parallel()
    microbatches = sys.modules.get("megatron.core.num_microbatches_calculator")
    if microbatches is not None:
        microbatches.destroy_num_microbatches_calculator()


def _reset_accelerate(state: Any) -> None:
    """Reset the three singletons, from which a new `Accelerator` would take the old rank, device and world size."""
    state.GradientState._reset_state()
    state.AcceleratorState._reset_state(reset_partial_state=True)


def _reset_lightning(rank_zero: Any) -> None:
    """Set the rank that decides who logs and saves; a `Trainer` sets it only when it begins to run."""
    rank_zero.rank_zero_only.rank = int(os.environ.get("RANK", "0"))


_RESETS: dict[str, Callable[[Any], None]] = {
    "torch.distributed.device_mesh": _reset_device_meshes,
    "torch.distributed.tensor._api": _reset_dtensor_caches,
    "torch.distributed.tensor._random": _reset_dtensor_random,
    "torch.distributed.checkpoint._async_process_executor": _end_checkpoint_process,
    "megatron.core.parallel_state": _reset_megatron,
    "accelerate.state": _reset_accelerate,
    "lightning.fabric.utilities.rank_zero": _reset_lightning,
    "lightning_fabric.utilities.rank_zero": _reset_lightning,
}


@contextlib.contextmanager
def children_end_here() -> Iterator[None]:
    """Make a child that the body forks end when it leaves the body, as at the end of a program.

    It is no rank, and must not act in the name of its parent.
    """
    pid = os.getpid()
    code = 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == pid:
            raise
        code = _exit_code(error)
    if os.getpid() != pid:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code of the interpreter after this error; print what it would print."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


@contextlib.contextmanager
def excepthook_restored() -> Iterator[None]:
    """Restore the hook for uncaught exceptions, which torch wraps again whenever it creates a process group."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collections.

    Each restart collects all garbage; scanning the objects of torch and of other libraries would take most of its time.
    """
    if gc.get_freeze_count():  # the user has frozen it
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def handler_errors_logged() -> Iterator[None]:
    """Log errors that signal handlers of the program raise meanwhile. Main thread.

    For code that an error would break, such as a restart: PyTorch's handler of SIGCHLD raises one for each worker of a
    DataLoader that was killed. Other exceptions, such as KeyboardInterrupt, are raised.
    """
    replaced: dict[signal.Signals, tuple[Any, Any]] = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            held = _logs_errors(handler)
            replaced[number] = handler, held
            signal.signal(number, held)
    try:
        yield
    finally:
        for number, (handler, held) in replaced.items():
            if signal.getsignal(number) is held:  # else a hook has set another one
                signal.signal(number, handler)


def _logs_errors(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], None]:
    def held(number: int, frame: Any) -> None:
        try:
            handler(number, frame)
        except Exception:
            _log.exception("the handler of signal %d failed during a restart", number)

    return held
