"""What the ranks of the abort tests share: a store beside the groups, a thread that aborts, a look at what is left."""

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from inprocess.state import FrozenState
from inprocess.unblock.own_sockets import syscall_of

WAIT = timedelta(seconds=30)


def state(iteration: int = 0) -> FrozenState:
    return FrozenState(rank=int(os.environ.get("RANK", "0")), world_size=1, iteration=iteration)


class Meeting:
    """Lets ranks meet outside all process groups, over a connection that no abort may touch."""

    def __init__(self, rank: int, world_size: int) -> None:
        from torch.distributed import TCPStore

        port = int(os.environ["MASTER_PORT"])
        self.store = TCPStore("127.0.0.1", port, None, rank == 0, WAIT, wait_for_workers=False)
        self.rank = rank
        self.world_size = world_size

    def meet(self, name: str) -> None:
        """Wait for all ranks. Rank 0, which has the store, returns last: it may end at once."""
        if self.store.add(f"meet/{name}", 1) == self.world_size:
            self.store.set(f"met/{name}", "")
        self.store.wait([f"met/{name}"])
        if self.world_size == 1:
            return
        if self.rank == 0:
            self.store.wait([f"left/{name}"])
        elif self.store.add(f"leave/{name}", 1) == self.world_size - 1:
            self.store.set(f"left/{name}", "")


class AborterThread:
    """Calls `abort` on another thread once the main thread is blocked in a system call.

    And once the file `after` is there. Or once `join` is called: another rank's abort may have been earlier.
    """

    def __init__(self, abort: Callable[[], Any], after: str | None = None) -> None:
        self.called_at = 0.0
        self.result: Any = None
        self._abort = abort
        self._after = after
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> float:
        """Wait for the end of the abort; return the seconds from its start to this call; negative if it came first."""
        freed_at = time.monotonic()
        self._joined.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        return freed_at - self.called_at

    def _run(self) -> None:
        deadline = time.monotonic() + 20
        previous = None
        while time.monotonic() < deadline:
            call = syscall_of(os.getpid())  # the number of the main thread, too
            if call is not None and call == previous:  # twice the same one, 10 ms apart
                break
            previous = call
            if self._joined.wait(0.01):
                break
        while self._after is not None and not os.path.exists(self._after) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.called_at = time.monotonic()
        self.result = self._abort()


class OtherConnection:
    """A TCP connection of the user's, over IPv6 where there is such, watched by an event loop."""

    def __init__(self) -> None:
        import select

        family, host = (socket.AF_INET6, "::1") if _has_ipv6() else (socket.AF_INET, "127.0.0.1")
        self.listener = socket.create_server((host, 0), family=family)
        self.client = socket.create_connection(self.listener.getsockname()[:2])
        self.server, _ = self.listener.accept()
        self.poll = select.epoll()
        for end in (self.listener, self.client, self.server):
            self.poll.register(end)

    def check(self) -> None:
        self.client.sendall(b"x")
        assert self.server.recv(1) == b"x"
        with socket.create_connection(self.listener.getsockname()[:2]):
            self.listener.accept()[0].close()

    def close(self) -> None:
        self.poll.close()
        for end in (self.listener, self.client, self.server):
            end.close()


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def holdings() -> tuple[int, int]:
    """Descriptors and threads, those of C++ included, of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled_holdings(wanted: tuple[int, int], timeout: float = 5.0) -> tuple[int, int]:
    """`holdings`, as soon as they are at most the wanted ones: threads need a moment to end."""
    deadline = time.monotonic() + timeout
    while True:
        now = holdings()
        if (now[0] <= wanted[0] and now[1] <= wanted[1]) or time.monotonic() > deadline:
            return now
        time.sleep(0.01)
