"""Free a main thread that waits, while it makes a gloo group, for a peer to connect that never will.

Gloo makes connections in two ways: to one half of its peers it connects itself, the other half connects to it and says
by a sequence number, eight bytes, which of the awaited connections this is. The numbers of a group of n ranks are
0 to n-1. A peer that has given its address and then died, or was aborted, leaves such a wait behind, with nothing to
break. So this side connects to itself in the peer's place, and hangs up: gloo then reports a peer that closed.

Numbers nobody waits for do no harm: gloo keeps such a connection until the group ends.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from inprocess.unblock.gloo import listening_sockets
from inprocess.unblock.store_wait import main_thread_frame_in_groups

__all__ = ["answer_for_missing_peers"]

_PLAIN_TRANSPORTS = ("", "TCP")


def answer_for_missing_peers(timeout: float = 0.25) -> int:
    """Connect in the place of missing peers while the main thread makes a gloo group; return how many times.

    Does nothing while the main thread is anywhere else, and with the TLS transport, which wants to know who connects.
    Any thread but the main one, at most about `timeout` seconds; does not raise.
    """
    frame = main_thread_frame_in_groups()
    size = None if frame is None else frame.f_locals.get("group_size")
    if not isinstance(size, int) or os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() not in _PLAIN_TRANSPORTS:
        return 0
    deadline = time.monotonic() + timeout
    answered = 0
    for listener in listening_sockets():
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
