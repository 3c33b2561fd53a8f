"""Make a rank interruptible while it waits for the host of torch's store to appear."""

from __future__ import annotations

import contextlib
import importlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

__all__ = ["interruptible_store_connections"]

_ATTEMPT_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


@contextlib.contextmanager
def interruptible_store_connections() -> Iterator[None]:
    """While this is active, `init_process_group` and `rendezvous` wait in Python for a store that is not there yet.

    torch itself tries to connect again and again inside one C++ call, which no exception from another thread and no
    signal gets out of before the timeout; so when the host of the store dies at the start, all others would be stuck.
    Here the attempts are made one by one, and only when somebody listens does torch connect. Timeouts stay what they
    are. May be nested; imports torch.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous.TCPStore
    replacement = _waiting_first(original)
    rendezvous.TCPStore = replacement
    try:
        yield
    finally:
        if rendezvous.TCPStore is replacement:  # somebody else's later patch stays
            rendezvous.TCPStore = original


def _waiting_first(store_class: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        timeout = kwargs.get("timeout")
        is_known_client = kwargs.get("is_master") is False and {"host_name", "port"} <= kwargs.keys()
        if is_known_client and isinstance(timeout, timedelta):
            deadline = time.monotonic() + timeout.total_seconds()
            if not _wait_for_listener(kwargs["host_name"], kwargs["port"], deadline):
                kwargs["timeout"] = timedelta(seconds=_ATTEMPT_S)  # torch reports the failure in its own words
        return store_class(*args, **kwargs)

    return create


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
