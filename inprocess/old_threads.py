"""Threads that an interrupted iteration has started and not ended: they are named, and get no process group.

Such a thread goes on in the next iteration. A collective that it calls there would be one more collective of this rank:
the others would meet it with one of theirs, and add up numbers that do not belong together. No other thread can end a
thread of Python without harm, so torch is changed for it, in this process, from the end of the iteration on:

    the default group               is not there: `is_initialized()` is False
    a collective with any group     fails, with an error that names the thread and the iteration
    a new group                     fails, too
    a group looked up by its name   also, as functional collectives, DTensor and device meshes do

Not known are threads that such a thread starts later, threads that `threading` does not know, and operations that do
not pass the Python code of torch: methods of a `ProcessGroup` that it gets from the next iteration.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from inprocess.ipc.threads import JoinableThread

__all__ = ["OldThreads"]

_PATIENCE_S = 0.1  # of threads that are ending
_OWN_NAMES = ("ckpt-", "inprocess-", "monitor-")
_HARMLESS = ("tqdm.", "torch._inductor.")  # modules that start one thread for the life of the process
_GROUPS = "torch.distributed.distributed_c10d"
_FUNCTIONAL = "torch.distributed._functional_collectives"
_MESHES = "torch.distributed.device_mesh"
# Functions of torch that all collectives call, all that make groups, or that look groups up by their names.
_ENTRANCES = (
    (_GROUPS, "_rank_not_in_group"),
    (_GROUPS, "_get_default_group"),
    (_GROUPS, "_process_group_name"),
    (_FUNCTIONAL, "_resolve_group"),
    (_FUNCTIONAL, "_resolve_group_name"),  # older torch has only this one
    (_MESHES, "_resolve_process_group"),
)


class OldThreads:
    """Threads of iterations that are over. Main thread, but for what torch calls.

    `begin` when an iteration begins, `end` when it was interrupted and its frames are freed.
    """

    def __init__(self) -> None:
        self._before: set[threading.Thread] = set()
        self._old: dict[threading.Thread, int] = {}
        self._changed = contextlib.ExitStack()

    def begin(self) -> None:
        """Note which threads there are: those that come later belong to the iteration."""
        self._before = set(threading.enumerate())

    def end(self, iteration: int) -> list[str]:
        """Return a description of each thread that the iteration has left running; keep it from process groups.

        Those that are ending just now are waited for, at most 0.1 s.
        """
        deadline = time.monotonic() + _PATIENCE_S
        left = [thread for thread in threading.enumerate() if self._is_of_iteration(thread)]
        for thread in left:
            while thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
                thread.join(min(left_s, 0.01))
        left = [thread for thread in left if thread.is_alive()]
        alive = {thread: number for thread, number in self._old.items() if thread.is_alive()}
        self._old = {**alive, **dict.fromkeys(left, iteration)}  # a new one: other threads may be reading it
        if self._old:
            self._close_entrances()
        return [f"{thread.name!r} ({_function_of(thread)})" for thread in left]

    def close(self) -> None:
        """Leave torch as it was. Idempotent."""
        self._changed.close()

    def _is_of_iteration(self, thread: threading.Thread) -> bool:
        """Return whether the iteration has started the thread, and not this package, or a library that keeps it."""
        if thread in self._before or thread is threading.current_thread():
            return False
        if isinstance(thread, JoinableThread | threading._DummyThread) or thread.name.startswith(_OWN_NAMES):
            return False
        return not _function_of(thread).startswith(_HARMLESS)

    # -- what torch calls ----------------------------------------------------------------------------------------------

    def _iteration_of_caller(self) -> int | None:
        """Return the iteration that has started the calling thread, if that is over. Any thread."""
        ident = threading.get_ident()
        for thread, iteration in self._old.items():
            if thread.ident == ident and thread.is_alive():  # the number of one that has ended is used again
                return iteration
        return None

    def _refuse(self) -> None:
        iteration = self._iteration_of_caller()
        if iteration is not None:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} was started in iteration {iteration}, which is over: it "
                "cannot use process groups any more. End threads before the wrapped function ends (try ... finally)"
            )

    def _close_entrances(self) -> None:
        """Change what of torch is loaded and is not changed yet."""
        for name, function in _ENTRANCES:
            module = sys.modules.get(name)
            original = getattr(module, function, None)
            if module is None or original is None or hasattr(original, "refuses_old_threads"):
                continue
            replacement = self._refusing(original)
            setattr(module, function, replacement)
            self._changed.callback(_put_back, module, function, replacement, original)
        world = getattr(sys.modules.get(_GROUPS), "_World", None)
        default = getattr(world, "default_pg", None)
        if isinstance(default, property) and not hasattr(default.fget, "refuses_old_threads"):
            hidden = self._hiding(default)
            world.default_pg = hidden  # type: ignore[union-attr]
            self._changed.callback(_put_back, world, "default_pg", hidden, default)

    def _refusing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            self._refuse()
            return original(*args, **kwargs)

        function.refuses_old_threads = True  # type: ignore[attr-defined]
        return function

    def _hiding(self, original: property) -> property:
        """Return the property that holds the default group, as old threads see it."""
        read = original.fget
        assert read is not None

        def get(world: Any) -> Any:
            return None if self._iteration_of_caller() is not None else read(world)

        get.refuses_old_threads = True  # type: ignore[attr-defined]
        return property(get, original.fset)


def _put_back(owner: Any, name: str, replacement: Any, original: Any) -> None:
    if vars(owner).get(name) is replacement:  # a later change of other code stays
        setattr(owner, name, original)


def _function_of(thread: threading.Thread) -> str:
    """Return the name of the function that a thread runs."""
    target = getattr(thread, "_target", None) or type(thread).run
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{getattr(target, '__module__', None)}.{name}"
