"""Break the connections of gloo, and no others, so that a collective whose peer has died ends at once.

Gloo has no abort: such a collective lasts until the timeout of its group. But one whose connection breaks ends with an
error, and connections can be broken from this side. The task is to find out which sockets belong to gloo. Nothing is
recorded beforehand; the kernel is asked at the moment of the abort:

    thread of gloo --syscall--> epoll_wait(epoll descriptor) --fdinfo--> sockets of one group, with their inodes

Every group runs one such thread, which watches the sockets of that group and no others. So all groups are found,
however and on whichever thread they were made (`new_group`, device meshes, lazy connections, gloo beside NCCL), also
while they are being made, and never a socket of the user, of Python or of a store. This holds for the TCP and TLS
transports, over IPv4 and IPv6.

Not ended before the timeout of the group:
* without `gloo_waits`, a `recv` from any source, and transfers that are under way: gloo does not tell these;
* everything where /proc does not show system calls and epoll sets: other systems, some sandboxes, processors other
  than x86-64 and arm64.

While a group is being made, a rank may also wait for a peer that never connects. Gloo connects to one half of its peers
itself; the other half connects to it and states by a sequence number, eight bytes, which of the awaited connections
this is. The numbers of a group of n ranks are 0 to n-1. A peer that died after it gave its address leaves such a wait
behind, with no connection to break. So this process connects to itself in the place of the peer and closes the
connection; gloo reports a peer that closed. Numbers that gloo does not wait for do no harm: it keeps such a connection
until the group ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from inprocess.unblock.own_sockets import (
    Watched,
    is_epoll_wait,
    listening_address,
    pinned,
    read_text,
    shut_down,
    syscall_of,
    watched_by,
)
from inprocess.unblock.store_waits import main_thread_frame_in_groups

_THREAD_NAME = "gloo_tcp_loop"
_LOOP_ARGUMENTS = (64, 10)  # events and milliseconds of gloo's epoll_wait: older torch gives the thread no name
_RETRY_S = 0.001


def break_gloo_connections(timeout: float = 0.25) -> int:
    """Shut down every established connection of every gloo group in this process; return how many.

    Operations that wait on them, on any thread, end with a RuntimeError within milliseconds, and so does later use of
    these groups. Listening sockets are left alone, because gloo ends the process if one breaks; so are sockets that are
    just being connected: call again for these. Takes a few milliseconds on any thread, at most about `timeout` seconds
    while gloo is too busy to be inspected. Does not raise.
    """
    deadline = time.monotonic() + timeout
    done: set[str] = set()
    broken = 0
    while True:
        loops = _loops()
        for task, epoll_fd in loops.items():
            if epoll_fd is not None and task not in done:
                done.add(task)
                broken += _shut_down_all(epoll_fd)
        if loops.keys() <= done or time.monotonic() > deadline:
            return broken
        time.sleep(_RETRY_S)


def _listening_sockets() -> list[tuple[str, int]]:
    """Return the addresses at which the gloo groups of this process wait for connections."""
    addresses = []
    for epoll_fd in _loops().values():
        for one in _watched_by_gloo(epoll_fd) if epoll_fd is not None else []:
            with pinned(one.fd) as copy:
                if copy is not None and os.fstat(copy).st_ino == one.inode:
                    address = listening_address(copy)
                    addresses += [] if address is None else [address]
    return addresses


def _loops() -> dict[str, int | None]:
    """Return the threads of gloo with the epoll descriptor each waits on; None for one that is busy just now."""
    loops: dict[str, int | None] = {}
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            named = read_text(f"/proc/self/task/{task}/comm").strip() == _THREAD_NAME
            call = syscall_of(task)
            if call is not None and is_epoll_wait(call) and (named or call.arguments[2:4] == _LOOP_ARGUMENTS):
                loops[task] = call.arguments[0]
            elif named:
                loops[task] = None
    return loops


def _shut_down_all(epoll_fd: int) -> int:
    broken = 0
    for one in _watched_by_gloo(epoll_fd):
        with pinned(one.fd) as copy:
            if copy is not None and os.fstat(copy).st_ino == one.inode:
                broken += shut_down(copy)
    return broken


def _watched_by_gloo(epoll_fd: int) -> list[Watched]:
    watched = watched_by(epoll_fd)
    # Gloo keeps a pointer with each descriptor; a loop that keeps the descriptor itself is not of gloo.
    return [] if any(one.data & 0xFFFFFFFF == one.fd for one in watched) else watched


_PLAIN_TRANSPORTS = ("", "TCP")


def connect_as_missing_peers(timeout: float = 0.25) -> int:
    """Connect in the place of missing peers while the main thread creates a gloo group; return how many times.

    Does nothing while the main thread is elsewhere, or with the TLS transport, which authenticates peers.
    Any thread but the main one, at most about `timeout` seconds; does not raise.
    """
    frame = main_thread_frame_in_groups()
    size = None if frame is None else frame.f_locals.get("group_size")
    if not isinstance(size, int) or os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() not in _PLAIN_TRANSPORTS:
        return 0
    deadline = time.monotonic() + timeout
    answered = 0
    for listener in _listening_sockets():
        for number in range(size):
            if time.monotonic() > deadline:
                return answered
            answered += _connect_as(number, listener)
    return answered


def _connect_as(number: int, listener: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(listener, timeout=0.1) as connection:
            connection.sendall(number.to_bytes(8, sys.byteorder))
            return True
    except OSError:  # the group has ended
        return False
