"""Throw an exception into the main thread, at a place where it does no harm.

An exception that another thread sets (`async_raise`) arises in the frame that comes next: in the first line of an
`__exit__`, which then restores nothing, in the middle of an import, or between the acquisition of a lock in `logging`
and the `try` that releases it. So the exception is raised by a signal handler in Python: it runs in the main thread,
between two bytecode instructions, with the frame in which it would raise.

    throwing thread                         main thread
      `throw`: arm, send the signal  ---->    handler: is any frame of the stack protected?
      wait a millisecond                        yes: return; the program goes on
      send the signal again          ---->      no: raise

Protected are imports, the methods that enter and leave contexts, destructors, and the modules in `_MODULES` and those
that the user names. Within an atomic section nothing is raised at all. After a limit the exception is raised in spite
of protected frames, for the program may hang there; which modules it was importing is then noted, because the rest of
a package that is imported by halves has to be removed.

A main thread that several signals in a row find at the same instruction waits in a call that signals interrupt, such
as `Event.wait`. That is where Ctrl-C arises, too: code that waits is made for it, and protects only imports and
destructors, in which Python would drop the exception.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from inprocess.main_thread.async_raise import async_raise, clear_async_raise
from inprocess.main_thread.atomic import AtomicLock
from inprocess.main_thread.signals import MainThreadInterrupter

_log = logging.getLogger(__name__)
_METHODS = frozenset(("__enter__", "__exit__", "__aenter__", "__aexit__"))
_MODULES = frozenset(
    (
        "contextlib",
        "logging",
        "logging.handlers",
        "multiprocessing.resource_tracker",
        "multiprocessing.util",
        "queue",
        "threading",
        "weakref",
        "_weakrefset",
    )
)
_DECORATED = frozenset(("inner", "decorate_context"))  # of `contextlib`: they call the function of the user
_IMPORT_SYSTEM = "<frozen importlib"
_WAITS_AFTER, _WAITS_AFTER_S = 3, 0.02  # signals at one instruction, and the time between the first and the last
_WAITS_UNSEEN_AFTER_S = 0.5  # without signals: other threads run only at a few instructions of a loop


@dataclass
class _Armed:
    """An exception that is to be raised."""

    kind: type[BaseException]
    limit: float
    place: tuple[int, int] = (0, 0)
    since: float = 0.0
    times: int = 0

    def waits(self, frame: FrameType, now: float, after_s: float) -> bool:
        """Return whether the main thread waits: the last signals have found it at this instruction."""
        place = (id(frame), frame.f_lasti)
        if place != self.place:
            self.place, self.since, self.times = place, now, 0
        self.times += 1
        return self.times >= _WAITS_AFTER and now - self.since >= after_s


class MainThreadThrower:
    """Throws exceptions into the main thread, at most one at a time. Made by the main thread.

    `in_atomic_section` says, in the main thread, whether nothing may be raised now. `modules` are names of modules,
    with all that is in these packages, whose functions are not interrupted either. The search for protected frames ends
    at a frame that executes `outermost`.
    """

    def __init__(
        self,
        in_atomic_section: Callable[[], bool] = lambda: False,
        modules: Iterable[str] = (),
        outermost: CodeType | None = None,
    ) -> None:
        self.interrupter = MainThreadInterrupter(self._raise)
        self.forced_at: str | None = None
        self.interrupted_imports: list[str] = []
        self.waits_after_s = _WAITS_AFTER_S
        self._in_atomic_section = in_atomic_section
        self._modules = tuple(modules)
        self._outermost = outermost
        self._main_thread = threading.get_ident()
        self._armed: _Armed | None = None

    def throw(self, kind: type[BaseException], limit_s: float) -> None:
        """Raise `kind()` in the main thread soon, in a protected frame only after `limit_s`. Any other thread.

        Call `again` until it was raised. It replaces one that was thrown before and was not raised.
        """
        self._armed = _Armed(kind, time.monotonic() + limit_s)
        self.again()

    def again(self) -> None:
        """Send the signal again, if the exception was not raised yet."""
        armed = self._armed
        if armed is None:
            return
        if self.interrupter.reaches_main_thread():
            self.interrupter.wake()
        elif not self._is_protected_now(armed):
            self._armed = None
            async_raise(self._main_thread, armed.kind)

    def _is_protected_now(self, armed: _Armed) -> bool:
        """Return whether a frame is protected, as it is seen from here, without a signal; it may leave it meanwhile."""
        frame, now = sys._current_frames().get(self._main_thread), time.monotonic()
        if frame is None or now >= armed.limit:
            return False
        is_waiting = armed.waits(frame, now, max(self.waits_after_s, _WAITS_UNSEEN_AFTER_S))
        return self._protected(frame, is_waiting) is not None

    @property
    def is_pending(self) -> bool:
        """Whether an exception was thrown that is not raised yet."""
        return self._armed is not None

    def disarm(self) -> None:
        """Take back what was thrown and is not raised yet. Main thread.

        It may still be raised on the way into this method, but not after it has returned.
        """
        self._armed = None
        clear_async_raise(self._main_thread)

    def _raise(self, frame: FrameType | None) -> None:
        """Raise the exception unless a frame is protected. The signal handler."""
        armed = self._armed
        if armed is None or frame is None or self._in_atomic_section():
            return
        now = time.monotonic()
        place = self._protected(frame, is_waiting=armed.waits(frame, now, self.waits_after_s))
        if place is not None:
            if now < armed.limit:
                return
            self.forced_at = place
            self.interrupted_imports += _importing(frame, self._outermost)
        self._armed = None
        raise armed.kind

    def _protected(self, frame: FrameType, is_waiting: bool) -> str | None:
        """Return where a protected frame is; None if there is none."""
        each: FrameType | None = frame
        while each is not None and each.f_code is not self._outermost:
            code = each.f_code
            always = code.co_name == "__del__" or code.co_filename.startswith(_IMPORT_SYSTEM)
            if always or (not is_waiting and self._is_protected(each)):
                return f"{code.co_filename}:{each.f_lineno} in {code.co_qualname}"
            each = each.f_back
        return None

    def _is_protected(self, frame: FrameType) -> bool:
        name = frame.f_code.co_name
        if name in _METHODS:
            return frame.f_code is not AtomicLock.__enter__.__code__  # which waits, and is made for it
        module = frame.f_globals.get("__name__")
        if not isinstance(module, str):
            return False
        if module in _MODULES:
            return name not in _DECORATED
        return any(module == named or module.startswith(f"{named}.") for named in self._modules)

    def __enter__(self) -> MainThreadThrower:
        self.interrupter.install()
        return self

    def __exit__(self, *error: object) -> None:
        self._armed = None
        self.interrupter.uninstall()


def _importing(frame: FrameType | None, outermost: CodeType | None) -> list[str]:
    """Return the names of the modules that are being imported in these frames, the innermost first."""
    found = []
    while frame is not None and frame.f_code is not outermost:
        if _finds_and_loads(frame):
            found.append(str(frame.f_locals.get("name")))
        frame = frame.f_back
    return found


def _finds_and_loads(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_IMPORT_SYSTEM) and frame.f_code.co_name == "_find_and_load"


def failed_imports(error: BaseException) -> list[str]:
    """Return the names of the modules whose import this exception has ended, such as one of a signal handler.

    The import system removes its own frames from most tracebacks, and not those of the modules.
    """
    names = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if _finds_and_loads(frame):
            names.append(str(frame.f_locals.get("name")))
        elif frame.f_code.co_name == "<module>":  # so is code that `exec` runs; its module is still there
            names.append(str(frame.f_globals.get("__name__")))
    return [name for name in dict.fromkeys(names) if name not in sys.modules]


def discard_imports(names: Iterable[str]) -> list[str]:
    """Remove modules whose import was interrupted, with all that was imported of them; return the names removed.

    The import system removes a module whose import fails, and not the modules in it that are complete. They would be
    found by the next import, and not be attributes of the new package.
    """
    interrupted = tuple(names)
    removed = [
        module
        for module in list(sys.modules)
        if any(module == name or module.startswith(f"{name}.") for name in interrupted)
    ]
    for module in removed:
        sys.modules.pop(module, None)
    for name, registry in _REGISTRIES.items():
        if name in sys.modules:
            _unregister(registry(sys.modules[name]), frozenset(removed))
    return removed


def _unregister(registry: dict[Any, Any], removed: frozenset[str]) -> None:
    for key, registered in list(registry.items()):
        if getattr(registered, "__module__", None) in removed:
            del registry[key]


# Modules that refuse what is registered again, when the import of the module that registers it is done again.
_REGISTRIES: dict[str, Callable[[Any], dict[Any, Any]]] = {
    "torch.compiler._cache": lambda cache: getattr(getattr(cache, "CacheArtifactFactory", None), "_artifact_types", {}),
}
