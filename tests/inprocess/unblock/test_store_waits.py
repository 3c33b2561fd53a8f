"""A rank whose store host never comes can be interrupted; with the host it connects as usual."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from inprocess.main_thread.async_raise import async_raise
from inprocess.unblock.store_waits import interruptible_store_connections
from tests.support import free_port

rendezvous: Any = importlib.import_module(
    "torch.distributed.rendezvous"
)  # torch.distributed has a function of that name


_HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Interrupted(BaseException):
    pass


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def connect(port: int, seconds: float, world_size: int = 2) -> None:
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=world_size, timeout=timeout
    )


def test_an_exception_from_another_thread_gets_through(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.get_ident()
    refused = threading.Event()

    def interrupt() -> None:
        refused.wait(20)
        async_raise(main, Interrupted)

    real = socket.create_connection

    def attempt(*args: object, **kwargs: object) -> socket.socket:
        if refused.is_set():  # from here on no socket is open for the exception to arrive in
            raise ConnectionRefusedError
        try:
            return real(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            refused.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    started = time.monotonic()
    monkeypatch.setattr(socket, "create_connection", attempt)
    with interruptible_store_connections(), pytest.raises(Interrupted):
        connect(port, 60)
    thread.join()
    assert time.monotonic() - started < 10


def test_the_timeout_is_kept_and_torch_reports_it(port: int) -> None:
    started = time.monotonic()
    with interruptible_store_connections(), pytest.raises(dist.DistError):
        connect(port, 0.5)
    assert time.monotonic() - started < 10


def test_a_host_that_is_there_is_connected_to(port: int, no_group: None) -> None:
    host = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    with interruptible_store_connections():
        store, rank, world_size = next(rendezvous.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
    host.set("key", "value")
    assert store.get("key") == b"value"
    assert (rank, world_size) == (1, 2)


def test_a_host_that_is_stopped_blocks_nobody() -> None:
    """The kernel accepts connections for it, and torch waits for its answer without a limit."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)  # all its threads have stopped: the one that answers, too
        timer = threading.Timer(0.5, async_raise, (threading.get_ident(), Interrupted))
        timer.start()
        started = time.monotonic()
        with interruptible_store_connections(), pytest.raises(Interrupted):
            connect(port, 60)
        assert time.monotonic() - started < 10
        timer.join()
        waking = threading.Timer(1.0, child.send_signal, (signal.SIGCONT,))
        waking.start()
        with interruptible_store_connections():
            store, _, _ = next(rendezvous.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
        store.set("key", "value")
        waking.join()
    finally:
        child.kill()
        child.communicate()


def test_it_is_nested_and_removed() -> None:
    original = rendezvous.TCPStore
    with interruptible_store_connections():
        outer = rendezvous.TCPStore
        with interruptible_store_connections():
            assert rendezvous.TCPStore not in (original, outer)
        assert rendezvous.TCPStore is outer
    assert rendezvous.TCPStore is original


def test_a_later_patch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TCPStore", rendezvous.TCPStore)

    def later() -> None: ...

    with interruptible_store_connections():
        rendezvous.TCPStore = later
    assert rendezvous.TCPStore is later
