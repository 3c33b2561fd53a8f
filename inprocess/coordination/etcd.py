"""The coordination store in an etcd cluster: it survives the loss of any minority of the cluster's members.

What a job writes stands under "/inprocess/<job>/", with a lease: when no process of the job has kept that alive for
some minutes, etcd deletes it all.

    k/<key>\\0              the value of a key
    k/<key>\\0<serial>      what was appended to it, one part each; etcd knows their order
    s/<set>\\0<member>      a member of a set
    w/<set>\\0<size>        somebody waits for the set to reach this size: whoever makes it so says it
    r/<set>\\0<size>        it has reached this size
    m/<client>/<slot>      the last change of a client, so that one that is sent twice is done once

Each change is one transaction. It is done only if the guard holds, and if the client's mark does not tell that it was
done already; a mark also tells the revision it was done at, and etcd what the store contained then.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from inprocess.coordination.etcd_gateway import EtcdCluster, EtcdGateway, Request
from inprocess.coordination.etcd_messages import (
    Answers,
    Entry,
    Message,
    Span,
    after,
    as_of,
    condition,
    delete,
    joined,
    place,
    put,
    read,
    suffix,
)
from inprocess.coordination.mixin import StoreMixin, few, in_bytes
from inprocess.coordination.namespace import NO_GUARD, Guard
from inprocess.exception import StaleViewError, StoreError, StoreLostError, StoreTimeoutError
from inprocess.ipc.threads import JoinableThread

__all__ = ["EtcdClient", "EtcdCluster"]

_log = logging.getLogger(__name__)
_DEFAULT_TIMEOUT = timedelta(seconds=300)
_T = TypeVar("_T")
_LEASE_S = 900  # many heartbeat timeouts: who does not keep it alive for so long has left the job
_OPS = 100  # of a transaction; etcd takes 128 by default
_LOOK_S = 5.0  # a wait looks again so often, in case that who should have said something died just before


class EtcdClient(StoreMixin):
    """Access to the store of a job in an etcd cluster. For any number of threads. Free of torch.

    The operations, guards and errors of `StoreClient`, except: `multi_set` writes up to 50 keys at once, and a key that
    was appended to can be read, written and deleted, but neither added to nor compared.
    """

    takes_guards = True

    def __init__(
        self,
        cluster: EtcdCluster,
        job: str,
        *,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        patience: timedelta = timedelta(seconds=30),
    ) -> None:
        """Connect. StoreError if the cluster does not answer for `patience`, or refuses this client.

        `local_host` is the address by which other nodes reach this machine: the one it has towards MASTER_ADDR, or else
        towards etcd.
        All processes of a job give the same `job`, and no other job ever had it. `timeout` is the default of requests
        that wait.
        """
        super().__init__()
        self.job = job
        self.local_host = _own_address(os.environ.get("MASTER_ADDR") or urlsplit(cluster.endpoints[0]).hostname or "")
        self._root = f"/inprocess/{job}/"
        if cluster.is_open:
            _log.warning(
                "whoever reaches the etcd cluster at %s can end this job: give a user or a certificate", cluster
            )
        self._timeout = timeout
        self._patience_s = patience.total_seconds()
        self._id = uuid.uuid4().hex
        self._slots = _Slots()
        self._gateway = EtcdGateway(cluster, self._patience_s)
        self._lease = int.from_bytes(hashlib.sha256(self._root.encode()).digest()[:8]) >> 1 or 1
        self._closing = threading.Event()
        self._thread = JoinableThread(self._stay, "inprocess-etcd-lease")
        try:
            self._gateway.run(self._make_lease)
            self._change(NO_GUARD, [])  # whether we may
            self._thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def cluster(self) -> EtcdCluster:
        """Where the store is."""
        return self._gateway.cluster

    def to_document(self) -> dict[str, Any]:
        """Return what another process needs to connect, in JSON's types."""
        return {"etcd": asdict(self.cluster), "job": self.job}

    @property
    def timeout(self) -> timedelta:
        """How long requests that wait do so by default."""
        return self._timeout

    @property
    def lost(self) -> bool:
        """Whether the cluster was not reached for so long that this client has given up."""
        return self._gateway.failure is not None

    @property
    def failure(self) -> StoreLostError | None:
        """Why this client has given up; None if it has not."""
        return self._gateway.failure

    def close(self) -> None:
        """Break the connections; requests under way end with StoreError. Idempotent, no thread is left."""
        self._closing.set()
        self._gateway.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- keys ----------------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes, *, guard: Guard = NO_GUARD) -> None:
        """Write a value, over any other."""
        self.multi_set([key], [value], guard=guard)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes], *, guard: Guard = NO_GUARD) -> None:
        """Write several values; up to 50 at once."""
        for batch in _batches(list(dict(zip(keys, values, strict=True)).items()), _OPS // 2):
            deletions = [delete(self._span("k", f"{key}\0")) for key, _ in batch]  # of what was appended
            self._change(guard, [*(self._put("k", key, "", value) for key, value in batch), *deletions])

    def get(self, key: str, timeout: timedelta | None = None, *, guard: Guard = NO_GUARD) -> bytes:
        """Return the value of a key, once it exists. StoreTimeoutError if it does not in time."""
        return self.multi_get([key], timeout, guard=guard)[0]

    def get_within(self, key: str, timeout: timedelta, *, guard: Guard = NO_GUARD) -> bytes:
        """Return the value of a key, once it exists. StoreTimeoutError if it does not in time."""
        return self.get(key, timeout, guard=guard)

    def multi_get(
        self, keys: Sequence[str], timeout: timedelta | None = None, *, guard: Guard = NO_GUARD
    ) -> list[bytes]:
        """Return the values of keys, once all exist."""

        def look(request: Request) -> _Look:
            found: list[bytes] = []
            for batch in _batches(keys, _OPS):
                answers = self._read(request, guard, [read(self._content(key)) for key in batch])
                for number, key in enumerate(batch):
                    if not answers.entries(number):
                        return _Look(answers.revision, missing=self._content(key))
                    found.append(joined(answers.entries(number)))
            return _Look(0, found)

        return list(self._await(look, guard, timeout, few(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None, *, guard: Guard = NO_GUARD) -> None:
        """Wait until all these keys exist. StoreTimeoutError if they do not in time."""
        self.multi_get(keys, timeout, guard=guard)

    def add(self, key: str, amount: int, *, guard: Guard = NO_GUARD) -> int:
        """Add to a number, 0 if it does not exist yet; returns the sum."""
        while True:
            held, unchanged = self._look_at(key, guard)
            total = int(held or b"0") + amount
            if self._change(guard, [self._put("k", key, "", str(total))], unchanged) is not None:
                return total

    def append(self, key: str, value: str | bytes, *, guard: Guard = NO_GUARD) -> None:
        """Append to a value, empty if it does not exist yet."""
        self._change(guard, [self._put("k", key, uuid.uuid4().hex, value)])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys exist now."""
        for batch in _batches(keys, _OPS):
            answers = self._ask([read(self._content(key), count_only=True) for key in batch])
            if not all(answers.count(number) for number in range(len(batch))):
                return False
        return True

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes, *, guard: Guard = NO_GUARD) -> bytes:
        """Write `desired` if the key holds `expected`, or is absent and that is empty; returns what it holds then."""
        while True:
            held, unchanged = self._look_at(key, guard)
            if held != in_bytes(expected):
                return held
            if self._change(guard, [self._put("k", key, "", desired)], unchanged) is not None:
                return in_bytes(desired)

    def delete_key(self, key: str, *, guard: Guard = NO_GUARD) -> bool:
        """Delete a key; returns whether it existed."""
        answers = self._change(guard, [delete(self._content(key))])
        assert answers is not None
        return answers.deleted(0) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys and sets whose names begin so; returns how many values and members they had."""
        answers = self._change(NO_GUARD, [delete(self._span(kind, prefix)) for kind in "kswr"])
        assert answers is not None
        return answers.deleted(0) + answers.deleted(1)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        entries = self._ask([read(self._span("k", ""), keys_only=True)]).entries(0)
        return len({entry.name.rpartition(b"\0")[0] for entry in entries})

    # -- sets ----------------------------------------------------------------------------------------------------------

    def arrive(self, name: str, member: str, *, guard: Guard = NO_GUARD) -> int:
        """Put a member into a set, where it may be already; returns the size."""
        reads = [
            read(self._span("s", f"{name}\0"), count_only=True),
            read(self._span("w", f"{name}\0"), keys_only=True),
        ]
        answers = self._change(guard, [self._put("s", name, member), *reads])
        assert answers is not None
        size = answers.count(1)
        for wanted in map(suffix, answers.entries(2)):
            if int(wanted) <= size:
                self._change(guard, [self._put("r", name, wanted)])
        return size

    def wait_size(self, name: str, size: int, timeout: timedelta | None = None, *, guard: Guard = NO_GUARD) -> int:
        """Wait until a set has so many members; returns how many it has. StoreTimeoutError if not in time."""

        def look(request: Request) -> _Look:
            answers = self._read(request, guard, [read(self._span("s", f"{name}\0"), count_only=True)])
            if answers.count(0) >= size:
                return _Look(0, answers.count(0))
            return _Look(answers.revision, missing=Span(self._name("r", name, str(size))))

        self._change(guard, [self._put("w", name, str(size))])  # before the look: see `arrive`
        return int(self._await(look, guard, timeout, f"member {size} of {name!r}"))

    def members(self, name: str) -> frozenset[str]:
        """Return the members of a set; it is empty if nobody has arrived."""
        return frozenset(map(suffix, self._ask([read(self._span("s", f"{name}\0"), keys_only=True)]).entries(0)))

    # -- names ---------------------------------------------------------------------------------------------------------

    def _name(self, kind: str, name: str, rest: str) -> bytes:
        return f"{self._root}{kind}/{name}\0{rest}".encode()

    def _content(self, key: str) -> Span:
        """The value of a key, and what was appended to it."""
        name = self._name("k", key, "")
        return Span(name, after(name))

    def _span(self, kind: str, prefix: str) -> Span:
        """Everything of a kind whose name begins so, and is longer."""
        first = f"{self._root}{kind}/{prefix}".encode()
        return Span(first + b"\0" if prefix.endswith("\0") else first, after(first))

    def _put(self, kind: str, name: str, rest: str, value: str | bytes = b"") -> Message:
        return put(self._name(kind, name, rest), in_bytes(value), self._lease)

    # -- transactions --------------------------------------------------------------------------------------------------

    def _transact(
        self, request: Request, compare: list[Message], then: list[Message], otherwise: list[Message]
    ) -> Answers:
        document = {"compare": compare, "success": then, "failure": otherwise}
        return Answers(self._gateway.post(request, "/v3/kv/txn", document))

    def _read(self, request: Request, guard: Guard, reads: list[Message]) -> Answers:
        """Read, all at one time. StaleViewError if the guard does not hold then."""
        answers = self._transact(request, [], [*reads, read(Span(self._name("k", guard.key, "")))], [])
        _require(guard, answers.entries(len(reads)))
        return answers

    def _ask(self, reads: list[Message]) -> Answers:
        return self._gateway.run(lambda request: self._read(request, NO_GUARD, reads))

    def _look_at(self, key: str, guard: Guard) -> tuple[bytes, list[Message]]:
        """Return the value of a key, empty if there is none, and the condition that it is still the same."""
        entries = self._gateway.run(lambda request: self._read(request, guard, [read(self._content(key))])).entries(0)
        name = self._name("k", key, "")
        if any(entry.name != name for entry in entries):
            raise StoreError(f"{key!r} was appended to: in an etcd store it can neither be added to nor compared")
        version = entries[0].revision if entries else 0
        unchanged = [condition(Span(name), "MOD", version), condition(self._span("k", f"{key}\0"), "MOD", 0)]
        return joined(entries), unchanged

    def _change(self, guard: Guard, ops: list[Message], compare: Sequence[Message] = ()) -> Answers | None:
        """Change something, exactly once however often it is sent. None if the condition does not hold.

        StaleViewError if the guard does not hold.
        """
        serial = uuid.uuid4().hex
        guard_span = Span(self._name("k", guard.key, ""))
        guarded = [condition(guard_span, "VALUE", guard.value)] if guard.key else []

        def change(request: Request, slot: _Slot) -> Answers | None:
            mark = Span(self._name("m", self._id, str(slot.number)))
            then = [*ops, self._put("m", self._id, str(slot.number), serial)]
            while True:
                unmarked = condition(mark, "MOD", slot.revision)
                answers = self._transact(request, [unmarked, *guarded, *compare], then, [read(mark), read(guard_span)])
                if answers.succeeded:
                    slot.revision = answers.revision
                    return answers
                last = answers.entries(0)[0] if answers.entries(0) else None
                if last is not None and last.value == serial.encode():  # the first attempt was done, and not answered
                    slot.revision = last.revision
                    return self._transact(request, [], [as_of(op, last.revision) for op in ops], [])
                _require(guard, answers.entries(1))
                if last is None or last.revision == slot.revision:
                    return None
                slot.revision = last.revision  # an earlier change of this slot was done, and its answer never read

        with self._slots.one() as slot:
            return self._gateway.run(lambda request: change(request, slot))

    def _await(self, look: Callable[[Request], _Look], guard: Guard, timeout: timedelta | None, label: str) -> Any:
        """Look again whenever something has changed, until there is what is waited for."""
        limit_s = (self._timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + limit_s

        def wait(request: Request) -> Any:
            while True:
                found = look(request)
                if found.missing is None:
                    return found.value
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise StoreTimeoutError(f"{label} did not appear in the store within {limit_s:g} s")
                spans = [found.missing, *([Span(self._name("k", guard.key, ""))] if guard.key else [])]
                self._gateway.wait_for_event(request, map(place, spans), found.revision, min(left_s, _LOOK_S))

        return self._gateway.run(wait)

    # -- the lease -----------------------------------------------------------------------------------------------------

    def _make_lease(self, request: Request) -> None:
        try:
            self._gateway.post(request, "/v3/lease/grant", {"ID": str(self._lease), "TTL": str(_LEASE_S)})
        except StoreError as error:
            if "lease already exists" not in str(error):  # made by another process of the job
                raise

    def _stay(self) -> None:
        """Keep the lease alive, and notice when the cluster is lost."""
        renew_at = 0.0
        span = read(Span(self._name("k", "", "")))
        while not self._closing.wait(self._patience_s / 6):
            try:
                self._ask([span])
                if time.monotonic() >= renew_at:
                    self._gateway.run(self._renew_lease)
                    renew_at = time.monotonic() + _LEASE_S / 6
            except StoreError as error:
                if not self._closing.is_set():
                    _log.error("%s", error)
                return

    def _renew_lease(self, request: Request) -> None:
        answer = self._gateway.post(request, "/v3/lease/keepalive", {"ID": str(self._lease)})
        if int(answer.get("TTL", 0)) <= 0:
            raise StoreError(f"the lease of job {self.job!r} has expired: nobody kept it alive for {_LEASE_S} s")


class _Look(NamedTuple):
    """What a look found: a value, or at which revision of the store something was missing."""

    revision: int
    value: Any = None
    missing: Span | None = None


@dataclass
class _Slot:
    """Where a client leaves its marks, one change at a time. `revision` is that of the last mark, 0 without one."""

    number: int
    revision: int = 0


class _Slots:
    """As many slots as there were changes at a time."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._free: list[_Slot] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[_Slot]:
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot(next(self._numbers))
        yield slot  # one whose change was interrupted is not used again: the change may still be on its way
        self._free.append(slot)


def _own_address(peer: str) -> str:
    """Return the address that this machine has towards a host. StoreError if that has no address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError(f"the address of this machine towards {peer!r} is not known: {error}") from None


def _require(guard: Guard, held: list[Entry]) -> None:
    value = held[0].value if held else b""
    if guard.key and value != guard.value.encode():
        raise StaleViewError(
            f"the others went on without this process: it knows of {guard.key} {guard.value}, and it is "
            f"{value.decode(errors='replace')} now"
        )


def _batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
