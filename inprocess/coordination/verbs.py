"""The verbs of the store: one table, in which each verb is spelled once.

    StoreVerbs     its methods are the table: name, arguments, and the request that a call becomes
    Op (`wire`)    the operation of a request: whether it reads, waits or changes something, and whether it has a guard
    perform        takes any request; each kind of store has one, and looks at the operation only where it implements it

    Namespace, PrefixStore      add the prefix and the guard, and pass the request on
    TCPStore, EtcdStore         pass it on to their client
    StoreClient                 sends it as a frame: the server looks it up in the tables of `contents`
    EtcdClient                  looks it up in its table
    StoreMixin                  calls the store of torch that it is mixed into

So a new verb is an `Op`, a method here, and its implementation in `contents`, `etcd` and `mixin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from inprocess.coordination.wire import Op, number, pack_number


class Guard(NamedTuple):
    """A condition of requests: as long as `key` has this `value`. Otherwise they end with StaleViewError."""

    key: str
    value: str


NO_GUARD = Guard("", "")


class VerbCall(NamedTuple):
    """One call of a verb. A namespace prefixes the `names`, of keys or sets, and sets the guard if it `is_guarded`."""

    op: Op
    names: Sequence[str]
    values: Sequence[bytes] = ()
    timeout: timedelta | None = None  # of a verb that waits; None for that of the store
    is_guarded: bool = True
    guard: Guard = NO_GUARD

    def under(self, prefix: str, guard: Guard) -> VerbCall:
        """Return the request as a namespace passes it on."""
        op, names, values, timeout, is_guarded, _ = self
        names = [f"{prefix}/{name}" for name in names]
        return VerbCall(op, names, values, timeout, is_guarded, guard if is_guarded else NO_GUARD)

    @property
    def label(self) -> str:
        """The subject of a wait, for a message."""
        if self.op is Op.WAIT_SIZE:
            return f"member {number(self.values[0])} of {self.names[0]!r}"
        return few(self.names[-1:] if self.op is Op.MEET else self.names)


class StoreVerbs:
    """A store: keys with values, sets with members, and the verbs for them.

    Names are text, values bytes (text is encoded as UTF-8). Every change may be repeated. A verb that waits does so for
    `timeout`, by default that of the store, and raises StoreTimeoutError. In a namespace with a guard, verbs that
    change something or wait raise StaleViewError when that does not hold; `get` and `multi_get` do not, because what
    was decided may be read afterwards.
    """

    if TYPE_CHECKING:  # stores of torch have one of their own, behind this class

        @property
        def timeout(self) -> timedelta:
            """The default timeout of verbs that wait."""

    def perform(self, call: VerbCall) -> tuple[bytes, ...]:
        """Execute a request, and return the fields of its answer."""
        raise NotImplementedError(f"{type(self).__name__} does not define `perform`")

    def perform_all(self, calls: Sequence[VerbCall]) -> list[tuple[bytes, ...]]:
        """Execute requests that do not wait, in this order, and return the fields of each answer.

        With our server in one message. If one fails, later ones may have been applied all the same.
        """
        return [self.perform(call) for call in calls]

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, over any other."""
        self.perform(VerbCall(Op.SET, (key,), (in_bytes(value),)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values: in one step with our server, up to 50 in one with etcd."""
        written = dict(zip(keys, map(in_bytes, values), strict=True))
        self.perform(VerbCall(Op.SET, tuple(written), tuple(written.values())))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if it does not exist yet; return the sum."""
        return number(self.perform(VerbCall(Op.ADD, (key,), (pack_number(amount),)))[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, empty if it does not exist yet."""
        self.perform(VerbCall(Op.APPEND, (key,), (in_bytes(value),)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the key holds `expected`, or is absent and that is empty; return its value."""
        return self.perform(VerbCall(Op.COMPARE_SET, (key,), (in_bytes(expected), in_bytes(desired))))[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(number(self.perform(VerbCall(Op.DELETE_KEY, (key,)))[0]))

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys and sets whose names begin with `prefix`; return how many. A store of torch keeps them."""
        return number(self.perform(VerbCall(Op.DELETE_PREFIX, (prefix,), is_guarded=False))[0])

    def arrive(self, name: str, member: str) -> int:
        """Add a member (one line of text) to a set, which may contain it already; return the size."""
        return number(self.perform(VerbCall(Op.ARRIVE, (name,), (member.encode(),)))[0])

    def attend(self, name: str, member: str) -> int:
        """Add a member that leaves the set when this process has ended; return the size.

        To be repeated at least every two seconds: a member also leaves while its process has no connection, or is
        stopped for long. With etcd it leaves within ten seconds. In a store of torch it stays.
        """
        return number(self.perform(VerbCall(Op.ATTEND, (name,), (member.encode(),)))[0])

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        """Return the value of a key once it exists."""
        return self.multi_get((key,), timeout)[0]

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """Return the values of keys, once all exist."""
        return list(self.perform(VerbCall(Op.GET, keys, (), timeout, is_guarded=False)))

    def get_within(self, key: str, timeout: timedelta) -> bytes:
        """Return the value of a key once it exists."""
        return self.perform(VerbCall(Op.GET, (key,), (), timeout))[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys exist."""
        self.perform(VerbCall(Op.GET, keys, (), self._limit(timeout)))

    def wait_size(self, name: str, size: int, timeout: timedelta | None = None) -> int:
        """Wait until a set has `size` members; return how many it has."""
        return number(self.perform(VerbCall(Op.WAIT_SIZE, (name,), (pack_number(size),), self._limit(timeout)))[0])

    def meet(self, name: str, member: str, size: int, key: str, timeout: timedelta | None = None) -> bytes | None:
        """Add a member, and return the value of `key` once it exists; None if it does not, and the set has this size.

        So the process that has come last learns at once that it is to write the key. `arrive` and `get_within`, in one
        request with our server.
        """
        values = member.encode(), pack_number(size)
        found = self.perform(VerbCall(Op.MEET, (name, key), values, self._limit(timeout)))
        return found[0] if found else None

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys exist now."""
        return bool(number(self.perform(VerbCall(Op.CHECK, keys, is_guarded=False))[0]))

    def num_keys(self) -> int:
        """Return how many keys the whole store has."""
        return number(self.perform(VerbCall(Op.NUM_KEYS, (), is_guarded=False))[0])

    def members(self, name: str) -> frozenset[str]:
        """Return the members of a set, none if it does not exist."""
        return frozenset(member.decode() for member in self.perform(VerbCall(Op.MEMBERS, (name,), is_guarded=False)))

    def _limit(self, timeout: timedelta | None) -> timedelta:
        return self.timeout if timeout is None else timeout


def meet_in_steps(perform: Callable[[VerbCall], tuple[bytes, ...]], call: VerbCall) -> tuple[bytes, ...]:
    """Execute `meet` in a store that has no such request."""
    (name, key), (member, size) = call.names, call.values
    arrived = perform(call._replace(op=Op.ARRIVE, names=(name,), values=(member,)))
    found = perform(call._replace(op=Op.CHECK, names=(key,), values=()))
    if number(arrived[0]) >= number(size) and not number(found[0]):
        return ()
    return perform(call._replace(op=Op.GET, names=(key,), values=()))


def in_bytes(value: str | bytes) -> bytes:
    """Return a value as it is stored: text in UTF-8."""
    return value.encode() if isinstance(value, str) else bytes(value)


def few(keys: Sequence[str]) -> str:
    """Return the names of the first keys, for a message."""
    return ", ".join(map(repr, keys[:4])) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
