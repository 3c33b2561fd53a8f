"""How a rank fails, here and now, on its main thread."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from tests.inprocess.faults.matrix import Kind

_FOREVER_S = 10_000
EXIT_CODE = 7


class Fault(Exception):
    """An ordinary failure."""


class BaseFault(BaseException):
    """A failure that is not one of the function."""


def strike(kind: Kind, pidfile: Path) -> None:
    """Fail. `pidfile` is where the monitor process of this rank has written its pid.

    Returns only from the death of the monitor process. Not for GLOO_HANG, which needs a process group.
    """
    match kind:
        case Kind.EXCEPTION:
            raise Fault("injected")
        case Kind.BASE_EXCEPTION:
            raise BaseFault("injected")
        case Kind.SYSTEM_EXIT:
            raise SystemExit(EXIT_CODE)
        case Kind.SIGKILL | Kind.SIGTERM | Kind.SIGSTOP:
            os.kill(os.getpid(), getattr(signal, kind.name))
        case Kind.HANG:
            time.sleep(_FOREVER_S)
        case Kind.C_HANG:
            _lock_twice(ctypes.CDLL(None))
        case Kind.GIL_HANG:
            _lock_twice(ctypes.PyDLL(None))
        case Kind.OS_EXIT:
            os._exit(EXIT_CODE)
        case Kind.SEGFAULT:
            ctypes.string_at(0)
        case Kind.MONITOR_KILLED:
            kill_monitor(pidfile)
        case Kind.BOTH_KILLED:
            kill_monitor(pidfile)
            os.kill(os.getpid(), signal.SIGKILL)
        case Kind.GLOO_HANG:
            raise AssertionError("needs a process group")


def kill_monitor(pidfile: Path) -> None:
    """Kill a monitor process."""
    os.kill(int(pidfile.read_text()), signal.SIGKILL)


def _lock_twice(libc: ctypes.CDLL) -> None:
    """Wait for a mutex of our own: unlike most waits in C, that one does not end with a signal."""
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
