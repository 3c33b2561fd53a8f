import os
import select
import socket
from collections.abc import Iterator

import pytest

from ckpt.async_calls.messages import Channel, Event, Finished, Ready, Run, clip, encode
from tests.support import LeakCheck


@pytest.fixture
def ends(leak_check: LeakCheck) -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield one, other
    one.close()
    other.close()


def test_message_and_descriptor_arrive(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    fd = os.memfd_create("x")
    os.write(fd, b"hello")
    one.send(Run(3), fd)
    os.close(fd)
    received = other.receive()
    assert received is not None
    message, arrived = received
    assert message == Run(3)
    assert arrived is not None
    assert os.pread(arrived, 10, 0) == b"hello"
    assert not os.get_inheritable(arrived)
    os.close(arrived)
    with pytest.raises(BlockingIOError):
        other.receive()


def test_sending_never_blocks_and_keeps_order(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    fd = os.memfd_create("x")
    count = 3000
    for index in range(count):
        one.send(Run(index), fd if index % 100 == 0 else None)
    os.close(fd)
    assert one.poll_events & select.POLLOUT
    for index in range(count):
        received = other.receive()
        assert received is not None
        assert received[0] == Run(index)
        if received[1] is not None:
            os.close(received[1])
        one.flush()
    assert not one.poll_events & select.POLLOUT


def test_all_that_a_dead_peer_said_is_received(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(Ready(1))  # never read by the other end, which is what makes the kernel report a reset
    other.send(Finished(1, 10, 20))
    other.send(Finished(2, 20, 30))
    other.close()
    assert one.receive() == (Finished(1, 10, 20), None)
    assert one.receive() == (Finished(2, 20, 30), None)
    assert one.receive() is None
    one.send(Ready(2))  # useless, and no error


def test_closing_drops_the_outbox_and_its_descriptors(ends: tuple[Channel, Channel]) -> None:
    one, _ = ends
    fd = os.memfd_create("x")
    for index in range(1000):
        one.send(Run(index), fd)
    os.close(fd)


def test_the_largest_answer_fits() -> None:
    nasty = "\x00\U0001f600\ud800" * 100_000
    data = encode(Finished(2**62, 2**62, 2**62, clip(nasty, 4096), clip(nasty, 32768)))
    assert len(data) < 40_000


@pytest.mark.parametrize("text", ["", "short", "x" * 5000, "\U0001f600" * 5000, "a" * 4000 + "\x00" * 4000])
def test_clip_keeps_both_ends(text: str) -> None:
    clipped = clip(text, 1000)
    assert clipped == text or ("cut" in clipped and clipped[0] == text[0] and clipped[-1] == text[-1])


def test_event_must_be_small_json() -> None:
    with pytest.raises(TypeError):
        encode(Event(0, {"x": object()}))
    with pytest.raises(ValueError, match="larger"):
        encode(Event(0, {"x": "y" * 200_000}))
