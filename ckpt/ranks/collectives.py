"""The ranks of the job, and the collectives that checkpoints need, of bytes: an all-gather and a maximum.

Used when a state is planned and when one is restored; never in a training step. The ranks meet before each, with a
deadline (see `rounds`), so that if one does not arrive the others lose this call and nothing more. `Ranks` are those of
a process group of torch; `StoreRanks` have none yet, and use a store alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.errors import CheckpointError, CheckpointTimeoutError
from ckpt.ranks.group import Group, collective_device, torch_distributed
from ckpt.ranks.rounds import Attendance, LateRanks, MissingRanksError, Round, gather, meet, named
from inprocess.ipc.suspension import Suspension

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_log = logging.getLogger("ckpt")
_T = TypeVar("_T")
_TOLD = 16  # names that are kept
_TOLD_THAT = "a rank has told that it cannot take part"
_MOVED_BY_REDUCTION = 2
"""How many times its bytes a reduction moves."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.25
_PAUSE = 0.1  # of the time waited
_ATTENDED_S = 1.0  # a wait of so long is written in an `Attendance`
_HEAD = struct.Struct("<QQ")  # the size of a payload, and a checksum of what the rank does
_MIN_HEAD_BYTES, _MAX_HEAD_BYTES, _ALL_HEADS_BYTES = 80, 1024, 64 << 10


