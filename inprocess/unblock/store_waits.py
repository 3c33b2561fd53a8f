"""Free a main thread that waits on a store of torch while it makes a process group.

`init_process_group` and `new_group` wait in a `TCPStore` for the other ranks. An exception from another thread cannot
interrupt that wait, but it ends at once when its connection breaks: `break_store_wait`. Before there is a connection,
torch tries to connect inside one C++ call; `interruptible_store_connections` replaces that by attempts in Python.

Not freed, and ended only by the timeout given to `init_process_group`:
* a wait in a store that the caller passed in (`store=`), which may serve others, unless it is that of the iteration;
* attempts to connect to a store that no process serves (yet), unless `interruptible_store_connections` is active;
* a wait in a `FileStore` or `HashStore`, which have no connection.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

from inprocess.bounded_waits import BoundedCall
from inprocess.unblock.own_sockets import fd_waited_for, peer_port, pinned, shut_down, syscall_of

_GROUPS = os.path.join("torch", "distributed", "distributed_c10d.py")
_RENDEZVOUS = os.path.join("torch", "distributed", "rendezvous.py")


_allowed: set[int] = set()  # ports of stores that are for one iteration only


def allow_break(port: int) -> Callable[[], None]:
    """Allow breaking connections to the store at this port wherever the main thread waits on them.

    The function that is returned ends that.
    """
    _allowed.add(port)
    return lambda: _allowed.discard(port)


def is_breakable(port: object) -> bool:
    """Return whether the store at this port is for one iteration only."""
    return port in _allowed


def break_store_wait() -> bool:
    """Break the connection on which the main thread waits in the creation of a group; return whether there was one.

    For a store of one iteration (`allow_break`) also outside the creation of a group.

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
    task = os.getpid()  # the main thread; the id that `threading` knows may be older than a fork
    call = syscall_of(task)
    fd = fd_waited_for(call) if call is not None else None
    if fd is None:
        return False
    with pinned(fd) as copy:
        # Still the same call, so the copy is what it waits for.
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

    The host of a store polls for its clients, so there is no system call to inspect. Of several connections to another
    store, some have another owner, and all are left alone.
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


_ATTEMPT_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


@contextlib.contextmanager
def interruptible_store_connections() -> Iterator[None]:
    """While this is active, `init_process_group` and `rendezvous` wait in Python for a store that is not there yet.

    torch itself retries inside one C++ call, which neither an exception from another thread nor a signal ends before
    the timeout: if the host of the store died at the start, all other ranks would be stuck. Here each attempt runs in
    another thread, and torch connects only when the port accepts connections. Timeouts are unchanged. May be nested;
    imports torch.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous.TCPStore
    replacement = _waiting_first(original)
    rendezvous.TCPStore = replacement
    try:
        yield
    finally:
        if rendezvous.TCPStore is replacement:  # a later patch of other code stays
            rendezvous.TCPStore = original


def _waiting_first(store_class: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        timeout = kwargs.get("timeout")
        if args or not {"host_name", "port", "is_master"} <= kwargs.keys() or not isinstance(timeout, timedelta):
            return store_class(*args, **kwargs)
        if kwargs["is_master"]:
            if is_breakable(kwargs["port"]):  # it is served until the iteration ends: no need to wait for clients
                kwargs["wait_for_workers"] = False
            return store_class(**kwargs)
        return connect_store(store_class, timeout, kwargs)

    return create


def connect_store(store_class: Callable[..., Any], timeout: timedelta, arguments: dict[str, Any]) -> Any:
    """Return a client of a store of torch, in attempts of about a second; the caller can be interrupted at any time.

    The error of torch if there is no such store within `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        _wait_for_listener(arguments["host_name"], arguments["port"], deadline)
        last = deadline - time.monotonic() <= _ATTEMPT_S
        try:
            # torch waits without limit for a server whose process is stopped: the kernel accepts the connection.
            # An interrupted caller leaves the thread behind until that server continues or dies.
            attempt = functools.partial(store_class, **{**arguments, "timeout": timedelta(seconds=_ATTEMPT_S)})
            store = BoundedCall(attempt, "inprocess-store-connection").result(None)
        except RuntimeError:  # closed again, or another kind of server
            if last:
                raise
            time.sleep(_FIRST_PAUSE_S)
            continue
        store.set_timeout(timeout)
        return store


def _wait_for_listener(host: str, port: int, deadline: float) -> bool:
    pause = _FIRST_PAUSE_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=min(left, _ATTEMPT_S)).close()
            return True
        except OSError:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
    return False
