"""Messages of the etcd interface that the store uses: transactions, and the ranges of keys they concern.

Source: etcd's documentation, "API reference": TxnRequest, RangeRequest, PutRequest, DeleteRangeRequest, Compare.
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple, TypeAlias

from inprocess.coordination.verbs import in_bytes

Message: TypeAlias = dict[str, Any]


class KeyRange(NamedTuple):
    """A key, or all keys from `first` to before `end`, in etcd's sense."""

    first: bytes
    end: bytes = b""


class Entry(NamedTuple):
    """A key of etcd with its value, and the revision at which it was last written."""

    name: bytes
    value: bytes
    revision: int


class Answers:
    """The answers to the operations of a transaction, by their position."""

    def __init__(self, document: Message) -> None:
        self.revision = int(document["header"]["revision"])
        self.succeeded = bool(document.get("succeeded"))
        self._responses = document.get("responses", [])

    def entries(self, position: int) -> list[Entry]:
        """Return the entries of a range."""
        found = self._responses[position]["response_range"].get("kvs", [])
        return [Entry(decoded(kv["key"]), decoded(kv.get("value", "")), int(kv["mod_revision"])) for kv in found]

    def count(self, position: int) -> int:
        """Return how many keys a range had."""
        return int(self._responses[position]["response_range"].get("count", 0))

    def deleted(self, position: int) -> int:
        """Return how many keys were deleted."""
        response = self._responses[position]
        if "response_range" in response:  # see `as_of`
            return self.count(position)
        return int(response["response_delete_range"].get("deleted", 0))


def place(keys: KeyRange) -> Message:
    """Return the fields of a message that name the keys it concerns."""
    return {"key": encoded(keys.first), **({"range_end": encoded(keys.end)} if keys.end else {})}


def read(keys: KeyRange, **options: bool) -> Message:
    """Return the operation that reads a range, in the order of creation."""
    return {"request_range": {**place(keys), "sort_order": "ASCEND", "sort_target": "CREATE", **options}}


def put(key: bytes, value: bytes, lease: int) -> Message:
    """Return the operation that writes a key with a lease."""
    return {"request_put": {"key": encoded(key), "value": encoded(value), "lease": str(lease)}}


def delete(keys: KeyRange) -> Message:
    """Return the operation that deletes all keys of a range."""
    return {"request_delete_range": place(keys)}


def condition(keys: KeyRange, target: str, value: int | str) -> Message:
    """Return the condition that all keys of a range have this value or revision; 0: there are none."""
    if target == "VALUE":
        return {**place(keys), "target": "VALUE", "result": "EQUAL", "value": encoded(in_bytes(str(value)))}
    return {**place(keys), "target": target, "result": "EQUAL", "mod_revision": str(value)}


def as_of(op: Message, revision: int) -> Message:
    """Return the read that repeats the answer of an operation, of a transaction applied at this revision."""
    if "request_delete_range" in op:
        return {"request_range": {**op["request_delete_range"], "count_only": True, "revision": str(revision - 1)}}
    if "request_put" in op:
        return {"request_range": {"key": op["request_put"]["key"], "count_only": True}}
    return {"request_range": {**op["request_range"], "revision": str(revision)}}


def joined(entries: list[Entry]) -> bytes:
    """Return all values, concatenated."""
    return b"".join(entry.value for entry in entries)


def suffix(entry: Entry) -> str:
    """Return the part of a name after the NUL."""
    return entry.name.rpartition(b"\0")[2].decode()


def after(name: bytes) -> bytes:
    """Return the end of the range of all names that begin with `name`."""
    return name[:-1] + bytes([name[-1] + 1])


def encoded(value: bytes) -> str:
    """Return bytes as the gateway accepts them."""
    return base64.b64encode(value).decode()


def decoded(text: str) -> bytes:
    """Return bytes that the gateway has returned."""
    return base64.b64decode(text)
