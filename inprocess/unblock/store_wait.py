"""Break the store connection the main thread waits on while it makes a process group: its peers will not come.

`init_process_group` and `new_group` wait in a torch `TCPStore` for the other ranks. That wait cannot be interrupted by
an exception from another thread, but ends at once when its connection breaks.

Cannot be had, and ends at the timeout given to `init_process_group`:
* a store that the caller passed in (`store=`): it may serve others; unless it is that of the iteration;
* attempts to connect to a store that nobody serves (yet), unless `inprocess.unblock.store_connection` is active;
* `FileStore` and `HashStore`, which have no connection.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

from inprocess.unblock.own_sockets import fd_waited_for, peer_port, pinned, shut_down, syscall_of

__all__ = ["allow_break", "break_store_wait", "is_breakable", "main_thread_frame_in_groups"]

_GROUPS = os.path.join("torch", "distributed", "distributed_c10d.py")
_RENDEZVOUS = os.path.join("torch", "distributed", "rendezvous.py")


_allowed: set[int] = set()  # ports of stores that are for one iteration only


def allow_break(port: int) -> Callable[[], None]:
    """Have connections to a store at this port broken wherever the main thread waits on them, until the result is
    called."""
    _allowed.add(port)
    return lambda: _allowed.discard(port)


def is_breakable(port: object) -> bool:
    """Whether the store at this port is for one iteration only."""
    return port in _allowed


def break_store_wait() -> bool:
    """Break the connection the main thread waits on in torch's group creation; return whether there was one.

    Or on a store that is for one iteration only (`allow_break`), anywhere.

    Any thread but the main one; takes less than a millisecond; does not raise. The wait ends with a
    `torch.distributed.DistNetworkError` within 0.1 s.
    """
    if _allowed and _break_waited_for(lambda fd: peer_port(fd) in _allowed):
        return True
    frame = main_thread_frame_in_groups()
    if frame is None or _store_was_passed_in(frame):
        return False
    if frame.f_code.co_name == "_create_c10d_store":
        return _break_connections_to(frame.f_locals.get("port"))
    return _break_waited_for(lambda fd: True)


def _break_waited_for(may: Callable[[int], bool]) -> bool:
    """Break the connection that the main thread waits on in a system call, if `may` says so."""
    task = os.getpid()  # the main thread; what `threading` says of it may be older than a fork
    call = syscall_of(task)
    fd = fd_waited_for(call) if call is not None else None
    if fd is None:
        return False
    with pinned(fd) as copy:
        # Still the same call: so the copy is of what it waits for.
        return copy is not None and syscall_of(task) == call and may(copy) and shut_down(copy)


def main_thread_frame_in_groups() -> FrameType | None:
    """Return the innermost Python frame of the main thread if that is in torch's code that makes groups."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame if frame is not None and frame.f_code.co_filename.endswith((_GROUPS, _RENDEZVOUS)) else None


def _store_was_passed_in(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and frame.f_code.co_filename.endswith(_GROUPS):
            return frame.f_locals.get("init_method") is None  # torch fills it in unless it got a store
        frame = frame.f_back
    groups = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(groups, "_default_pg_init_method", None) is None


def _break_connections_to(port: object) -> bool:
    """Break the connections to this port: all, if the store there is for one iteration, else if there is exactly one.

    The host of a store waits for its clients by asking again and again, so there is no call to look at. With more than
    one connection to another store, one belongs to somebody else, and all are left alone.
    """
    to_port = [fd for fd in _open_fds() if peer_port(fd) == port]
    if len(to_port) != 1 and port not in _allowed:
        return False
    broken = False
    for fd in to_port:
        with pinned(fd) as copy:
            broken |= copy is not None and peer_port(copy) == port and shut_down(copy)
    return broken


def _open_fds() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []
