"""Locks that an interrupted function has left locked.

A function that is interrupted between the acquisition of a lock and the `try` that releases it leaves it locked, and
the next iteration waits for it. The wrapper interrupts no function of `queue` and `threading`, if it can; handlers of
signals of the program raise exceptions anywhere. So after an iteration these locks are released:

* those of the handlers of `logging`, and the one of its module; the one of the import system, which it holds for
  moments only, so that other threads can import;
* of what the frames of the interrupted function refer to, also by one attribute: locks that know their owner (RLock,
  and the locks of `multiprocessing`), and the inner locks of objects of the standard library (`queue.Queue`,
  `Condition`, `Event`, `Semaphore`, ...), which no thread holds longer than for a moment.

A plain `Lock` does not know its owner, and another thread may hold it for long. One that was left locked stays so.

Locks that the caller of the wrapped function holds around the call are not torn. So those that know their owner are
looked for before the call, and are released only as often as the function has acquired them since.
"""

from __future__ import annotations

import _imp
import contextlib
import gc
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from inprocess.ipc.suspension import Silence
from inprocess.process_state import causes_of

__all__ = [
    "HeldLock",
    "TornLock",
    "held_locks",
    "release_import_lock",
    "release_logging_locks",
    "release_torn_locks",
    "used_locks",
]

_RLOCK, _LOCK = type(threading.RLock()), type(threading.Lock())
_INNER = {"mutex", "_lock", "_cond", "not_empty", "not_full", "all_tasks_done", "_rlock", "_wlock", "_notempty"}
_LIBRARIES = ("queue", "threading", "multiprocessing.queues", "multiprocessing.synchronize")
_PATIENCE_S = 2.0  # for a plain lock: the thread that holds it may wait for a processor
_SLICE_S = 0.05


@dataclass(frozen=True)
class TornLock:
    """A lock that the interrupted function used. `owner` names the object that it is of."""

    owner: str
    lock: Any


@dataclass(frozen=True)
class HeldLock:
    """A lock that the calling thread held before the function was called, `count` times."""

    lock: Any
    count: int


def held_locks() -> list[HeldLock]:
    """Return the locks that the calling thread holds, of those that know their owner.

    Takes some ten milliseconds: it looks at all objects of the garbage collector, except those that are frozen.
    """
    synchronize = sys.modules.get("multiprocessing.synchronize")
    kinds = (_RLOCK,) if synchronize is None else (_RLOCK, synchronize.SemLock)
    locks = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return [HeldLock(lock, count) for lock in locks if (count := _own_count(lock))]


def release_logging_locks(held: Sequence[HeldLock] = ()) -> int:
    """Release the locks of `logging` that the calling thread holds, and return how many they were.

    Those that are `held` by the caller stay so. Main thread, when no function of `logging` is on its stack: it was
    interrupted in one.
    """
    handlers = [reference() for reference in list(logging._handlerList)]  # type: ignore[attr-defined]
    locks = [logging._lock, *(handler.lock for handler in handlers if handler is not None)]  # type: ignore[attr-defined]
    return sum(_release_own(lock, held) for lock in locks if lock is not None)


def release_import_lock() -> bool:
    """Release the lock of the import system if the calling thread holds it, outside of all its functions."""
    found = False
    with contextlib.suppress(RuntimeError):  # another thread holds it, or none
        while _imp.lock_held():
            _imp.release_lock()
            found = True
    return found


def used_locks(error: BaseException) -> list[TornLock]:
    """Return the locks that the frames which raised `error`, and its causes, may have left locked.

    To be called before their local variables are freed.
    """
    found: dict[int, TornLock] = {}
    for each in causes_of(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            for value in _objects_of(frame):
                found.update((id(lock.lock), lock) for lock in _locks_of(value))
    return list(found.values())


def release_torn_locks(locks: list[TornLock], held: Sequence[HeldLock] = ()) -> list[str]:
    """Release those that the dead function holds; return the names of their owners. Main thread, outside of them.

    Those that are `held` by the caller stay so. A plain lock that is locked is waited for, at most 2 s: one that no
    other thread releases meanwhile is released.
    """
    return [each.owner for each in locks if _release_own(each.lock, held) or _release_plain(each.lock)]


def _objects_of(frame: FrameType) -> Iterator[Any]:
    """Return the objects to which a frame refers, and their attributes.

    `f_locals` would make a copy of the variables, which lives as long as the frame and its traceback.
    """
    named = [frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals]
    for value in (*gc.get_referents(frame), *named):
        kind = type(value)  # `isinstance` would ask the object, which may be a proxy of one that is dead
        if issubclass(kind, ModuleType | type | FunctionType | CodeType | dict):
            continue
        yield value
        if kind.__name__ == "cell":  # a variable of the function around it
            yield from gc.get_referents(value)
            continue
        attributes: Any = None
        with contextlib.suppress(Exception):  # a proxy's may be computed, and fail
            attributes = object.__getattribute__(value, "__dict__")
        if type(attributes) is dict:
            yield from list(attributes.values())


def _locks_of(value: Any, is_inner: bool = False) -> Iterator[TornLock]:
    """Return the lock, or the locks in an object of the standard library.

    A `Condition` of the program may have a plain lock of the program, which another thread may hold for long. So may a
    thread: that of the library has no inner locks.
    """
    kind = type(value)
    owner = f"{kind.__module__}.{kind.__qualname__}"
    if kind is _RLOCK:
        yield TornLock(owner, value)
    if issubclass(kind, threading.Thread) or not any(base.__module__ in _LIBRARIES for base in kind.__mro__):
        return
    attributes = vars(value)
    if "_semlock" in attributes:
        yield TornLock(owner, value)
    for name in _INNER & attributes.keys():
        inner = attributes[name]
        if isinstance(inner, _RLOCK) or (isinstance(inner, _LOCK) and (is_inner or kind is not threading.Condition)):
            yield TornLock(owner, inner)
        else:
            yield from (TornLock(owner, lock.lock) for lock in _locks_of(inner, is_inner=True))


def _own_count(lock: Any) -> int:
    """Return how often the calling thread holds a lock; 0 for one that does not know its owner."""
    if hasattr(lock, "_semlock"):
        return int(lock._semlock._count()) if lock._semlock._is_mine() else 0
    if not hasattr(lock, "_is_owned") or not lock._is_owned():
        return 0
    count = re.search(r"count=(\d+)", repr(lock))  # an RLock tells it in no other way in all versions of Python
    return 1 if count is None else int(count[1])


def _release_own(lock: Any, held: Sequence[HeldLock]) -> int:
    """Release a lock that knows its owner, if that is the calling thread; return how often."""
    before = next((each.count for each in held if each.lock is lock), 0)
    released = max(0, _own_count(lock) - before)
    for _ in range(released):
        lock.release()
    return released


def _release_plain(lock: Any) -> bool:
    if not isinstance(lock, _LOCK) or not lock.locked():
        return False
    waited = Silence(_PATIENCE_S)  # a suspension of this process suspends the thread that holds it, too
    while waited.seconds() < _PATIENCE_S:
        waited.expect(_SLICE_S)
        if lock.acquire(timeout=_SLICE_S):
            lock.release()
            return False
    lock.release()
    return True
