import contextlib
import logging
import socket
import struct

import pytest

from inprocess.coordination import CoordinationStore, Host, StoreServer
from inprocess.coordination.connection import Connection, Greeting, Purpose
from inprocess.coordination.wire import (
    MAX_BODY,
    Frame,
    FrameReader,
    Op,
    WireError,
    body_of,
    decode_body,
    encode,
    number,
    pack_number,
    parse_hosts,
)
from tests.inprocess.coordination.helpers import SESSION, eventually


@pytest.mark.parametrize("fields", [(), (b"",), (b"key", b"\0" * 1000, b"")])
def test_frames_survive_any_cut(fields: tuple[bytes, ...]) -> None:
    stream = encode(Op.SET, *fields) + encode(Op.OK, b"x")
    for size in (1, 3, 7, len(stream)):
        reader = FrameReader()
        frames: list[Frame] = []
        for at in range(0, len(stream), size):
            reader.feed(stream[at : at + size])
            frames += reader.frames()
        assert [(frame.op, frame.fields) for frame in frames] == [(Op.SET, fields), (Op.OK, (b"x",))]
        assert frames[0].body == body_of(encode(Op.SET, *fields))
        assert reader.pending == 0


@pytest.mark.parametrize(
    "body", [b"", b"\xff", bytes((Op.SET,)) + b"\0\0", bytes((Op.SET,)) + struct.pack(">I", 5) + b"four"]
)
def test_malformed_bodies(body: bytes) -> None:
    with pytest.raises(WireError):
        decode_body(body)


def test_sizes_are_limited_before_anything_is_stored() -> None:
    reader = FrameReader(limit=10)
    reader.feed(struct.pack(">I", 11))
    with pytest.raises(WireError, match="11 bytes; the limit is 10"):
        list(reader.frames())
    with pytest.raises(WireError, match="limit"):
        encode(Op.SET, bytes(MAX_BODY))


def test_numbers() -> None:
    assert [number(pack_number(value)) for value in (0, -1, 2**63 - 1)] == [0, -1, 2**63 - 1]
    with pytest.raises(WireError):
        pack_number(2**63)
    with pytest.raises(WireError):
        number(b"12")


def test_hosts_are_text() -> None:
    first, second = Host(0, "node-a", 1), Host(1, "::1", 65535)
    assert parse_hosts(f"{second}\nnonsense\n1 2\n{first}\n{second}\n".encode()) == [first, second]


GREETING = Greeting(SESSION, b"me", Purpose.CLIENT).frame()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "limit"),
        (encode(Op.SET, bytes(1 << 17)), "limit"),
        (encode(Op.SET, b"key"), "greeting"),
        (encode(Op.HELLO, b"another protocol"), "greeting"),
        (encode(Op.HELLO, b"inprocess store 1", b"too short"), "unpack"),
        (GREETING + encode(Op.SET, b"no number", b"x", b"key", b"value"), "number"),
        (GREETING + encode(Op.SET, pack_number(1), pack_number(1), b"key"), "unpack"),
        (GREETING + encode(Op.OK), "no request"),
        (GREETING + encode(Op.REPLAY, b"\xff"), "255"),
        (GREETING + encode(Op.MIRROR_RESET), "no request"),
        (GREETING + encode(Op.STEP_DOWN), "no request"),
        (GREETING + 2 * encode(Op.GET, pack_number(9999), b"absent"), "nothing may come"),
        (GREETING + struct.pack(">I", 100) + b"half", "within a frame"),
    ],
)
def test_nonsense_ends_only_its_own_connection(
    server: StoreServer, client: CoordinationStore, caplog: pytest.LogCaptureFixture, data: bytes, reason: str
) -> None:
    client.set("key", "x")
    with caplog.at_level(logging.WARNING, "inprocess"), socket.create_connection(server.address) as sock:
        with contextlib.suppress(OSError):  # it may close before it has read all of this
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1000):
                pass
        eventually(lambda: bool(caplog.messages))
    assert client.get("key") == b"x"
    (line,) = caplog.messages
    assert reason in line
    assert "connection from 127.0.0.1:" in line
    eventually(lambda: server.client_count == 1)


def test_a_server_that_talks_nonsense_is_as_good_as_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(Host(0, "127.0.0.1", listener.getsockname()[1]))
        peer, _ = listener.accept()
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(ConnectionAbortedError, match="limit"):
            connection.greet(Greeting(SESSION, b"me", Purpose.CLIENT))
        connection.close()
        peer.close()
