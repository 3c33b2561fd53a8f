"""Contents of the server: keys, sets, the changes already applied for each client, and the waiting requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from inprocess.coordination.wire import MAX_VALUE, Frame, Op, WireError, number, pack_fields, pack_number

_MOST_BYTES = 256 << 20  # of all values and names together

Answer = tuple[Op, bytes]  # with its fields as they are sent: thousands of waiters may get the same
_OK: Answer = (Op.OK, b"")
_K = TypeVar("_K")
_P = TypeVar("_P")


def answer_number(value: int) -> Answer:
    """Return the answer that is a number."""
    return Op.OK, pack_fields(pack_number(value))


class NotApplicable(Exception):
    """The change does not fit the value of the key, or would make the store too large."""

    @property
    def answer(self) -> Answer:
        return Op.FAILED, pack_fields(str(self).encode())


@dataclass(slots=True)
class _Memory:
    """The changes of one client. Everything below `floor` is settled: applied and answered, or given up.

    A client raises its floor only past changes whose answer it has (or no longer needs), so a frame below the floor is
    a late copy, and must not be applied.
    """

    floor: int = 0
    latest: int = 0  # the highest id of `answers`
    answers: dict[int, Answer] = field(default_factory=dict)

    def raise_floor(self, floor: int) -> None:
        if floor > self.floor:
            self.floor = floor
            if floor > self.latest:
                self.answers.clear()
            else:
                self.answers = {id: answer for id, answer in self.answers.items() if id >= floor}


class Change(NamedTuple):
    """The result of a request that changes something: the answer, and what it changed (nothing if applied before)."""

    answer: Answer
    keys: tuple[bytes, ...] = ()
    set_name: bytes | None = None


class Contents:
    """Keys and sets, changed at most once for each (client, id). For one thread."""

    def __init__(self) -> None:
        self.keys: dict[bytes, bytes | bytearray] = {}  # what was appended to is a bytearray: it grows in place
        # Members in the order of arrival, each with its owner, which takes it away when it leaves; None: it stays.
        self.sets: dict[bytes, dict[bytes, object]] = {}
        self._bytes = 0
        self._clients: dict[bytes, _Memory] = {}

    def stale(self, guard: tuple[bytes, bytes]) -> Answer | None:
        """Return the answer to a request whose guard does not hold; None if it does, or there is none."""
        key, expected = guard
        if not key or self.keys.get(key, b"") == expected:
            return None
        return self.stale_answer(key)

    def stale_answer(self, key: bytes) -> Answer:
        """Return the answer to requests whose guard is that this key has another value."""
        return Op.STALE, pack_fields(bytes(self.keys.get(key, b"")))

    def forget_client(self, client: bytes) -> None:
        """Forget a client that sends nothing more."""
        self._clients.pop(client, None)

    def change(self, client: bytes, frame: Frame) -> Change:
        """Apply a frame that changes contents, unless it was applied before. ValueError if it is malformed."""
        op, id, (guard_key, guard_value, floor, *arguments) = frame
        memory = self._clients.get(client)
        if memory is None:
            memory = self._clients[client] = _Memory()
        memory.raise_floor(number(floor))
        if id in memory.answers:
            return Change(memory.answers[id])
        if id < memory.floor:
            return Change((Op.FAILED, pack_fields(b"a late copy of a request that was given up")))
        if guard_key and self.keys.get(guard_key, b"") != guard_value:
            return Change(self.stale_answer(guard_key))
        try:
            change = _CHANGES[op](self, arguments)
        except NotApplicable as error:
            change = Change(error.answer)
        memory.answers[id] = change[0]
        if id > memory.latest:
            memory.latest = id
        return change

    def read(self, frame: Frame) -> Answer:
        """Return the answer to a frame that reads. ValueError if it is malformed."""
        if frame.op is Op.MEMBERS:
            (name,) = frame.fields
            return Op.OK, pack_fields(*self.sets.get(name, ()))
        return answer_number(
            len(self.keys) if frame.op is Op.NUM_KEYS else all(map(self.keys.__contains__, frame.fields))
        )

    def answer_to(self, waiter: Waiter[Any]) -> Answer | None:
        """Return the answer to a waiting request; None as long as its condition does not hold."""
        if waiter.set_name is not None:
            size = len(self.sets.get(waiter.set_name, ()))
            return answer_number(size) if size >= waiter.size else None
        return self.values(waiter.keys)

    def values(self, keys: tuple[bytes, ...]) -> Answer | None:
        """Return the answer with the values of keys; None unless all exist."""
        for key in keys:
            if key not in self.keys:
                return None
        return Op.OK, pack_fields(*[self.keys[key] for key in keys])

    def meet(self, waiter: Waiter[Any], name: bytes, member: bytes, size: int) -> Answer | None:
        """Add a member; return the answer to the wait for a key; OK if there is none, and the set has this size."""
        try:
            is_last = self._enter(name, member, None) >= size
        except NotApplicable as error:
            return error.answer
        return self.answer_to(waiter) or (_OK if is_last else None)

    def attend(self, owner: object, name: bytes, member: bytes) -> Answer:
        """Add a member that `leave` takes away again, unless it has another owner by then."""
        try:
            return answer_number(self._enter(name, member, owner))
        except NotApplicable as error:
            return error.answer

    def leave(self, owner: object, name: bytes, member: bytes) -> None:
        """Remove a member, if it belongs to this owner."""
        members = self.sets.get(name, {})
        if members.get(member) is owner:
            del members[member]
            self._bytes -= len(member)

    def _set_all(self, arguments: Sequence[bytes]) -> Change:
        if len(arguments) % 2:
            raise WireError("a key without a value")
        half = len(arguments) // 2
        keys = tuple(arguments[:half])
        for key, value in zip(keys, arguments[half:], strict=True):
            self._set(key, value)
        return Change(_OK, keys)

    def _add(self, arguments: Sequence[bytes]) -> Change:
        key, amount = arguments
        total = self._counter(key) + number(amount)
        self._set(key, str(total).encode())
        return Change(answer_number(total), (key,))

    def _append(self, arguments: Sequence[bytes]) -> Change:
        key, value = arguments
        current = self.keys.get(key, b"")
        if len(current) + len(value) > MAX_VALUE:
            raise NotApplicable(f"key {key!r} would have {len(current) + len(value)} bytes; the limit is {MAX_VALUE}")
        self._grow(len(value))
        if not isinstance(current, bytearray):
            current = self.keys[key] = bytearray(current)
        current += value
        return Change(_OK, (key,))

    def _compare_set(self, arguments: Sequence[bytes]) -> Change:
        key, expected, desired = arguments
        current = self.keys.get(key)
        if current is None and expected:
            return Change((Op.OK, pack_fields(expected)))  # as torch's stores answer when the key is absent
        if current is None or (current == expected and current != desired):
            self._set(key, desired)
            return Change((Op.OK, pack_fields(desired)), (key,))
        return Change((Op.OK, pack_fields(bytes(current))))

    def _delete_key(self, arguments: Sequence[bytes]) -> Change:
        (key,) = arguments
        old = self.keys.pop(key, None)
        self._bytes -= len(old or b"")
        return Change(answer_number(old is not None), () if old is None else (key,))

    def _delete_prefix(self, arguments: Sequence[bytes]) -> Change:
        (prefix,) = arguments
        keys = [key for key in self.keys if key.startswith(prefix)]
        sets = [name for name in self.sets if name.startswith(prefix)]
        for key in keys:
            self._bytes -= len(self.keys.pop(key))
        for name in sets:
            self._bytes -= sum(map(len, self.sets.pop(name)))
        return Change(answer_number(len(keys) + len(sets)))

    def _arrive(self, arguments: Sequence[bytes]) -> Change:
        name, member = arguments
        return Change(answer_number(self._enter(name, member, None)), set_name=name)

    def _enter(self, name: bytes, member: bytes, owner: object) -> int:
        members = self.sets.setdefault(name, {})
        if member not in members:
            self._grow(len(member))
        elif members[member] is None:
            owner = None
        members[member] = owner
        return len(members)

    def _set(self, key: bytes, value: bytes) -> None:
        if len(value) > MAX_VALUE:
            raise NotApplicable(f"key {key!r} would have {len(value)} bytes; the limit is {MAX_VALUE}")
        self._grow(len(value) - len(self.keys.get(key, b"")))
        self.keys[key] = value

    def _grow(self, size: int) -> None:
        if self._bytes + size > _MOST_BYTES:
            raise NotApplicable(f"the store is full: it holds {self._bytes} bytes; the limit is {_MOST_BYTES}")
        self._bytes += size

    def _counter(self, key: bytes) -> int:
        text = self.keys.get(key, b"0")
        try:
            return int(text)
        except ValueError:
            raise NotApplicable(f"key {key!r} holds {text[:100]!r}, which is not a number to add to") from None


_CHANGES: Mapping[Op, Callable[[Contents, Sequence[bytes]], Change]] = MappingProxyType(
    {
        Op.SET: Contents._set_all,
        Op.ADD: Contents._add,
        Op.APPEND: Contents._append,
        Op.COMPARE_SET: Contents._compare_set,
        Op.DELETE_KEY: Contents._delete_key,
        Op.DELETE_PREFIX: Contents._delete_prefix,
        Op.ARRIVE: Contents._arrive,
    }
)


@dataclass(eq=False, slots=True)
class Waiter(Generic[_P]):
    """One waiting request of `peer`: for all of `keys`, or for `size` members of the set `set_name`."""

    peer: _P
    id: int
    guard: tuple[bytes, bytes]
    keys: tuple[bytes, ...] = ()
    set_name: bytes | None = None
    size: int = 0
    filed: bytes = b""  # the key it is filed under: one that is missing


class Waiters(Generic[_P]):
    """The waiting requests, indexed so that a change looks only at those it may concern. For one thread."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, dict[Waiter[_P], None]] = {}
        self._by_size: dict[bytes, dict[int, dict[Waiter[_P], None]]] = {}
        self._by_guard: dict[bytes, dict[bytes, dict[Waiter[_P], None]]] = {}  # by key, then value

    def file(self, waiter: Waiter[_P], missing: bytes = b"") -> None:
        """Add a waiter; `missing` is one of its keys that does not exist yet."""
        if waiter.set_name is not None:
            self._by_size.setdefault(waiter.set_name, {}).setdefault(waiter.size, {})[waiter] = None
        else:
            waiter.filed = missing
            self._by_key.setdefault(missing, {})[waiter] = None
        key, value = waiter.guard
        if key:
            self._by_guard.setdefault(key, {}).setdefault(value, {})[waiter] = None

    def depend_on(self, key: bytes) -> bool:
        """Return whether a waiter is filed under this key, or it is that of its guard."""
        return key in self._by_key or key in self._by_guard

    def of_key(self, key: bytes) -> Sequence[Waiter[_P]]:
        """Return the waiters filed under this key."""
        return tuple(self._by_key.get(key, ()))

    def of_size(self, name: bytes, size: int) -> Sequence[Waiter[_P]]:
        """Return the waiters for at most this size of the set."""
        by_size = self._by_size.get(name)
        if not by_size:
            return ()
        return [waiter for wanted in sorted(by_size) if wanted <= size for waiter in by_size[wanted]]

    def of_guard(self, key: bytes, value: bytes | bytearray) -> Sequence[Waiter[_P]]:
        """Return the waiters whose guard is that this key has another value."""
        by_value = self._by_guard.get(key, {})
        return [waiter for wanted, waiters in by_value.items() if wanted != value for waiter in waiters]

    def discard(self, waiter: Waiter[_P]) -> None:
        """Remove a waiter that is filed."""
        if waiter.set_name is not None:
            by_size = self._by_size[waiter.set_name]
            _drop(by_size, waiter.size, waiter)
            if not by_size:
                del self._by_size[waiter.set_name]
        else:
            _drop(self._by_key, waiter.filed, waiter)
        key, value = waiter.guard
        if key:
            by_value = self._by_guard[key]
            _drop(by_value, value, waiter)
            if not by_value:
                del self._by_guard[key]


def _drop(table: dict[_K, dict[Waiter[_P], None]], key: _K, waiter: Waiter[_P]) -> None:
    filed = table[key]
    del filed[waiter]
    if not filed:
        del table[key]
