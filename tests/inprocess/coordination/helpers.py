"""Servers that can be killed, and a relay that breaks connections where the test wants it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from inprocess.coordination import Host

MAIN = Path(__file__).with_name("server_main.py")
REPOSITORY = Path(__file__).resolve().parents[3]
SESSION = "test"


@dataclass(frozen=True)
class State:
    clients: int
    requests: int
    mirrors: int
    active: bool


class ServerProcess:
    """A `StoreServer` in another process."""

    def __init__(self, position: int, session: str = SESSION) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(MAIN), str(position), session],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self.host = Host.from_str(self._read())

    def follow(self, hosts: Sequence[Host]) -> None:
        self._ask(";".join(["follow", *map(str, hosts)]))

    def state(self) -> State:
        clients, requests, mirrors, active = map(int, self._ask("state").split())
        return State(clients, requests, mirrors, bool(active))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        eventually(lambda: psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def server_processes(count: int) -> Iterator[list[ServerProcess]]:
    with contextlib.ExitStack() as stack:
        servers = []
        for position in range(count):
            servers.append(ServerProcess(position))
            stack.callback(servers[-1].close)
        yield servers


def eventually(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for something that another process or thread does, and gives no event for."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


class Relay:
    """Passes connections on to a server. `cut()` breaks all; `swallow_answers` breaks one as soon as it is answered."""

    def __init__(self, target: Host) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = Host(target.position, "127.0.0.1", self._listener.getsockname()[1])
        self.swallow_answers = 0  # how many more answers, after the greeting, never reach the client
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        for pair in self._pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for pair in self._pairs:
            for sock in pair:
                sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._target.name, self._target.port))
                self._pairs.append((client, server))
                for job in (self._requests, self._answers):
                    thread = threading.Thread(target=job, args=(client, server))
                    self._threads.append(thread)
                    thread.start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        greeted = False
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if greeted and self.swallow_answers:
                    self.swallow_answers -= 1
                    break
                greeted = True
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
