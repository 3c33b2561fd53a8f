"""Messages as packets: what arrives, what is refused, and that no sender ever waits."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from inprocess.ipc.packets import MAX_BYTES, Channel, Codec, Packet, PacketError, receive, send
from tests.support import LeakCheck


@dataclass(frozen=True)
class Number:
    value: int


@dataclass(frozen=True)
class Place:
    host: str
    port: int | None = None


@dataclass(frozen=True)
class Everything:
    name: str
    seconds: float
    is_open: bool
    place: Place
    other: Place | None
    values: dict[str, Any] = field(default_factory=dict)
    items: list[int] = field(default_factory=list)
    pairs: tuple[tuple[str, int], ...] = ()


Message = Number | Everything
CODEC: Codec[Message] = Codec(Number, Everything)
EVERYTHING = Everything("a\ud800", 1.5, True, Place("h", 3), None, {"x": [1, None]}, [1, 2], (("a", 1), ("b", 2)))


@pytest.fixture
def ends(leak_check: LeakCheck) -> Iterator[tuple[Channel[Message], Channel[Message]]]:
    one, socket_of_other = Channel.pair(CODEC)
    other = Channel(socket_of_other, CODEC)
    yield one, other
    one.close()
    other.close()


def test_a_message_comes_back_as_it_was() -> None:
    assert CODEC.decode(CODEC.encode(EVERYTHING)) == EVERYTHING
    assert CODEC.decode(CODEC.encode(Number(2**62))) == Number(2**62)


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\xff\xff",
        b"\x80\x04\x95pickle",
        b"{}",
        b"[1]",
        b'["Number"]',
        b'["Number", 3]',
        b'["Number", {}]',
        b'["Number", {"value": true}]',
        b'["Number", {"value": 1.0}]',
        b'["Number", {"value": "1"}]',
        b'["Number", {"value": null}]',
        b'["Number", {"value": 1, "more": 2}]',
        b'["Place", {"host": "h", "port": 1}]',
        b'[["Number"], {"value": 1}]',
        b"[" * 50_000,
    ],
)
def test_what_is_not_a_message_is_refused(packet: bytes) -> None:
    with pytest.raises(PacketError):
        CODEC.decode(packet)


@pytest.mark.parametrize(
    "wrong",
    [
        {"place": None},
        {"other": {"host": 1, "port": 2}},
        {"values": []},
        {"seconds": "1"},
        {"pairs": "ab"},
        {"pairs": [["a"]]},
        {"pairs": [["a", 1, 2]]},
        {"pairs": [["a", "b"]]},
    ],
)
def test_a_field_of_another_type_is_refused(wrong: dict[str, Any]) -> None:
    name, values = json.loads(CODEC.encode(EVERYTHING))
    with pytest.raises(PacketError):
        CODEC.decode(json.dumps([name, values | wrong]).encode())


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(PacketError, match="JSON"):
        CODEC.encode(Everything("x", 1.0, True, Place("h"), None, {"x": object()}))
    with pytest.raises(PacketError, match="limit"):
        CODEC.encode(Everything("x" * MAX_BYTES, 1.0, True, Place("h"), None))


def test_message_and_descriptor_arrive(ends: tuple[Channel[Message], Channel[Message]]) -> None:
    one, other = ends
    fd = os.memfd_create("x")
    os.write(fd, b"hello")
    one.send(Number(3), fd)
    os.close(fd)
    packet = other.receive()
    assert packet is not None
    assert packet.message == Number(3)
    (arrived,) = packet.fds
    assert os.pread(arrived, 10, 0) == b"hello"
    assert not os.get_inheritable(arrived)
    packet.close_fds()
    assert other.receive() is None


def test_sending_never_blocks_and_keeps_order(ends: tuple[Channel[Message], Channel[Message]]) -> None:
    one, other = ends
    fd = os.memfd_create("x")
    count = 3000
    for index in range(count):
        one.send(Number(index), *([fd] if index % 100 == 0 else []))
    os.close(fd)
    assert one.poll_events & select.POLLOUT
    for index in range(count):
        packet = other.receive()
        assert packet is not None
        assert packet.message == Number(index)
        packet.close_fds()
        one.flush()
    assert not one.poll_events & select.POLLOUT


def test_try_send_drops_what_the_socket_does_not_take(ends: tuple[Channel[Message], Channel[Message]]) -> None:
    one, other = ends
    taken = 0
    while one.try_send(Number(taken)):
        taken += 1
    for index in range(taken):
        assert other.receive() == Packet(Number(index))
    assert other.receive() is None
    assert one.try_send(Number(-1))
    other.close()
    assert not one.try_send(Number(-2))


def test_all_that_a_dead_peer_sent_is_received(ends: tuple[Channel[Message], Channel[Message]]) -> None:
    one, other = ends
    one.send(Number(1))  # never read by the other end, which is what makes the kernel report a reset
    other.send(Number(2))
    other.send(Number(3))
    other.close()
    assert one.peer_gone
    assert one.receive() == Packet(Number(2))
    assert one.receive() == Packet(Number(3))
    with pytest.raises(EOFError):
        one.receive()
    one.send(Number(4))  # useless, and no error


def test_closing_drops_the_outbox_and_its_descriptors(ends: tuple[Channel[Message], Channel[Message]]) -> None:
    one, _ = ends
    fd = os.memfd_create("x")
    for index in range(1000):
        one.send(Number(index), fd)
    os.close(fd)


def test_a_refused_packet_leaves_no_descriptor(leak_check: LeakCheck) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        fd = os.memfd_create("x")
        socket.send_fds(one, [b"no message"], [fd])
        socket.send_fds(one, [b"x" * (MAX_BYTES + 1)], [fd])
        socket.send_fds(one, [CODEC.encode(Number(1))], [fd] * 9)
        os.close(fd)
        for _ in range(3):
            with pytest.raises(PacketError):
                receive(other, CODEC)
        send(one, CODEC, Number(2))
        assert receive(other, CODEC) == Packet(Number(2))
        one.close()
        with pytest.raises(EOFError):
            receive(other, CODEC)
