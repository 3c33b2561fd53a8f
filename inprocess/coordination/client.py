"""The client of the coordination store, and how it goes over to another server."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

from inprocess.coordination.journal import Entry
from inprocess.coordination.links import Links
from inprocess.coordination.wire import HOSTS_KEY, Frame, Host, Op, encode, number, pack_number, parse_hosts
from inprocess.exception import StoreError, StoreTimeoutError

__all__ = ["StoreClient"]

_log = logging.getLogger(__name__)

# A live server answers a wait as soon as its time is over, and anything else at once; one that has not by then hangs.
_ANSWER_S = 5.0
_PATIENCE = timedelta(seconds=3)
# Connections that broke in a row while a request was under way, although the server accepted a new one each time.
_MOST_BREAKS = 10


class StoreClient:
    """Access to the store, whichever host serves it at the moment. For any number of threads; not across a fork.

    Keys are text, values bytes (text is encoded as UTF-8). A request that waits does so in one `recv` of its thread:
    nothing is polled. It ends after its own timeout with `StoreTimeoutError`, later only by the time of a fail-over.

    *Fail-over.* When a connection breaks, or the server stays silent, the client tries the same host again, then the
    later ones in the order of their position; it never goes back to an earlier one. `StoreError`, naming the hosts, if
    none of them serves it. What holds across a fail-over:

    * Every change is applied at most once on each server, however often it is sent, because it carries a number and
      every server (also a mirror, for what it has copied) knows which it has applied.
    * Every change that was acknowledged to a client which is still there, is there on the new server before the client
      sends anything else: it replays its journal first. So a `set`, `append`, `add` or `arrive` is never lost, and a
      wait that was interrupted is asked again. A client that asks nothing notices the end of its server, too, in a
      thread that does nothing but wait for it.
    * Changes of clients that have ended meanwhile are there as far as the new server had copied them. A server sends
      a change to its mirrors before it acknowledges it: with a mirror connected, they survive the death of the server
      process, and may be lost only with the node.
    * For what the new server had not copied: the order of appends of different clients may differ, and so may the
      value that `add` or `arrive` returns; a key that several clients set, holds the value of any of them; two
      clients may both have won a `compare_set`; a deleted key is there again.

    *Interruption.* An exception that appears in the middle of a request (thrown into this thread by another one, for
    example) leaves the client usable; whether the change was applied is then unknown. Not to be used in handlers of
    signals, which may run in the middle of a request of the same thread.
    """

    def __init__(
        self,
        hosts: Iterable[Host],
        *,
        session: str,
        timeout: timedelta = timedelta(seconds=300),
        connect_timeout: timedelta | None = None,
        patience: timedelta = _PATIENCE,
    ) -> None:
        """Connect. StoreError if no host accepts this client within `connect_timeout` (default: `timeout`).

        `timeout` is the default of requests that wait. Once connected, no host at all may be reached for `patience`
        before that is a StoreError.
        """
        super().__init__()
        self._timeout = timeout
        self._session = session
        self._links = Links(hosts, session, uuid.uuid4().bytes, patience.total_seconds())
        self._links.connect((connect_timeout or timeout).total_seconds())

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """Make a client from what `spec` returned in another process."""
        hosts = [Host.from_str(text) for text in spec["hosts"]]
        return cls(hosts, session=spec["session"], timeout=timedelta(seconds=spec["timeout"]))

    def spec(self) -> dict[str, Any]:
        """Return a description that JSON can carry to another process."""
        return {
            "hosts": [str(host) for host in self.hosts],
            "session": self._session,
            "timeout": self._timeout.total_seconds(),
        }

    @property
    def timeout(self) -> timedelta:
        """How long requests that wait do so by default."""
        return self._timeout

    def close(self) -> None:
        """Close all connections; requests under way end with StoreError. Idempotent, no thread is left."""
        self._links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Keys

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, over any other."""
        self._change(Op.SET, key, _bytes(value))

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        """Return the value of a key, once it exists. StoreTimeoutError if it does not in time."""
        return self.multi_get([key], timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if it does not exist yet; returns the sum."""
        return number(self._change(Op.ADD, key, pack_number(amount))[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, empty if it does not exist yet."""
        self._change(Op.APPEND, key, _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys exist now."""
        return bool(number(self._ask(Op.CHECK, *_names(keys))[0]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys exist. StoreTimeoutError if they do not in time."""
        self._wait(lambda left: encode(Op.WAIT, left, *_names(keys)), timeout, f"keys {_few(keys)}")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the key holds `expected`, or does not exist and `expected` is empty.

        Returns the value that the key then has; `expected` if it does not exist.
        """
        return self._change(Op.COMPARE_SET, key, _bytes(expected), _bytes(desired))[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return bool(number(self._change(Op.DELETE_KEY, key)[0]))

    def num_keys(self) -> int:
        """Return how many keys there are; sets do not count."""
        return number(self._ask(Op.NUM_KEYS)[0])

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """Return the values of all these keys, once they exist. StoreTimeoutError if they do not in time."""
        values = self._wait(lambda left: encode(Op.GET, left, *_names(keys)), timeout, f"keys {_few(keys)}")
        return list(values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys and sets whose name begins so, and `forget` them; returns how many there were."""
        return number(self._change(Op.DELETE_PREFIX, prefix)[0])

    def forget(self, prefix: str) -> None:
        """Drop the changes of such keys and sets from the journal: no later server will get them from here."""
        self._links.forget(prefix.encode())

    # Sets

    def arrive(self, name: str, member: str) -> int:
        """Put a member into a set, where it may be already; returns the size."""
        return number(self._change(Op.ARRIVE, name, member.encode())[0])

    def wait_size(self, name: str, size: int, timeout: timedelta | None = None) -> int:
        """Wait until a set has so many members; returns how many it has. StoreTimeoutError if not in time."""
        label = f"{size} members of {name!r}"
        answer = self._wait(lambda left: encode(Op.WAIT_SIZE, name.encode(), pack_number(size), left), timeout, label)
        return number(answer[0])

    def members(self, name: str) -> frozenset[str]:
        """Return the members of a set; it is empty if nobody has arrived."""
        return frozenset(member.decode() for member in self._ask(Op.MEMBERS, name.encode()))

    # Hosts

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All servers this client knows, in order."""
        return self._links.hosts

    @property
    def current_host(self) -> Host:
        """The server that serves this client."""
        return self._links.current

    @property
    def host_embedded(self) -> bool:
        """Whether the current server lives in a rank process."""
        return self._links.embedded

    @property
    def local_name(self) -> str:
        """The name by which other clients reach this machine: what a standby server here goes by."""
        return self._links.local_name()

    def register_host(self, host: Host) -> None:
        """Tell all clients of a standby server; they know it after their next `refresh_hosts`.

        All clients should have refreshed before a server dies: one that knows less may end with StoreError.
        """
        self.append(HOSTS_KEY, f"{host}\n")
        self._links.add_hosts([host])

    def refresh_hosts(self) -> tuple[Host, ...]:
        """Learn of all servers registered so far; returns all that are known."""
        if self.check([HOSTS_KEY]):
            self._links.add_hosts(parse_hosts(self.get(HOSTS_KEY)))
        return self.hosts

    # Requests

    def _change(self, op: Op, key: str, *values: bytes) -> tuple[bytes, ...]:
        entry = self._links.begin(op, (key.encode(), *values))
        try:
            answer = self._exchange(lambda: self._links.frame(entry), _ANSWER_S, entry)
        finally:
            self._links.abandon(entry)  # nothing if it has ended well
        return _fields(answer)

    def _ask(self, op: Op, *fields: bytes) -> tuple[bytes, ...]:
        return _fields(self._exchange(lambda: encode(op, *fields), _ANSWER_S))

    def _wait(self, frame: Callable[[bytes], bytes], timeout: timedelta | None, label: str) -> tuple[bytes, ...]:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + seconds
        answer = self._exchange(
            lambda: frame(pack_number(max(0, round(1000 * (deadline - time.monotonic()))))), seconds + _ANSWER_S
        )
        if answer.op is Op.TIMED_OUT:
            raise StoreTimeoutError(f"{label} did not appear in the store within {seconds:g} s")
        return _fields(answer)

    def _exchange(self, frame: Callable[[], bytes], patience: float, entry: Entry | None = None) -> Frame:
        """Send a request until a server has answered it."""
        for attempt in range(_MOST_BREAKS):
            link = self._links.take()
            try:
                answer = link.ask(frame(), patience)
            except OSError as error:
                _log.info("the connection to store server %s broke: %s", link.host, error)
                self._links.drop(link)
                last = error
                time.sleep(0.01 * attempt)
                continue
            except BaseException:
                self._links.drop(link)
                raise
            if self._links.settle(link, entry, answer):
                return answer
        raise StoreError(f"store server {self.current_host} breaks every connection; last: {last}") from last


def _fields(answer: Frame) -> tuple[bytes, ...]:
    if answer.op is not Op.OK:
        text = b" ".join(answer.fields).decode(errors="replace")
        raise StoreError(f"the store answered {answer.op.name}: {text}")
    return answer.fields


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _few(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:4])) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
