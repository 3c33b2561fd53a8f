"""The store for the process groups of one iteration: a native store of torch, created anew for each iteration.

The process that the wrapped function sees as rank 0 serves it, at a free port of its node. All ranks get the address
through the coordination store, and set MASTER_ADDR and MASTER_PORT to it: so a plain `init_process_group(backend)`, and
every library that does the same, uses fresh keys after each restart, wherever rank 0 is then. Under torchrun, torch is
told not to use the store of the agent, which keeps the keys of the first iteration.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

from inprocess.coordination.server import listen
from inprocess.exception import StoreTimeoutError
from inprocess.unblock.store_waits import allow_break, connect_store

__all__ = ["GroupStore"]

_ADDRESS = "group_store"
_TIMEOUT = timedelta(seconds=300)
_TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]


class GroupStore:
    """`open` it on all ranks of an iteration, `close` it when the iteration is over."""

    def __init__(self) -> None:
        self._store: Any = None
        self._address: tuple[str, int] | None = None
        self._released: Callable[[], None] = lambda: None

    @property
    def store(self) -> Any:
        """The store; None if it is not open. The first use connects: a function without use for it never does."""
        if self._store is None and self._address is not None:
            host, port = self._address
            arguments = {"host_name": host, "port": port, "is_master": False, "wait_for_workers": False}
            self._store = connect_store(_TCPStore, _TIMEOUT, arguments)
        return self._store

    def open(self, coordination: Any, host: str, *, serves: bool, timeout_s: float, slice_s: float) -> None:
        """Serve the store, or get its address, and set the environment.

        `coordination` is the coordination store of this iteration, `host` the name by which the others reach this
        machine. Waits in slices of `slice_s` for the process that serves it. StoreTimeoutError after `timeout_s`.
        """
        self.close()
        if serves:
            self._store = _serve(host)
            self._address = host, int(self._store.port)
            coordination.set(_ADDRESS, f"{host} {self._address[1]}")
        else:
            self._address = _wait_for_address(coordination, time.monotonic() + timeout_s, slice_s)
        host, port = self._address
        self._released = allow_break(port)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(False)

    def close(self) -> None:
        """Release the store; its server ends with the last process group that uses it. Idempotent."""
        self._released()
        self._released = lambda: None
        self._store = self._address = None


def _serve(host: str) -> Any:
    """Serve a store of torch, at a free port.

    The socket is created here: torch would listen on all interfaces, and for each connection look up the name of the
    IPv6 form of its address, which may take seconds.
    """
    listener = listen(host, 0)
    listener.setblocking(True)
    port = int(listener.getsockname()[1])
    return _TCPStore(
        host_name=host,
        port=port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,  # `init_process_group` of rank 0 also serves a store at MASTER_PORT, and gets this one
        master_listen_fd=listener.detach(),
    )


def _wait_for_address(coordination: Any, deadline: float, slice_s: float) -> tuple[str, int]:
    while True:
        left_s = deadline - time.monotonic()
        try:
            address = coordination.get_within(_ADDRESS, timedelta(seconds=max(0.0, min(slice_s, left_s))))
            break
        except StoreTimeoutError:
            if left_s <= 0:
                raise
    host, port = address.decode().split(" ")
    return host, int(port)
