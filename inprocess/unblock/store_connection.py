"""Make a rank interruptible while it waits for the host of torch's store to appear."""

from __future__ import annotations

import contextlib
import functools
import importlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from inprocess.bounded_call import BoundedCall
from inprocess.unblock.store_wait import is_breakable

__all__ = ["connect_store", "interruptible_store_connections"]

_ATTEMPT_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


@contextlib.contextmanager
def interruptible_store_connections() -> Iterator[None]:
    """While this is active, `init_process_group` and `rendezvous` wait in Python for a store that is not there yet.

    torch itself tries to connect again and again inside one C++ call, which no exception from another thread and no
    signal gets out of before the timeout; so when the host of the store dies at the start, all others would be stuck.
    Here the attempts are made one by one, in another thread, and only when somebody listens does torch connect.
    Timeouts stay what they are. May be nested; imports torch.
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
        if args or not {"host_name", "port", "is_master"} <= kwargs.keys() or not isinstance(timeout, timedelta):
            return store_class(*args, **kwargs)
        if kwargs["is_master"]:
            if is_breakable(kwargs["port"]):  # it is served until the iteration ends: nobody needs to wait for clients
                kwargs["wait_for_workers"] = False
            return store_class(**kwargs)
        return connect_store(store_class, timeout, kwargs)

    return create


def connect_store(store_class: Callable[..., Any], timeout: timedelta, arguments: dict[str, Any]) -> Any:
    """Make a client of torch's store, in attempts of about a second; the caller is in bytecode all the time.

    What torch raises when there is none within `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        _wait_for_listener(arguments["host_name"], arguments["port"], deadline)
        last = deadline - time.monotonic() <= _ATTEMPT_S
        try:
            # torch waits without any limit for a server whose process is stopped: the kernel accepts the connection all
            # the same. A caller that is interrupted leaves the thread behind, until that server goes on, or is gone.
            attempt = functools.partial(store_class, **{**arguments, "timeout": timedelta(seconds=_ATTEMPT_S)})
            store = BoundedCall(attempt, "inprocess-store-connection").result(None)
        except RuntimeError:  # gone again, or not the store it was
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
