"""The system calls that threads of this process wait in, and the sockets behind them, read from /proc.

All of it is best effort: what cannot be found out is reported as absent, never as an error. For any thread.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_ESTABLISHED, _CLOSE_WAIT = 1, 8  # include/net/tcp_states.h of Linux


@dataclass(frozen=True)
class _Numbers:
    epoll_wait: frozenset[int]
    receive: frozenset[int]  # read, recvfrom, recvmsg; first argument: the descriptor
    poll: frozenset[int]  # poll, ppoll; first argument: address of struct pollfd[], second: its length
    restarted: int  # restart_syscall: a call that was interrupted goes on under this number, with its own arguments


_NUMBERS = {
    "x86_64": _Numbers(frozenset({232, 281}), frozenset({0, 45, 47}), frozenset({7, 271}), 219),
    "aarch64": _Numbers(frozenset({22}), frozenset({63, 207, 212}), frozenset({73}), 128),
}
_NO_NUMBERS = _Numbers(frozenset(), frozenset(), frozenset(), -1)
_WATCHED = re.compile(r"^tfd:\s*(\d+)\s+events:\s*\w+\s+data:\s*([0-9a-f]+)\s+pos:\s*\S+\s+ino:\s*([0-9a-f]+)", re.M)


@dataclass(frozen=True)
class Syscall:
    """The system call a thread is blocked in. Two equal ones, read one after the other, are the same call."""

    number: int
    arguments: tuple[int, ...]  # six
    stack_pointer: int


@dataclass(frozen=True)
class Watched:
    """A descriptor in an epoll set. `inode` distinguishes a later one with the same number; `data` is the owner's."""

    fd: int
    inode: int
    data: int


def read_text(path: str) -> str:
    """Return the text of a file in /proc or /sys; empty if it does not exist or may not be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def syscall_of(task: int | str) -> Syscall | None:
    """Return what the thread with this native id is blocked in; None if it runs, or if that cannot be known."""
    fields = read_text(f"/proc/self/task/{task}/syscall").split()
    if len(fields) != 9:
        return None
    number, *arguments = (int(field, 0) for field in fields[:7])
    return Syscall(number, tuple(arguments), int(fields[7], 0))


def is_epoll_wait(call: Syscall) -> bool:
    """Return whether the call is `epoll_wait`: its arguments are epoll descriptor, address, events, milliseconds."""
    return call.number in _numbers().epoll_wait


def watched_by(epoll_fd: int) -> list[Watched]:
    """Return what an epoll descriptor watches."""
    rows = _WATCHED.findall(read_text(f"/proc/self/fdinfo/{epoll_fd}"))
    return [Watched(int(fd), int(inode, 16), int(data, 16)) for fd, data, inode in rows]


def fd_waited_for(call: Syscall) -> int | None:
    """Return the one descriptor whose data the call waits for; None if it waits for something else."""
    if call.number in _numbers().receive:
        return call.arguments[0]
    # Of the calls that are restarted, only a poll has 1 as its second argument: the others sleep, or wait on a futex.
    if call.number in {*_numbers().poll, _numbers().restarted} and call.arguments[1] == 1:
        # Through the file, not through the address, which may be unmapped if the thread has ended meanwhile.
        with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
            return int.from_bytes(os.pread(memory.fileno(), 4, call.arguments[0]), sys.byteorder)
    return None


@contextlib.contextmanager
def pinned(fd: int) -> Iterator[int | None]:
    """Duplicate a descriptor, so that other threads cannot close or replace it meanwhile; None if it is closed.

    Compare the properties of the wanted one with the copy, then use the copy.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        yield copy
    finally:
        os.close(copy)


def shut_down(fd: int) -> bool:
    """Shut down an established TCP connection and return True; leave anything else alone."""
    with _tcp_socket(fd) as connection:
        if connection is None:
            return False
        try:
            # A socket that listens, or is still being connected, is in neither state.
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in (_ESTABLISHED, _CLOSE_WAIT):
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
        except OSError:  # the connection ended by itself
            return False


def peer_port(fd: int) -> int | None:
    """Return the port at the other end of a TCP connection; None for anything else."""
    with _tcp_socket(fd) as connection:
        try:
            return None if connection is None else int(connection.getpeername()[1])
        except OSError:
            return None


def listening_address(fd: int) -> tuple[str, int] | None:
    """Return host and port at which a TCP socket listens; None for anything else."""
    with _tcp_socket(fd) as listener:
        try:
            if listener is None or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            host, port = listener.getsockname()[:2]
            return str(host), int(port)
        except OSError:
            return None


@contextlib.contextmanager
def _tcp_socket(fd: int) -> Iterator[socket.socket | None]:
    with pinned(fd) as copy:
        if copy is None or not stat.S_ISSOCK(os.fstat(copy).st_mode):
            yield None
            return
        with socket.socket(fileno=os.dup(copy)) as found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            yield found if is_tcp else None


def _numbers() -> _Numbers:
    return _NUMBERS.get(platform.machine(), _NO_NUMBERS)
