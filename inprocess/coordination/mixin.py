"""The verbs for any store of torch: `StoreMixin`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from inprocess.coordination.store_compat import CompatibleVerbs
from inprocess.coordination.verbs import StoreVerbs, VerbCall, meet_in_steps
from inprocess.coordination.wire import Op, number, pack_number
from inprocess.exception import StoreTimeoutError

_SHORTEST_S = 0.001  # torch's stores take 0 for "no limit"


class StoreMixin(CompatibleVerbs):
    """All verbs for a store of torch: `class MyStore(StoreMixin, torch.distributed.SomeStore)`.

    Usable from any thread that may use the store itself. The verbs become calls of the store of torch in `perform`;
    sets, which those stores lack, are made of keys. A store with other means overrides `perform`.
    """

    def perform(self, call: VerbCall) -> tuple[bytes, ...]:
        store: Any = super(StoreVerbs, self)  # the store of torch: its methods come behind those of the verbs
        names, values = list(call.names), call.values
        count = 0
        match call.op:
            case Op.SET if len(names) == 1:
                store.set(names[0], values[0])
            case Op.SET:
                store.multi_set(names, list(values))
            case Op.APPEND:
                store.append(names[0], values[0])
            case Op.COMPARE_SET:
                return (store.compare_set(names[0], *values),)
            case Op.GET:
                if call.timeout is not None:
                    self._wait(store, names, call.timeout)
                return tuple(store.get(name) for name in names)
            case Op.MEMBERS:
                return tuple(_members(store, names[0]))
            case Op.ADD:
                count = store.add(names[0], number(values[0]))
            case Op.CHECK:
                count = store.check(names)
            case Op.DELETE_KEY:
                count = store.delete_key(names[0])
            case Op.NUM_KEYS:
                count = store.num_keys()
            case Op.ARRIVE | Op.ATTEND:  # these stores do not notice that a process ends
                count = _arrive(store, names[0], values[0])
            case Op.MEET:
                return meet_in_steps(self.perform, call)
            case Op.WAIT_SIZE:
                count = self._wait_size(store, names[0], number(values[0]), call.timeout)
            case Op.DELETE_PREFIX:
                pass  # these stores cannot list their keys
            case _:
                raise NotImplementedError(f"a store of torch has no {call.op.name}")
        return (pack_number(count),)

    def _wait(self, store: Any, keys: Sequence[str], timeout: timedelta | None) -> None:
        seconds = max(self._limit(timeout).total_seconds(), _SHORTEST_S)
        started = time.monotonic()
        try:
            store.wait(list(keys), timedelta(seconds=seconds))
        except RuntimeError as error:  # torch has no special error for a timeout
            if time.monotonic() - started < 0.9 * seconds:
                raise
            raise StoreTimeoutError(f"{', '.join(keys)}: not in the store within {seconds:g} s") from error

    def _wait_size(self, store: Any, name: str, size: int, timeout: timedelta | None) -> int:
        found = len(_members(store, name))
        if found >= size:
            return found
        try:
            self._wait(store, [f"{name}/reached/{size}"], timeout)
        except StoreTimeoutError:
            # The process that should have reported the size may have died between the two steps of its arrival.
            if len(_members(store, name)) < size:
                raise
        return len(_members(store, name))


def _arrive(store: Any, name: str, member: bytes) -> int:
    store.append(f"{name}/members", member + b"\n")
    members = _members(store, name)
    # The member with which the set reaches a size reports it; `_wait_size` copes with one that died before that.
    store.set(f"{name}/reached/{members.index(member) + 1}", "1")
    return len(members)


def _members(store: Any, name: str) -> list[bytes]:
    key = f"{name}/members"
    return list(dict.fromkeys(store.get(key).splitlines())) if store.check([key]) else []
