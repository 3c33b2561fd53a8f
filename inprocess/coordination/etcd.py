"""The coordination store in an etcd cluster: it survives the loss of any minority of the cluster's members.

The keys of a job begin with "/inprocess/<job>/" and have a lease: when no process of the job has renewed it for some
minutes, etcd deletes them all. Members that leave with their process have a short lease of that process.

    k/<key>\\0              the value of a key
    k/<key>\\0<serial>      what was appended to it, one part each; etcd knows their order
    s/<set>\\0<member>      a member of a set
    w/<set>\\0<size>        a client waits for the set to reach this size; the member that does so reports it
    r/<set>\\0<size>        the set has reached this size
    m/<client>/<slot>      the mark of the last change of a client, so that one that is sent twice is applied once

Each change is one transaction. It is applied only if the guard holds, and if the mark of the client does not show that
it was applied before. The revision of a mark is that of its change, and etcd still knows what the store contained then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from inprocess.coordination.etcd_gateway import EtcdCluster, EtcdGateway, EtcdRequest, address_towards
from inprocess.coordination.etcd_lease import EtcdLease
from inprocess.coordination.etcd_messages import (
    Answers,
    Entry,
    KeyRange,
    Message,
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
from inprocess.coordination.store_compat import CompatibleVerbs
from inprocess.coordination.verbs import NO_GUARD, Guard, VerbCall, in_bytes, meet_in_steps
from inprocess.coordination.wire import Op, number, pack_number
from inprocess.exception import StaleViewError, StoreError, StoreLostError, StoreTimeoutError
from inprocess.ipc.threads import JoinableThread

__all__ = ["EtcdClient", "EtcdCluster"]

_log = logging.getLogger(__name__)
_DEFAULT_TIMEOUT = timedelta(seconds=300)
_T = TypeVar("_T")
_LEASE_S = 900  # many heartbeat timeouts: without a renewal for so long, the job has ended
_PRESENCE_S = 10  # without a renewal for so long, the process has
_LOOKS = 6  # of the thread of a client, within its patience
_OPS = 100  # in a transaction; etcd accepts 128 by default
_CHECK_S = 5.0  # between checks of a wait, in case the process that should have reported a size has died


class EtcdClient(CompatibleVerbs):
    """Access to the store of a job in an etcd cluster. For any number of threads. Imports no torch.

    It has the verbs, guards and errors of `StoreClient`, with two differences: `multi_set` writes up to 50 keys in
    one step, and a key that was appended to can be read, written and deleted, but not used by `add` or `compare_set`.
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

        All processes of a job pass the same `job`, a name that no other job ever had. `timeout` is the default of
        requests that wait. `local_host` is the address by which other nodes reach this machine: the one it has towards
        MASTER_ADDR, or else towards etcd.
        """
        super().__init__()
        self.job = job
        self.local_host = address_towards(
            os.environ.get("MASTER_ADDR") or urlsplit(cluster.endpoints[0]).hostname or ""
        )
        self._root = f"/inprocess/{job}/"
        if cluster.is_open:
            _log.warning(
                "any process that reaches the etcd cluster at %s can end this job: pass a user or a certificate",
                cluster,
            )
        self._timeout = timeout
        self._patience_s = patience.total_seconds()
        self._id = uuid.uuid4().hex
        self._slots = _Slots()
        self._has_changed = False  # since the last look of the thread
        self._gateway = EtcdGateway(cluster, self._patience_s)
        self._lease = EtcdLease(self._gateway, self._root, _LEASE_S)
        self._presence = EtcdLease(self._gateway, f"{self._root}{self._id}", _PRESENCE_S)
        self._closing = threading.Event()
        self._thread = JoinableThread(self._stay, "inprocess-etcd-lease")
        try:
            self._lease.grant()
            self._change(NO_GUARD, [])  # fails without the permission to write
            self._thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def cluster(self) -> EtcdCluster:
        """The cluster that holds the store."""
        return self._gateway.cluster

    def to_document(self) -> dict[str, Any]:
        """Return what another process needs to connect, as JSON types."""
        return {"etcd": asdict(self.cluster), "job": self.job}

    @property
    def timeout(self) -> timedelta:
        """The default timeout of requests that wait."""
        return self._timeout

    @property
    def lost(self) -> bool:
        """Whether the store is lost: the cluster was unreachable, or refused changes, for too long."""
        return self._gateway.failure is not None

    @property
    def failure(self) -> StoreLostError | None:
        """Why the store is lost; None if it is not."""
        return self._gateway.failure

    def close(self) -> None:
        """Close the connections; pending requests end with StoreError. Idempotent, no thread is left."""
        self._closing.set()
        self._gateway.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def perform(self, call: VerbCall) -> tuple[bytes, ...]:
        return _VERBS[call.op](self, call)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _set(self, call: VerbCall) -> tuple[bytes, ...]:
        for batch in _batches(list(zip(call.names, call.values, strict=True)), _OPS // 2):
            deletions = [delete(self._range("k", f"{key}\0")) for key, _ in batch]  # removes what was appended
            self._change(call.guard, [*(self._put("k", key, "", value) for key, value in batch), *deletions])
        return ()

    def _get(self, call: VerbCall) -> tuple[bytes, ...]:
        def look(request: EtcdRequest) -> _Look[tuple[bytes, ...]]:
            found: list[bytes] = []
            for batch in _batches(call.names, _OPS):
                answers = self._read(request, call.guard, [read(self._content(key)) for key in batch])
                for nth, key in enumerate(batch):
                    if not answers.entries(nth):
                        return _Look(answers.revision, missing=self._content(key))
                    found.append(joined(answers.entries(nth)))
            return _Look(0, tuple(found))

        return self._await(look, call)

    def _add(self, call: VerbCall) -> tuple[bytes, ...]:
        (key,), (amount,) = call.names, call.values
        while True:
            held, unchanged = self._look_at(key, call.guard)
            total = int(held or b"0") + number(amount)
            if self._change(call.guard, [self._put("k", key, "", str(total))], unchanged) is not None:
                return (pack_number(total),)

    def _append(self, call: VerbCall) -> tuple[bytes, ...]:
        (key,), (value,) = call.names, call.values
        self._change(call.guard, [self._put("k", key, uuid.uuid4().hex, value)])
        return ()

    def _check(self, call: VerbCall) -> tuple[bytes, ...]:
        for batch in _batches(call.names, _OPS):
            answers = self._ask([read(self._content(key), count_only=True) for key in batch])
            if not all(answers.count(nth) for nth in range(len(batch))):
                return (pack_number(False),)
        return (pack_number(True),)

    def _compare_set(self, call: VerbCall) -> tuple[bytes, ...]:
        (key,), (expected, desired) = call.names, call.values
        while True:
            held, unchanged = self._look_at(key, call.guard)
            if held != expected:
                return (held,)
            if self._change(call.guard, [self._put("k", key, "", desired)], unchanged) is not None:
                return (desired,)

    def _delete_key(self, call: VerbCall) -> tuple[bytes, ...]:
        answers = self._change(call.guard, [delete(self._content(call.names[0]))])
        assert answers is not None
        return (pack_number(answers.deleted(0) > 0),)

    def _delete_prefix(self, call: VerbCall) -> tuple[bytes, ...]:
        answers = self._change(call.guard, [delete(self._range(kind, call.names[0])) for kind in "kswr"])
        assert answers is not None
        return (pack_number(answers.deleted(0) + answers.deleted(1)),)

    def _num_keys(self, _: VerbCall) -> tuple[bytes, ...]:
        entries = self._ask([read(self._range("k", ""), keys_only=True)]).entries(0)
        return (pack_number(len({entry.name.rpartition(b"\0")[0] for entry in entries})),)

    # -- sets ----------------------------------------------------------------------------------------------------------

    def _attend(self, call: VerbCall) -> tuple[bytes, ...]:
        if not self._presence.renew():
            self._presence.grant()
        return self._arrive(call, self._presence.id)

    def _arrive(self, call: VerbCall, lease: int = 0) -> tuple[bytes, ...]:
        (name,), (member,) = call.names, call.values
        reads = [
            read(self._range("s", f"{name}\0"), count_only=True),
            read(self._range("w", f"{name}\0"), keys_only=True),
        ]
        answers = self._change(call.guard, [self._put("s", name, member.decode(), lease=lease), *reads])
        assert answers is not None
        size = answers.count(1)
        for wanted in map(suffix, answers.entries(2)):
            if int(wanted) <= size:
                self._change(call.guard, [self._put("r", name, wanted)])
        return (pack_number(size),)

    def _wait_size(self, call: VerbCall) -> tuple[bytes, ...]:
        (name,), size = call.names, number(call.values[0])

        def look(request: EtcdRequest) -> _Look[tuple[bytes, ...]]:
            answers = self._read(request, call.guard, [read(self._range("s", f"{name}\0"), count_only=True)])
            if answers.count(0) >= size:
                return _Look(0, (pack_number(answers.count(0)),))
            return _Look(answers.revision, missing=KeyRange(self._name("r", name, str(size))))

        self._change(call.guard, [self._put("w", name, str(size))])  # before the look: see `_arrive`
        return self._await(look, call)

    def _members(self, call: VerbCall) -> tuple[bytes, ...]:
        entries = self._ask([read(self._range("s", f"{call.names[0]}\0"), keys_only=True)]).entries(0)
        return tuple(suffix(entry).encode() for entry in entries)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _name(self, kind: str, name: str, rest: str) -> bytes:
        return f"{self._root}{kind}/{name}\0{rest}".encode()

    def _content(self, key: str) -> KeyRange:
        """Return the range of the value of a key, and of what was appended to it."""
        name = self._name("k", key, "")
        return KeyRange(name, after(name))

    def _range(self, kind: str, prefix: str) -> KeyRange:
        """Return the range of all names of a kind that begin with `prefix` and are longer."""
        first = f"{self._root}{kind}/{prefix}".encode()
        return KeyRange(first + b"\0" if prefix.endswith("\0") else first, after(first))

    def _put(self, kind: str, name: str, rest: str, value: str | bytes = b"", lease: int = 0) -> Message:
        return put(self._name(kind, name, rest), in_bytes(value), lease or self._lease.id)

    # -- transactions --------------------------------------------------------------------------------------------------

    def _transact(
        self, request: EtcdRequest, compare: list[Message], then: list[Message], otherwise: list[Message]
    ) -> Answers:
        document = {"compare": compare, "success": then, "failure": otherwise}
        return Answers(self._gateway.post(request, "/v3/kv/txn", document))

    def _read(self, request: EtcdRequest, guard: Guard, reads: list[Message]) -> Answers:
        """Read at one revision. StaleViewError if the guard does not hold then."""
        answers = self._transact(request, [], [*reads, read(KeyRange(self._name("k", guard.key, "")))], [])
        _require(guard, answers.entries(len(reads)))
        return answers

    def _ask(self, reads: list[Message]) -> Answers:
        return self._gateway.run(lambda request: self._read(request, NO_GUARD, reads))

    def _look_at(self, key: str, guard: Guard) -> tuple[bytes, list[Message]]:
        """Return the value of a key (empty without one), and the condition that it is unchanged."""
        entries = self._gateway.run(lambda request: self._read(request, guard, [read(self._content(key))])).entries(0)
        name = self._name("k", key, "")
        if any(entry.name != name for entry in entries):
            raise StoreError(
                f"{key!r} was appended to: in an etcd store, such a key cannot be used by add or compare_set"
            )
        version = entries[0].revision if entries else 0
        unchanged = [condition(KeyRange(name), "MOD", version), condition(self._range("k", f"{key}\0"), "MOD", 0)]
        return joined(entries), unchanged

    def _change(self, guard: Guard, ops: list[Message], compare: Sequence[Message] = ()) -> Answers | None:
        """Apply a change exactly once, however often it is sent. Returns None if the condition does not hold.

        StaleViewError if the guard does not hold.
        """
        serial = uuid.uuid4().hex
        guard_range = KeyRange(self._name("k", guard.key, ""))
        guarded = [condition(guard_range, "VALUE", guard.value)] if guard.key else []

        def change(request: EtcdRequest, slot: _Slot) -> Answers | None:
            mark = KeyRange(self._name("m", self._id, str(slot.number)))
            then = [*ops, self._put("m", self._id, str(slot.number), serial)]
            while True:
                unmarked = condition(mark, "MOD", slot.revision)
                answers = self._transact(request, [unmarked, *guarded, *compare], then, [read(mark), read(guard_range)])
                if answers.succeeded:
                    self._has_changed = True
                    slot.revision = answers.revision
                    return answers
                last = answers.entries(0)[0] if answers.entries(0) else None
                if last is not None and last.value == serial.encode():
                    # An earlier attempt was applied, but its answer was lost.
                    slot.revision = last.revision
                    return self._transact(request, [], [as_of(op, last.revision) for op in ops], [])
                _require(guard, answers.entries(1))
                if last is None or last.revision == slot.revision:
                    return None
                slot.revision = last.revision  # an earlier change was applied, but its answer was never read

        with self._slots.one() as slot:
            return self._gateway.run(lambda request: change(request, slot))

    def _await(self, look: Callable[[EtcdRequest], _Look[_T]], call: VerbCall) -> _T:
        """Call `look` after every change until it finds what is waited for; return that."""
        limit_s, guard = self._limit(call.timeout).total_seconds(), call.guard
        deadline = time.monotonic() + limit_s

        def wait(request: EtcdRequest) -> _T:
            while True:
                found = look(request)
                if found.missing is None:
                    assert found.value is not None
                    return found.value
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise StoreTimeoutError(f"{call.label} did not appear in the store within {limit_s:g} s")
                ranges = [found.missing, *([KeyRange(self._name("k", guard.key, ""))] if guard.key else [])]
                self._gateway.wait_for_event(request, map(place, ranges), found.revision, min(left_s, _CHECK_S))

        return self._gateway.run(wait)

    # -- the lease -----------------------------------------------------------------------------------------------------

    def _stay(self) -> None:
        """Renew the lease, and notice when the cluster is lost, or accepts no changes, although it answers reads."""
        renew_at, refused = 0.0, 0
        while not self._closing.wait(self._patience_s / _LOOKS):
            try:
                if not self._has_changed:
                    self._change(NO_GUARD, [])
                self._has_changed = False
                if time.monotonic() >= renew_at:
                    if not self._lease.renew():
                        raise StoreError(
                            f"the lease of job {self.job!r} has expired: no process renewed it for {_LEASE_S} s"
                        )
                    renew_at = time.monotonic() + _LEASE_S / 6
                refused = 0
            except StoreError as error:
                if self._closing.is_set():
                    return
                _log.error("%s", error)
                refused += 1
                if refused == _LOOKS:
                    self._gateway.give_up(f"for {self._patience_s:g} s, no change was possible: {error}")
                if self.lost:
                    return


_VERBS: Mapping[Op, Callable[[EtcdClient, VerbCall], tuple[bytes, ...]]] = MappingProxyType(
    {
        Op.SET: EtcdClient._set,
        Op.GET: EtcdClient._get,
        Op.ADD: EtcdClient._add,
        Op.APPEND: EtcdClient._append,
        Op.CHECK: EtcdClient._check,
        Op.COMPARE_SET: EtcdClient._compare_set,
        Op.DELETE_KEY: EtcdClient._delete_key,
        Op.DELETE_PREFIX: EtcdClient._delete_prefix,
        Op.NUM_KEYS: EtcdClient._num_keys,
        Op.ARRIVE: EtcdClient._arrive,
        Op.ATTEND: EtcdClient._attend,
        Op.WAIT_SIZE: EtcdClient._wait_size,
        Op.MEET: lambda client, call: meet_in_steps(client.perform, call),
        Op.MEMBERS: EtcdClient._members,
    }
)


class _Look(NamedTuple, Generic[_T]):
    """Result of a look: a value, or what was missing and at which revision of the store."""

    revision: int
    value: _T | None = None
    missing: KeyRange | None = None


@dataclass
class _Slot:
    """The key for the marks of a client, one change at a time. `revision` is that of the last mark, 0 without one."""

    number: int
    revision: int = 0


class _Slots:
    """As many slots as there were changes at the same time."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._free: list[_Slot] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[_Slot]:
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot(next(self._numbers))
        yield slot  # after an interruption the slot is not used again: the change may still arrive
        self._free.append(slot)


def _require(guard: Guard, held: list[Entry]) -> None:
    value = held[0].value if held else b""
    if guard.key and value != guard.value.encode():
        raise StaleViewError(
            f"the others went on without this process: it expects {guard.key} {guard.value}, but the value is "
            f"{value.decode(errors='replace')} now"
        )


def _batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
