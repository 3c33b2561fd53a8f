"""What a server holds: keys, sets, and which changes of which client it has applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from inprocess.coordination.wire import MAX_CHANGE, Frame, Op, WireError, decode_body, encode, number, pack_number

__all__ = ["Change", "Contents"]


@dataclass(frozen=True)
class Change:
    """What became of a request to change something. `answer` is a whole frame; `touched` is nothing if it was known."""

    answer: bytes
    fresh: bool
    key: bytes | None = None
    set_name: bytes | None = None


@dataclass
class _Memory:
    """The changes of one client. Everything below `floor` is decided: applied and answered, or given up.

    A client raises its floor only past changes whose answer it has (or wants no more), so a frame below the floor can
    only be a late copy, and must not be applied.
    """

    floor: int = 0
    answers: dict[int, bytes] = field(default_factory=dict)

    def raise_floor(self, floor: int) -> None:
        if floor > self.floor:
            self.floor = floor
            for number_ in [known for known in self.answers if known < floor]:
                del self.answers[number_]


class Contents:
    """Keys and sets, changed at most once by each (client, sequence number). For one thread.

    A mirror applies the very frames that the active server applied, in the same order, and so remembers the same
    changes: a client that replays its journal there changes only what the mirror has not seen.
    """

    def __init__(self) -> None:
        self.keys: dict[bytes, bytes] = {}
        self.sets: dict[bytes, dict[bytes, None]] = {}  # members in order of arrival
        self._clients: dict[bytes, _Memory] = {}

    def change(self, client: bytes, frame: Frame) -> Change:
        """Apply a frame that changes contents, unless it was applied before. ValueError if it is malformed."""
        sequence, floor, *arguments = frame.fields
        memory = self._clients.setdefault(client, _Memory())
        memory.raise_floor(number(floor))
        index = number(sequence)
        if index in memory.answers:
            return Change(memory.answers[index], fresh=False)
        if index < memory.floor:
            return Change(encode(Op.FAILED, b"a late copy of a request that was given up"), fresh=False)
        key, set_name = None, None
        try:
            if frame.op is Op.ARRIVE:
                set_name, member = arguments
                answer = self._arrive(set_name, member)
            elif frame.op is Op.DELETE_PREFIX:
                (prefix,) = arguments
                answer = self._delete_prefix(prefix)
            else:
                key, *values = arguments
                answer = self._change_key(frame.op, key, values)
        except _NotApplicable as error:
            answer = encode(Op.FAILED, str(error).encode())
        memory.answers[index] = answer
        return Change(answer, True, key, set_name)

    def mirror(self, frame: Frame) -> None:
        """Apply a frame from the active server. ValueError or WireError if it is none of those."""
        if frame.op is Op.MIRROR:
            client, body = frame.fields
            self.change(client, decode_body(body))
        elif frame.op is Op.MIRROR_KEY:
            key, value = frame.fields
            self.keys[key] = value
        elif frame.op is Op.MIRROR_MEMBERS:
            name, *members = frame.fields
            self.sets[name] = dict.fromkeys(members)
        elif frame.op is Op.MIRROR_CLIENT:
            client, floor, *rest = frame.fields
            answers = {number(rest[at]): rest[at + 1] for at in range(0, len(rest), 2)}
            self._clients[client] = _Memory(number(floor), answers)
        elif frame.op is Op.MIRROR_RESET:
            self.keys, self.sets, self._clients = {}, {}, {}
        else:
            raise WireError(f"{frame.op.name} from a server that is mirrored")

    def snapshot(self) -> Iterator[bytes]:
        """Yield frames from which `mirror` makes the same contents."""
        yield encode(Op.MIRROR_RESET)
        for key, value in self.keys.items():
            yield encode(Op.MIRROR_KEY, key, value)
        for name, members in self.sets.items():
            yield encode(Op.MIRROR_MEMBERS, name, *members)
        for client, memory in self._clients.items():
            answers = (part for index, answer in memory.answers.items() for part in (pack_number(index), answer))
            yield encode(Op.MIRROR_CLIENT, client, pack_number(memory.floor), *answers)

    def _change_key(self, op: Op, key: bytes, values: list[bytes]) -> bytes:
        if op is Op.DELETE_KEY:
            return encode(Op.OK, pack_number(self.keys.pop(key, None) is not None))
        if op is Op.COMPARE_SET:
            expected, desired = values
            return encode(Op.OK, self._compare_set(key, expected, desired))
        (value,) = values
        if op is Op.SET:
            self.keys[key] = value
        elif op is Op.APPEND:
            longer = self.keys.get(key, b"") + value
            if len(longer) > MAX_CHANGE:
                raise _NotApplicable(f"key {key!r} would grow beyond {MAX_CHANGE} bytes")
            self.keys[key] = longer
        elif op is Op.ADD:
            total = self._counter(key) + number(value)
            self.keys[key] = str(total).encode()
            return encode(Op.OK, pack_number(total))
        else:
            raise WireError(f"{op.name} changes nothing")
        return encode(Op.OK)

    def _counter(self, key: bytes) -> int:
        text = self.keys.get(key, b"0")
        try:
            return int(text)
        except ValueError:
            raise _NotApplicable(f"key {key!r} holds {text[:100]!r}, which is not a number to add to") from None

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        current = self.keys.get(key)
        if current is None and expected:
            return expected  # as torch's stores answer when the key is absent
        if current is None or current == expected:
            self.keys[key] = desired
            return desired
        return current

    def _arrive(self, name: bytes, member: bytes) -> bytes:
        members = self.sets.setdefault(name, {})
        members[member] = None
        return encode(Op.OK, pack_number(len(members)))

    def _delete_prefix(self, prefix: bytes) -> bytes:
        keys = [key for key in self.keys if key.startswith(prefix)]
        sets = [name for name in self.sets if name.startswith(prefix)]
        for key in keys:
            del self.keys[key]
        for name in sets:
            del self.sets[name]
        return encode(Op.OK, pack_number(len(keys) + len(sets)))


class _NotApplicable(Exception):
    """The change makes no sense on what the key holds."""
