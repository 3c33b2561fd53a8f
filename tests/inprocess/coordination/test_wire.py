import contextlib
import logging
import socket
import struct
import threading

import pytest

from inprocess.coordination import Access, CoordinationStore, StoreServer
from inprocess.coordination.wire import (
    MAX_BODY,
    Frame,
    FrameReader,
    Op,
    WireError,
    encode,
    number,
    pack_number,
)
from inprocess.exception import StoreError
from tests.inprocess.coordination.helpers import eventually, greeted


@pytest.mark.parametrize("fields", [(), (b"",), (b"key", b"\0" * 1000, b"")])
def test_frames_survive_any_cut(fields: tuple[bytes, ...]) -> None:
    stream = encode(Op.SET, 7, *fields) + encode(Op.OK, 8, b"x")
    for size in (1, 3, 7, len(stream)):
        reader = FrameReader()
        frames: list[Frame] = []
        for at in range(0, len(stream), size):
            reader.feed(stream[at : at + size])
            frames += reader.frames()
        assert frames == [Frame(Op.SET, 7, fields), Frame(Op.OK, 8, (b"x",))]


@pytest.mark.parametrize(
    "body", [b"", b"\xff" + bytes(8), b"\x10" + bytes(10), b"\x10" + bytes(8) + struct.pack(">I", 5) + b"four"]
)
def test_malformed_bodies(body: bytes) -> None:
    reader = FrameReader()
    reader.feed(struct.pack(">I", len(body)) + body)
    with pytest.raises(WireError):
        list(reader.frames())


def test_sizes_are_limited_before_anything_is_stored() -> None:
    reader = FrameReader(limit=10)
    reader.feed(struct.pack(">I", 11))
    with pytest.raises(WireError, match="11 bytes; the limit is 10"):
        list(reader.frames())
    with pytest.raises(WireError, match="limit"):
        encode(Op.SET, 0, bytes(MAX_BODY))


def test_numbers() -> None:
    assert [number(pack_number(value)) for value in (0, -1, 2**63 - 1)] == [0, -1, 2**63 - 1]
    with pytest.raises(WireError):
        pack_number(2**63)
    with pytest.raises(WireError):
        number(b"12")


GUARD = (b"", b"")


@pytest.mark.parametrize(
    ("greets", "data", "reason"),
    [
        (False, b"GET / HTTP/1.1\r\n\r\n", "limit"),
        (False, encode(Op.SET, 1, bytes(1 << 17)), "limit"),
        (False, encode(Op.SET, 1, b"key"), "greeting"),
        (False, encode(Op.HELLO, 0, b"too short"), "greeting"),
        (False, encode(Op.HELLO, 0, b"me", bytes(16), bytes(32)), "does not know the secret"),
        (True, encode(Op.SET, 1, *GUARD, b"no number", b"key", b"value"), "number"),
        (True, encode(Op.SET, 1, *GUARD, pack_number(1), b"key"), "without a value"),
        (True, encode(Op.ADD, 1, *GUARD, pack_number(1), b"key"), "unpack"),
        (True, encode(Op.MEMBERS, 1), "unpack"),
        (True, encode(Op.WAIT_SIZE, 1, *GUARD, b"set"), "unpack"),
        (True, encode(Op.OK, 1), "not a request"),
        (True, encode(Op.HELLO, 1), "not a request"),
        (True, struct.pack(">I", 1 << 30), "limit"),
        (True, struct.pack(">I", 9) + b"\x63" + bytes(8), "99"),
    ],
)
def test_nonsense_ends_only_its_own_connection(
    server: StoreServer,
    access: Access,
    client: CoordinationStore,
    caplog: pytest.LogCaptureFixture,
    greets: bool,
    data: bytes,
    reason: str,
) -> None:
    client.set("key", "x")
    connection = greeted(access) if greets else socket.create_connection((access.host, access.port), timeout=20)
    with caplog.at_level(logging.WARNING, "inprocess"), connection as sock:
        with contextlib.suppress(OSError):  # it may close before it has read all of this
            sock.sendall(data)
            while sock.recv(1000):
                pass
        eventually(lambda: bool(caplog.messages))
    assert client.get("key") == b"x"
    (line,) = caplog.messages
    assert reason in line
    assert "connection from 127.0.0.1:" in line
    eventually(lambda: server.client_count == 1)


def test_a_server_that_talks_nonsense_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            peer, _ = listener.accept()
            peer.sendall(encode(Op.OK))
            peer.recv(1000)
            peer.close()

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(StoreError, match="is not a server of this protocol"):
            CoordinationStore(Access("127.0.0.1", listener.getsockname()[1]))
        thread.join()
