"""What a client has changed, so that it can change it again on another server."""

from __future__ import annotations

from dataclasses import dataclass

from inprocess.coordination.wire import Op

__all__ = ["Entry", "Journal"]


@dataclass(frozen=True)
class Entry:
    """One change: an operation that `Op.changes`, its number in the order of this client, and key, then values."""

    sequence: int
    op: Op
    arguments: tuple[bytes, ...]

    @property
    def place(self) -> tuple[bool, bytes]:
        """What is changed: whether it is a set, and its name."""
        return self.op is Op.ARRIVE, self.arguments[0]


class Journal:
    """The changes of one client that a new server needs. For one thread at a time: the client's lock is around it.

    Only the last `set` of a key is kept, whatever this client did to the key before; so a value that is written again
    and again takes up one entry. Deletions are not kept: replayed after another client's later `set`, they would
    destroy it.
    """

    def __init__(self) -> None:
        self._by_place: dict[tuple[bool, bytes], list[Entry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_place.values()))

    def record(self, entry: Entry) -> None:
        """Take in a change, before it is sent."""
        if entry.op is Op.DELETE_KEY:
            self._by_place.pop(entry.place, None)
        elif entry.op is Op.DELETE_PREFIX:
            self.forget(entry.arguments[0])
        elif entry.op is Op.SET:
            self._by_place[entry.place] = [entry]
        else:
            self._by_place.setdefault(entry.place, []).append(entry)

    def settle_compare_set(self, entry: Entry, won: bool) -> None:
        """Once the outcome is known, a won comparison is a `set`, and a lost one is nothing."""
        entries = self._by_place.get(entry.place, [])
        if entry not in entries:
            return  # superseded or forgotten meanwhile
        at = entries.index(entry)
        entries[at : at + 1] = [Entry(entry.sequence, Op.SET, (entry.arguments[0], entry.arguments[2]))] if won else []
        if not entries:
            del self._by_place[entry.place]

    def forget(self, prefix: bytes) -> None:
        """Drop all entries whose key (or set) begins so."""
        for place in [place for place in self._by_place if place[1].startswith(prefix)]:
            del self._by_place[place]

    def since(self, sequence: int) -> list[Entry]:
        """Return the entries with a higher number, in order."""
        found = [entry for entries in self._by_place.values() for entry in entries if entry.sequence > sequence]
        return sorted(found, key=lambda entry: entry.sequence)
