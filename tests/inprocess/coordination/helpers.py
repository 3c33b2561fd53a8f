"""A relay that breaks connections where the test wants it, and waits for what gives no event."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inprocess.coordination import Access
from inprocess.coordination.wire import FrameReader, Op, encode, proof
from inprocess.exception import StoreError
from inprocess.ipc.proofs import fresh_nonce


def eventually(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for something that another process or thread does, and gives no event for."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def check_that_a_forked_child_cannot_use(client: Any) -> None:
    """A request of a child ends with an error that says so, and is not done; closing there harms nobody."""
    client.set("key", "x")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.set("key", "of the child")
        except StoreError as error:
            os.write(writer, str(error).encode())
        finally:
            client.close()
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as said:
        assert "was forked" in said.read()
    assert client.get("key") == b"x"


_GREETINGS = 2  # what a server sends before it answers requests


class Relay:
    """Passes connections on to a server. `cut()` breaks all; `swallow_answers` breaks one as soon as it is answered."""

    def __init__(self, target: Access) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.access = replace(target, port=self._listener.getsockname()[1])
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
                server = socket.create_connection((self._target.host, self._target.port))
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
        received = 0
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                received += 1
                if received > _GREETINGS and self.swallow_answers:
                    self.swallow_answers -= 1
                    break
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def greeted(access: Access) -> socket.socket:
    """A connection that has proved that it knows the secret."""
    sock = socket.create_connection((access.host, access.port), timeout=20)
    reader = FrameReader()
    reader.feed(sock.recv(1000))
    (challenge,) = reader.frames()
    nonce = fresh_nonce()
    sock.sendall(encode(Op.HELLO, 0, b"me", nonce, proof(access, b"client", challenge.fields[1], nonce, b"me")))
    assert sock.recv(1000)
    return sock