class Ranks(Group):
    """This rank among all ranks of a process group (the default one if None). Without torch.distributed: one rank.

    A process that had a group keeps its rank when that is destroyed, until `forget`: the abort of a restart destroys it
    in another thread, at any time. `timeout_s` bounds the wait for the other ranks in each collective. `doing` is the
    current operation, for messages; it must be the same on all ranks.
    """

    def __init__(self, process_group: ProcessGroup | None = None, timeout_s: float = 600.0) -> None:
        super().__init__()
        self.doing = "a checkpoint operation"
        self.attempt: str | None = None
        """The name under which a rank that cannot take part in this operation tells the others why (`tell_first`)."""
        self._timeout_s = timeout_s
        self._group = process_group
        self._last: tuple[int, int] | None = None  # rank and world size, when `rank` was asked for
        self._told: deque[str] = deque()

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        self._last = self._now()
        return self._last[0]

    @property
    def last_rank(self) -> int | None:
        """The rank of this process; None without a process group if `rank` was not asked for since `forget`."""
        return None if torch_distributed() is None and self._last is None else self.rank

    def forget(self) -> None:
        """Forget the rank, after the process group was destroyed: in the next one it may be another."""
        self._last = None
        self._told.clear()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._now()[1]

    def _now(self) -> tuple[int, int]:
        distributed = torch_distributed()
        try:
            if distributed is not None:
                return int(distributed.get_rank(self._group)), int(distributed.get_world_size(self._group))
        except ValueError:  # destroyed since then
            if self._last is None:
                raise
        return self._last or (0, 1)

    def __call__(self, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all ranks, by rank. Collective; raw bytes, nothing is unpickled.

        CheckpointTimeoutError, naming the missing ranks, when not all arrive in time, or one is known to have died; the
        process group can still be used then. CheckpointError if the ranks call different operations, if the process
        group was destroyed, or if it fails.
        """
        if self.world_size == 1:
            return [payload]
        with self._collective() as distributed:
            return self._exchange(distributed, payload, *self._enter(distributed, payload))

    def maximum(self, payload: bytes) -> bytes:
        """Return the largest byte at each position of the payloads of all ranks, which have one size. Collective.

        A rank moves twice the size of a payload, whatever the number of ranks. Raises what a call of this object does;
        also CheckpointError, on all ranks, if the sizes differ.
        """
        if self.world_size == 1:
            return payload
        with self._collective() as distributed:
            sizes, _ = self._enter(distributed, payload)
            if len(set(sizes)) > 1:
                raise CheckpointError(f"the ranks have payloads of {min(sizes)} to {max(sizes)} bytes, not of one size")
            return self._reduce(distributed, bytearray(payload))

    def minimum(self, *numbers: int) -> list[int]:
        """Return the smallest of each number over all ranks. Collective: one all_reduce and no meeting before it.

        For calls that a training loop makes often. The deadline is that of the process group, whose errors it raises; a
        long wait is a warning that names the missing ranks.
        """
        import torch
        import torch.distributed as dist

        smallest = torch.tensor(numbers, dtype=torch.int64, device=collective_device(self._group))
        work = dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        if work is not None:
            self._wait_for(work)
        return [int(number) for number in smallest.tolist()]

    def _wait_for(self, work: Any) -> None:
        """Wait until a collective has ended, and raise its error."""
        begin, is_noted = time.monotonic(), False
        suspension, late = Suspension(), LateRanks()

        def ask(call: Callable[[Attendance], None]) -> None:
            self.in_store(lambda store: call(Attendance(store, "reduce", self.rank, self.world_size)), None)

        try:
            while not work.is_completed():
                begin += suspension.missed_s()
                waited_s = time.monotonic() - begin
                if not is_noted and waited_s >= _ATTENDED_S:
                    is_noted = True
                    ask(Attendance.note)
                if late.is_due(waited_s):
                    ask(functools.partial(self._warn, late, waited_s))
                pause_s = min(max(_FIRST_PAUSE_S, waited_s * _PAUSE), _LONGEST_PAUSE_S)
                suspension.expect(pause_s)
                time.sleep(pause_s)
        finally:
            if is_noted:
                ask(Attendance.forget)
        work.wait()

    def _warn(self, late: LateRanks, waited_s: float, place: Attendance) -> None:
        place.warn(late, waited_s, None, self.doing, "the same methods of the queue")

    @contextlib.contextmanager
    def _collective(self) -> Iterator[Any]:
        """Yield torch.distributed; CheckpointError if there is no process group any more, or if it fails."""
        distributed = torch_distributed()
        if distributed is None:
            raise CheckpointError(
                f"rank {self.rank} of {self.world_size} has no process group any more to agree with the others: save "
                "and restore before it is destroyed, or after it is made again",
                rank=self.rank,
            )
        try:
            yield distributed
        except RuntimeError as error:  # PyTorch and its backends raise many kinds
            raise CheckpointError(
                f"rank {self.rank}: the ranks cannot agree on {self.doing}, the process group or its store failed; a "
                f"rank died, or the group was destroyed meanwhile: {error}",
                rank=self.rank,
            ) from error

    def _enter(self, distributed: Any, payload: bytes) -> tuple[list[int], list[bytes]]:
        """Wait until all ranks have arrived, with the same operation; return sizes and beginnings of their payloads."""
        while True:
            self._meet()
            check = zlib.crc32(f"{self.doing} {self.attempt}".encode())
            sizes, checks, begins = self._exchange_heads(distributed, payload, check)
            if len(set(checks)) == 1:
                return sizes, begins
            doing = bytes([self._refusal() is not None]) + self.doing.encode()
            sizes, _, begins = self._exchange_heads(distributed, doing, 0)
            self._compare(self._exchange(distributed, doing, sizes, begins))

    def tell_first(self, name: str, text: str | None) -> str | None:
        """Tell the other ranks a text under `name`, unless one was told before; return the first. Never waits.

        With None only return it, None if there is none. Without a process group, or if its store fails, return `text`.
        The last names are kept.
        """
        return self.in_store(lambda store: self._tell_first(store, name, text), text)

    def _tell_first(self, store: Any, name: str, text: str | None) -> str | None:
        told = Round(store, f"told/{name}", self.world_size)
        if text is None:
            return told.decision
        first = told.decide(text)
        if first == text:
            self._told.append(name)
            while len(self._told) > _TOLD:
                Round(store, f"told/{self._told.popleft()}", self.world_size).delete()
        return first

    def in_store(self, ask: Callable[[Any], _T], otherwise: _T) -> _T:
        """Return the result of `ask(store())`; `otherwise` without a process group, and if its store fails."""
        try:
            return otherwise if (store := self.store()) is None else ask(store)
        except (RuntimeError, ValueError) as error:
            _log.debug("the store of the process group failed: %s", error)
            return otherwise

    def store(self) -> Any:
        """Return the part of the store that is for this group; None without a process group."""
        distributed = torch_distributed()
        if distributed is None:
            return None
        group = distributed.group.WORLD if self._group is None else self._group
        return distributed.PrefixStore(f"ckpt/{group.group_name}", distributed.distributed_c10d._get_default_store())

    def whole_store(self) -> Any:
        """Return the store of all process groups, another object when they are made anew; None without a group."""
        distributed = torch_distributed()
        try:
            return None if distributed is None else distributed.distributed_c10d._get_default_store()
        except ValueError:  # destroyed just now
            return None

    def _meet(self) -> None:
        """Wait until all ranks have arrived."""
        try:
            meet(self.store(), self.rank, self.world_size, self._timeout_s, self.doing, self._refusal)
        except MissingRanksError as error:
            raise CheckpointTimeoutError(
                f"rank {self.rank} waited for all ranks to agree on {self.doing}: {error}. Every rank must call save, "
                "warmup and restore, in the same order and for a state of the same structure; look for a rank that "
                "died, is slow or calls them under a condition, or raise `timeout`. Nothing was begun, and the next "
                "call is not affected",
                rank=self.rank,
            ) from None

    def _refusal(self) -> str | None:
        told = None if self.attempt is None else self.tell_first(self.attempt, None)
        return None if told is None else _TOLD_THAT

    def _compare(self, doing: list[bytes]) -> None:
        """Raise, on all ranks, that they call different operations.

        A rank that has told that it cannot take part in one may be in the next one already. Then return, to meet again,
        on the ranks that are not in the one that it has told about.
        """
        if doing[self.rank][0]:
            raise CheckpointTimeoutError(f"rank {self.rank}: {_TOLD_THAT}: {self.doing}", rank=self.rank)
        if any(each[0] for each in doing):
            return
        by_what: dict[bytes, list[int]] = {}
        for rank, what in enumerate(doing):
            by_what.setdefault(what[1:], []).append(rank)
        said = "; ".join(f"{what.decode()} on {named(ranks)}" for what, ranks in by_what.items())
        raise CheckpointError(
            f"the ranks call different things, nothing was begun: {said}. Every rank must call save, warmup and "
            "restore in the same order and with the same steps",
            rank=self.rank,
        )

    def _exchange_heads(self, distributed: Any, payload: bytes, check: int) -> tuple[list[int], list[int], list[bytes]]:
        """Exchange sizes, checks, and as much of each payload as a head has room for: often that is all of it."""
        room = _head_bytes(self.world_size)
        head = (_HEAD.pack(len(payload), check) + payload)[:room]
        sizes, checks, begins = [], [], []
        for received in self._all_gather(distributed, head, room):
            size, other = _HEAD.unpack_from(received)
            sizes.append(size)
            checks.append(other)
            begins.append(received[_HEAD.size : _HEAD.size + size])
        return sizes, checks, begins

    def _exchange(self, distributed: Any, payload: bytes, sizes: list[int], begins: list[bytes]) -> list[bytes]:
        """Return the payloads of all ranks, which have these sizes and beginnings."""
        if all(len(begin) == size for size, begin in zip(sizes, begins, strict=True)):
            return begins
        longest, total = max(sizes), sum(sizes)
        if _MOVED_BY_REDUCTION * total < longest * len(sizes):  # an all-gather would move padding most of all
            ends = list(itertools.accumulate(sizes))
            joined = bytearray(total)
            joined[ends[self.rank] - len(payload) : ends[self.rank]] = payload
            everything = self._reduce(distributed, joined)
            return [everything[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        received = self._all_gather(distributed, payload, longest)
        return [data[:size] for data, size in zip(received, sizes, strict=True)]

    def _all_gather(self, distributed: Any, data: bytes, nbytes: int) -> list[bytes]:
        """Return the data of all ranks, of `nbytes` each: shorter data is padded."""
        import torch

        own = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)
        own = own.to(collective_device(self._group))
        received = own.new_empty((self.world_size, nbytes))
        distributed.all_gather(list(received), own, group=self._group)
        return [bytes(row) for row in received.cpu().numpy()]

    def _reduce(self, distributed: Any, data: bytearray) -> bytes:
        """Return the largest byte of all ranks at each position."""
        import torch

        if not data:
            return b""
        reduced = torch.frombuffer(data, dtype=torch.uint8).to(collective_device(self._group))
        distributed.all_reduce(reduced, distributed.ReduceOp.MAX, group=self._group)
        return bytes(reduced.cpu().numpy().tobytes())


class StoreRanks(Group):
    """Rank `rank` of `world_size` without a process group, with a part of a `store` for these collectives alone.

    For a restore before the wrapped function of an iteration runs. One thread. Waits by polling, so that exceptions
    thrown into this thread reach it.
    """

    def __init__(self, rank: int, world_size: int, store: Any, timeout_s: float) -> None:
        super().__init__(rank, world_size)
        self._store = store
        self._timeout_s = timeout_s

    def __call__(self, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all ranks, by rank. Collective.

        CheckpointTimeoutError, naming the missing ranks, when not all arrive in time, or one is known to have died;
        CheckpointError if the store fails.
        """
        if self.world_size == 1:
            return [payload]
        try:
            return gather(self._store, self.rank, self.world_size, self._timeout_s, payload, "what to restore")
        except MissingRanksError as error:
            raise CheckpointTimeoutError(
                f"rank {self.rank} waited for all ranks, to agree on what to restore after a restart: {error}. Has "
                "every process registered its state before the wrapper is called?",
                rank=self.rank,
            ) from None
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank}: the store of the iteration failed, so the ranks cannot agree on what to restore: "
                f"{error}",
                rank=self.rank,
            ) from error


def moved_bytes(sizes: list[int]) -> int:
    """Return how many bytes a rank receives, or sends and receives, in an all-gather of payloads of these sizes."""
    heads = _head_bytes(len(sizes)) * len(sizes)
    if max(sizes) <= _head_bytes(len(sizes)) - _HEAD.size:
        return heads
    return heads + min(max(sizes) * len(sizes), _MOVED_BY_REDUCTION * sum(sizes))


def _head_bytes(world_size: int) -> int:
    return max(_MIN_HEAD_BYTES, min(_MAX_HEAD_BYTES, _ALL_HEADS_BYTES // world_size))
