"""What a server does with each frame it gets. Everything here runs in the thread of the server."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inprocess.coordination.connection import Purpose
from inprocess.coordination.contents import Change, Contents
from inprocess.coordination.peers import Peer
from inprocess.coordination.waiters import Waiter, Waiters
from inprocess.coordination.wire import (
    HOSTS_KEY,
    MAX_BODY,
    PROTOCOL,
    Frame,
    Host,
    Op,
    WireError,
    decode_body,
    encode,
    number,
    pack_number,
    parse_hosts,
)

__all__ = ["Identity", "Requests"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What a server tells about itself."""

    position: int
    session: str
    embedded: bool


class Requests:
    """The state of a server, as seen by those who are connected to it.

    `active`: clients are accepted. `superseded`: they never will be again; it wins over `active`. `look` is asked, with
    the earlier hosts, before a standby becomes active, and calls back (in the thread of the server) `verdict`.
    `upstream_lost` is called when the connection to the server that is mirrored ends.
    """

    def __init__(
        self, identity: Identity, look: Callable[[Sequence[Host]], None], upstream_lost: Callable[[], None]
    ) -> None:
        self.contents = Contents()
        self.waiters = Waiters()
        self.active = identity.position == 0
        self.superseded = False
        self.count = 0
        self.clients: collections.Counter[bytes] = collections.Counter()
        self._identity = identity
        self._look = look
        self._upstream_lost = upstream_lost
        self._upstream: Peer | None = None
        self._mirrors: set[Peer] = set()
        self._undecided: list[Peer] = []  # greeted a standby, and get its verdict
        self._looked_at: Sequence[Host] = ()
        self._earlier: set[Host] = set()

    def handle(self, peer: Peer, frame: Frame) -> None:
        """Do what a frame says. WireError or ValueError: it makes no sense, and the connection must be dropped."""
        if peer is self._upstream:
            self.contents.mirror(frame)
        elif peer.purpose is None:
            self._greet(peer, frame)
        elif frame.op is Op.STEP_DOWN and peer.purpose is Purpose.PROBE:
            self._step_down()
        elif not peer.accepted or peer.purpose is not Purpose.CLIENT or peer.waiter is not None:
            raise WireError(f"{frame.op.name} at a time when nothing may come")
        elif frame.op is not Op.WATCH:
            self.count += 1
            self._serve(peer, frame)

    @property
    def mirror_count(self) -> int:
        return len(self._mirrors)

    def drop(self, peer: Peer, reason: BaseException) -> None:
        """Forget a peer and close its connection. Idempotent."""
        if peer.closed:
            return
        level = logging.WARNING if isinstance(reason, (WireError, ValueError)) else logging.DEBUG
        _log.log(level, "store server %d: connection from %s: %s", self._identity.position, peer.name, reason)
        peer.close()
        if peer.waiter is not None:
            self.waiters.discard(peer.waiter)
        self._mirrors.discard(peer)
        if peer in self._undecided:
            self._undecided.remove(peer)
        if peer.accepted and peer.purpose is Purpose.CLIENT and peer.client is not None:
            self.clients[peer.client] -= 1
            if not self.clients[peer.client]:
                del self.clients[peer.client]
        if peer is self._upstream:
            self._upstream = None
            if not self.active:
                self._upstream_lost()

    def expire(self) -> None:
        """Answer those whose time is over."""
        for waiter in self.waiters.overdue(time.monotonic()):
            self._answer(waiter, encode(Op.TIMED_OUT))

    def mirror_from(self, peer: Peer, unread: Sequence[Frame]) -> None:
        """From now on, `peer` is the server whose contents are copied."""
        if self.active or self.superseded:
            peer.close()
            return
        self._upstream = peer
        peer.reader.limit = MAX_BODY
        self._copy(peer, unread)

    def _copy(self, upstream: Peer, frames: Iterable[Frame]) -> None:
        try:
            for frame in frames:
                self.contents.mirror(frame)
        except (WireError, ValueError) as error:
            self.drop(upstream, error)

    def add_earlier(self, hosts: Sequence[Host]) -> None:
        """Remember servers with a lower position than this one."""
        self._earlier.update(host for host in hosts if host.position < self._identity.position)

    def earlier(self) -> Sequence[Host]:
        """Return all servers with a lower position: those named, and those registered in the contents."""
        self.add_earlier(parse_hosts(self.contents.keys.get(HOSTS_KEY.encode(), b"")))
        return sorted(self._earlier)

    def verdict(self, living: Host | None) -> None:
        """What `look` found: a host that lives, or None."""
        if living is None and list(self.earlier()) != list(self._looked_at):
            self._start_look()
            return
        peers, self._undecided = self._undecided, []
        if living is not None:
            for peer in peers:
                self._send(peer, encode(Op.NOT_ACTIVE), then_close=True)
            return
        self._activate()
        for peer in peers:
            self._accept(peer)

    def _greet(self, peer: Peer, frame: Frame) -> None:
        if frame.op is not Op.HELLO or not frame.fields or frame.fields[0] != PROTOCOL:
            raise WireError(f"{frame.op.name} is no greeting of this protocol")
        _, session, client, purpose, *earlier = frame.fields
        peer.client, peer.purpose = client, Purpose(purpose)
        if session.decode() != self._identity.session:
            self._send(peer, encode(Op.OTHER_SESSION), then_close=True)
        elif self.superseded:
            self._send(peer, encode(Op.SUPERSEDED), then_close=True)
        elif self.active:
            self._accept(peer)
        elif peer.purpose is not Purpose.CLIENT:
            self._send(peer, encode(Op.CHECKING if self._undecided else Op.NOT_ACTIVE))
        else:
            self.add_earlier(parse_hosts(b"\n".join(earlier)))
            self._undecided.append(peer)
            self._send(peer, encode(Op.CHECKING))
            if self._undecided == [peer]:
                self._start_look()

    def _start_look(self) -> None:
        self._looked_at = self.earlier()
        self._look(self._looked_at)

    def _activate(self) -> None:
        if self._upstream is not None:
            # What the dead server managed to send is still in the socket.
            upstream = self._upstream
            self.active = True
            self._copy(upstream, upstream.drain())
            self.drop(upstream, ConnectionResetError("this server is active now"))
        self.active = True
        _log.warning(
            "store server %d takes over with %d keys; no earlier host answers: %s",
            self._identity.position,
            len(self.contents.keys),
            ", ".join(f"{host.name}:{host.port}" for host in self._looked_at),
        )

    def _step_down(self) -> None:
        _log.warning("store server %d steps down: a later one took over", self._identity.position)
        self.superseded = True

    def _accept(self, peer: Peer) -> None:
        peer.accepted = True
        peer.reader.limit = MAX_BODY
        if peer.purpose is Purpose.CLIENT and peer.client is not None:
            self.clients[peer.client] += 1
        self._send(peer, encode(Op.ACCEPTED, bytes((self._identity.embedded,))))
        if peer.purpose is Purpose.MIRROR:
            for part in self.contents.snapshot():
                self._send(peer, part)
            self._mirrors.add(peer)

    def _serve(self, peer: Peer, frame: Frame) -> None:
        if frame.op.changes:
            self._send(peer, self._change(peer, frame).answer)
        elif frame.op is Op.REPLAY:
            (body,) = frame.fields
            self._change(peer, decode_body(body))
        elif frame.op is Op.SYNC:
            self._send(peer, encode(Op.OK))
        elif frame.op is Op.CHECK:
            present = all(key in self.contents.keys for key in frame.fields)
            self._send(peer, encode(Op.OK, pack_number(present)))
        elif frame.op is Op.NUM_KEYS:
            self._send(peer, encode(Op.OK, pack_number(len(self.contents.keys))))
        elif frame.op is Op.MEMBERS:
            (name,) = frame.fields
            self._send(peer, encode(Op.OK, *self.contents.sets.get(name, {})))
        else:
            self._wait(peer, frame)

    def _change(self, peer: Peer, frame: Frame) -> Change:
        assert peer.client is not None
        if not frame.op.changes:
            raise WireError(f"{frame.op.name} changes nothing")
        change = self.contents.change(peer.client, frame)
        if change.fresh:
            # Before the answer: once a client knows of its change, the kernel has it for the mirrors.
            for mirror in tuple(self._mirrors):
                self._send(mirror, encode(Op.MIRROR, peer.client, frame.body))
            self._notify(change)
        return change

    def _wait(self, peer: Peer, frame: Frame) -> None:
        if frame.op in (Op.GET, Op.WAIT):
            milliseconds, *keys = frame.fields
            waiter = Waiter((peer, frame.op), _deadline(milliseconds), keys=tuple(keys))
        elif frame.op is Op.WAIT_SIZE:
            name, size, milliseconds = frame.fields
            waiter = Waiter((peer, frame.op), _deadline(milliseconds), set_name=name, size=number(size))
        else:
            raise WireError(f"{frame.op.name} is no request")
        missing = self._missing(waiter)
        peer.waiter = waiter
        if missing is None:
            self._answer(waiter, self._result(waiter))
        elif waiter.deadline <= time.monotonic():
            self._answer(waiter, encode(Op.TIMED_OUT))
        else:
            self.waiters.file(waiter, missing)

    def _notify(self, change: Change) -> None:
        if change.key is not None:
            for waiter in self.waiters.take_by_key(change.key):
                missing = self._missing(waiter)
                if missing is None:
                    self._answer(waiter, self._result(waiter))
                else:
                    self.waiters.refile(waiter, missing)
        if change.set_name is not None:
            size = len(self.contents.sets[change.set_name])
            for waiter in self.waiters.take_by_size(change.set_name, size):
                self._answer(waiter, self._result(waiter))

    def _missing(self, waiter: Waiter) -> bytes | None:
        """What the waiter still lacks: a key, or the name of its set."""
        if waiter.set_name is not None:
            return waiter.set_name if len(self.contents.sets.get(waiter.set_name, {})) < waiter.size else None
        return next((key for key in waiter.keys if key not in self.contents.keys), None)

    def _result(self, waiter: Waiter) -> bytes:
        if waiter.set_name is not None:
            return encode(Op.OK, pack_number(len(self.contents.sets.get(waiter.set_name, {}))))
        if waiter.token[1] is Op.GET:
            return encode(Op.OK, *(self.contents.keys[key] for key in waiter.keys))
        return encode(Op.OK)

    def _answer(self, waiter: Waiter, frame: bytes) -> None:
        peer: Peer = waiter.token[0]
        peer.waiter = None
        self._send(peer, frame)

    def _send(self, peer: Peer, frame: bytes, *, then_close: bool = False) -> None:
        try:
            peer.send(frame, then_close=then_close)
        except OSError as error:
            self.drop(peer, error)


def _deadline(milliseconds: bytes) -> float:
    return time.monotonic() + number(milliseconds) / 1000
