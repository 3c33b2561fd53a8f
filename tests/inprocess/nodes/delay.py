"""Carries packets between two network devices, each a fixed time late: ``delay.py DEVICE DEVICE SECONDS``.

What one device receives the other one sends, in the same order. Packets are taken as the kernel has them, with the
header that says what is left to do (checksums, segmentation), so large ones stay whole. Ends with its standard input.
"""

from __future__ import annotations

import collections
import select
import socket
import sys
import time

_ALL_PROTOCOLS = 3
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 8 << 20
_MAX_BYTES = 1 << 17


def open_device(name: str) -> socket.socket:
    """Return a socket for all packets that a device receives, and to send by it."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    packets.bind((name, _ALL_PROTOCOLS))
    return packets


def carry(one: socket.socket, other: socket.socket, seconds: float) -> None:
    """Carry packets in both directions until standard input is closed."""
    way = {one.fileno(): (one, other), other.fileno(): (other, one)}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    poll = select.poll()
    for fd in (*way, sys.stdin.fileno()):
        poll.register(fd, select.POLLIN)
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for fd, _ in poll.poll(1000 * pause_s):
            if fd not in way:
                return
            source, target = way[fd]
            due = time.monotonic() + seconds
            waiting.extend((due, target, packet) for packet in _received(source))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            try:
                target.send(packet)
            except OSError:  # the device is down or busy: lost, as packets can be
                continue


def _received(source: socket.socket) -> list[bytes]:
    packets = []
    try:
        while True:
            packets.append(source.recv(_MAX_BYTES))
    except OSError:
        return packets


def main() -> None:
    one, other = open_device(sys.argv[1]), open_device(sys.argv[2])
    print("ready", flush=True)
    carry(one, other, float(sys.argv[3]))


if __name__ == "__main__":
    main()
