"""Rounds of the ranks of a group in a store of torch: they arrive, decide once, gather and wait.

A `Round` has a name. Each rank arrives at it once, and one value is decided, by one atomic `compare_set`: any number of
ranks may propose, all get the first proposal. None of its methods waits for a rank.

    NAME/arrived     how many ranks have arrived
    NAME/decision    the value

`meet` and `gather` wait for all ranks: all of them return, or none does. Ranks meet before each collective of a process
group. If some ranks do not enter that, the others wait in it until the timeout of the group, which is unusable
afterwards; a meeting has a deadline of its own, and leaves the group as it is.

    arrive at a round --> the last one decides "go"           --> the collective
           |
           +-- deadline of any rank, a rank died, will not come, or is interrupted: "given up"
                                                                --> an error on all that had arrived

A rank that waits watches the process of the next rank, if that was on the same node when it arrived at an earlier
round: a dead rank is not waited for. A rank that arrives at the deadline is either in time or late. A late rank arrives
at the next round, so that later calls meet again.

    round            the number N of the current round, whose name is N
    at/RANK          the round that RANK arrived at last, its node and process, what it was about, and when
    N/late           how many ranks have waited long for round N; the first one logs which are missing
    N/closing        how many ranks want to give up round N
    N/from/RANK      what RANK has to tell
    N/all            what all ranks tell, put there by the last one that arrives

Those of a round are deleted at the end of the next one in which all meet. If no rank is missing, each makes half a
dozen operations. It waits by polling: the `wait` of a store blocks the connection, which other threads use as well, and
logs a warning each time it ends without a key.

A wait that is long is logged (`LateRanks`), with the ranks that are missing. So do all waits of ranks for each other:
those of meetings, the all_reduce of a queue (`collectives`), the agreement on a step to stop after (`stop`), and
writers (`ckpt.saving.waiting`). For waits that are no meetings, `Attendance` knows who waits:

    waits/NAME/RANK  is there while RANK waits; written when the wait is long, and deleted at its end
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from inprocess.ipc.process import Process
from inprocess.ipc.suspension import Suspension

_log = logging.getLogger("ckpt")

_GO = "go"
_COMMON = "a common operation"
_ABSENT = "-"  # no value of a key
_CLOSING_S = 10.0  # for the first rank that gives up a round to find out who is missing
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.25
_PAUSE = 0.1  # of the time waited: so all together wait at most that much longer than the last rank needs
_WATCH_S = 1.0
_LATE_S = 30.0
_DESCRIBED = 4  # ranks that are late
_SHOWN = 16
_SIZE = struct.Struct("<Q")


class Round:
    """A round of `world_size` ranks in a store, by its name."""

    def __init__(self, store: Any, name: str, world_size: int) -> None:
        self._store = store
        self._name = name
        self._world_size = world_size

    def arrive(self) -> bool:
        """Count this rank; return whether it is the last. Not to be repeated if the store fails: it may count then."""
        return int(self._store.add(f"{self._name}/arrived", 1)) == self._world_size

    @property
    def arrived(self) -> int | None:
        """The number of ranks that have arrived; None if none has, or if the round was deleted."""
        count = value_of(self._store, f"{self._name}/arrived")
        return None if count is None else int(count)

    def decide(self, proposal: str) -> str:
        """Propose a value, which is not empty, and return the decision: the first proposal of all ranks."""
        return str(self._store.compare_set(f"{self._name}/decision", "", proposal).decode())

    @property
    def is_decided(self) -> bool:
        """Whether there is a decision."""
        return bool(self._store.check([f"{self._name}/decision"]))

    @property
    def decision(self) -> str | None:
        """The decision; None if there is none yet."""
        return value_of(self._store, f"{self._name}/decision")

    def delete(self) -> None:
        """Delete the keys. For a rank that knows that no other one uses them any more."""
        for key in ("decision", "arrived"):
            self._store.delete_key(f"{self._name}/{key}")


def value_of(store: Any, key: str) -> str | None:
    """Return the value of a key; None if it does not exist. Never waits, unlike `get`, and makes no key."""
    value = store.compare_set(key, _ABSENT, _ABSENT).decode()
    return None if value == _ABSENT else str(value)


# -- rounds that wait for all ranks ------------------------------------------------------------------------------------


class MissingRanksError(Exception):
    """The ranks did not meet. `missing` did not arrive in time; it is empty if one that had arrived left again."""

    def __init__(self, text: str, missing: list[int]) -> None:
        super().__init__(text)
        self.missing = missing


def meet(
    store: Any,
    rank: int,
    world_size: int,
    timeout_s: float,
    doing: str = _COMMON,
    refusal: Callable[[], str | None] = lambda: None,
) -> None:
    """Return when all ranks have called this. `store` is for this group alone; `doing` is the operation, for messages.

    `refusal` returns why a rank will not come, once it has told; it is asked each second.

    MissingRanksError, on all ranks that have arrived, when some have not `timeout_s` after one of those, or will not,
    or when one of those was interrupted. Then no rank returns. Errors of the store are passed on.
    """
    _met(store, rank, world_size, timeout_s, doing, None, refusal)


def gather(
    store: Any, rank: int, world_size: int, timeout_s: float, payload: bytes, doing: str = _COMMON
) -> list[bytes]:
    """Do what `meet` does, and return the payloads of all ranks, by rank."""
    return _met(store, rank, world_size, timeout_s, doing, payload).gathered()


def _met(
    store: Any,
    rank: int,
    world_size: int,
    timeout_s: float,
    doing: str,
    payload: bytes | None,
    refusal: Callable[[], str | None] = lambda: None,
) -> _Meeting:
    """Return the first round at which all ranks arrive."""
    deadline = time.monotonic() + timeout_s
    number = int(store.add("round", 0))
    while True:
        if Round(store, f"{number}", world_size).is_decided:
            number += 1  # given up, and the number of the next round is about to be set
            continue
        meeting = _Meeting(store, rank, world_size, number, doing, refusal)
        decision = meeting.attend(deadline, timeout_s, payload)
        if decision == _GO:
            return meeting
        reason = json.loads(decision)
        if rank not in reason["missing"]:
            raise MissingRanksError(reason["why"], reason["missing"])
        number += 1


class _Meeting:
    """One round in which ranks wait for all."""

    def __init__(
        self, store: Any, rank: int, world_size: int, number: int, doing: str, refusal: Callable[[], str | None]
    ) -> None:
        self._doing = doing
        self._refusal = refusal
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._number = number
        self._round = Round(store, f"{number}", world_size)
        self._gathers = False
        self._warns = False  # this rank is the one that logs who is missing

    def attend(self, deadline: float, timeout_s: float, payload: bytes | None) -> str:
        """Arrive, with a payload to be gathered, and return the decision."""
        self._gathers = payload is not None
        try:
            here = [self._number, *astuple(Process.here()), self._doing, time.time()]
            self._store.set(f"at/{self._rank}", json.dumps(here))
            if payload is not None:
                self._store.set(self._key(f"from/{self._rank}"), payload)
            if self._round.arrive():
                self._join()
                return self._decide(_GO)
            return self._wait(deadline) or self._give_up(timeout_s)
        except Exception:
            raise
        except BaseException as error:  # an interrupt: the others must not enter the collective without this rank
            with contextlib.suppress(Exception):
                self._decide(self._reason(f"rank {self._rank} left again ({type(error).__name__})", []))
            raise

    def gathered(self) -> list[bytes]:
        """Return the payloads of all ranks. For a round with the decision to go."""
        data = bytes(self._store.get(self._key("all")))
        payloads, at = [], 0
        while at < len(data):
            (size,) = _SIZE.unpack_from(data, at)
            at += _SIZE.size + size
            payloads.append(data[at - size : at])
        return payloads

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _join(self) -> None:
        """Put the payloads of all ranks, which have arrived, under one key, before the decision to go."""
        if self._gathers:
            payloads = self._store.multi_get([self._key(f"from/{rank}") for rank in range(self._world_size)])
            self._store.set(self._key("all"), b"".join(_SIZE.pack(len(each)) + bytes(each) for each in payloads))

    def _wait(self, deadline: float) -> str | None:
        """Wait for the decision; None if there is none by the deadline, the next rank died, or one will not come."""
        begin = time.monotonic()
        watch_at = begin + _WATCH_S
        suspension, late = Suspension(), LateRanks()
        while not self._round.is_decided:
            now = time.monotonic()
            missed_s = suspension.missed_s()  # the others may have been suspended with this process
            begin, deadline = begin + missed_s, deadline + missed_s
            if now >= deadline:
                return None
            if late.is_due(now - begin):
                self._warn(late, now - begin, deadline - now)
            if now >= watch_at:
                if self._has_died((self._rank + 1) % self._world_size) or self._refusal() is not None:
                    return None
                watch_at = now + _WATCH_S
            pause_s = min(max(_FIRST_PAUSE_S, _PAUSE * (now - begin)), _LONGEST_PAUSE_S)
            pause_s = min(pause_s, deadline - now)
            suspension.expect(pause_s)
            time.sleep(pause_s)
        return self._round.decision

    def _give_up(self, timeout_s: float) -> str:
        """Give up the round: the first rank to do so finds out which are missing, the others wait for that."""
        if self._store.add(self._key("closing"), 1) > 1:
            decision = self._wait(time.monotonic() + _CLOSING_S)
            if decision is not None:
                return decision
        missing = self._missing()
        if (refusal := self._refusal()) is not None:
            return self._decide(self._reason(refusal, missing))
        dead = [rank for rank in range(self._world_size) if self._has_died(rank)]
        if dead:
            return self._decide(self._reason(f"{named(dead)} died", missing))
        late = f"the last rank came when {timeout_s:g} s were just over"
        why = f"{named(missing)} did not come within {timeout_s:g} s" if missing else late
        return self._decide(self._reason(why, missing))

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if _last_of(self._store, rank)[0] != self._number]

    def _warn(self, late: LateRanks, waited_s: float, left_s: float) -> None:
        """Log which ranks are missing, on the first of those that wait."""
        if not self._warns and self._store.add(self._key("late"), 1) > 1:
            late.stop()
            return
        self._warns = True
        missing = self._missing()
        what = f"{named(missing)} to agree on {self._doing}"
        late.warn(self._rank, waited_s, left_s, what, missing, functools.partial(known_of, self._store))

    def _has_died(self, rank: int) -> bool:
        """Return whether the process of a rank is known to have ended."""
        _, *process = _last_of(self._store, rank)[:4]
        return Process(*process).alive is False

    def _reason(self, why: str, missing: list[int]) -> str:
        return json.dumps({"by": self._rank, "why": why, "missing": missing})

    def _decide(self, decision: str) -> str:
        """Make the decision unless there is one, and return what it is. No two ranks propose the same."""
        decided = self._round.decide(decision)
        if decided == decision:
            self._store.add("round", 1)  # before this rank enters a collective, so before any rank leaves it
            if decision == _GO:
                self._forget_earlier()
        return decided

    def _forget_earlier(self) -> None:
        """Delete the keys of earlier rounds: all ranks have arrived at this one."""
        more = ["closing", "late"]
        if self._gathers:
            more += ["all", *(f"from/{rank}" for rank in range(self._world_size))]
        number = self._number - 1
        # Not until `delete_key` returns False: a FileStore says of any key that it was deleted.
        while number >= 0 and (earlier := Round(self._store, f"{number}", self._world_size)).is_decided:
            earlier.delete()
            for name in more:
                self._store.delete_key(f"{number}/{name}")
            number -= 1


def known_of(store: Any, rank: int) -> str:
    """Return a description of a rank that has not arrived, as the end of a sentence."""
    number, host, pid, start, doing, at = _last_of(store, rank)
    if number is None:
        return "has taken part in nothing yet"
    return f"took part last in {doing}, {max(0.0, time.time() - at):.0f} s ago; {described(Process(host, pid, start))}"


def _last_of(store: Any, rank: int) -> list[Any]:
    """Return the last round of a rank, its node, pid and start time, what it was about, and when; or only None."""
    key = f"at/{rank}"
    return list(json.loads(store.get(key))) if store.check([key]) else [None] * 6


def named(ranks: list[int]) -> str:
    """Return ranks as text, such as "ranks 1, 2"; of very many only the first."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


# -- waits that are long -----------------------------------------------------------------------------------------------


class LateRanks:
    """When a wait that goes on is to be told of: after half a minute, then each time that it has doubled."""

    def __init__(self) -> None:
        self._next_s = _LATE_S

    def is_due(self, waited_s: float) -> bool:
        """Return whether to look, after a wait of so long, which ranks are missing; once each time."""
        if waited_s < self._next_s:
            return False
        self._next_s = 2 * waited_s
        return True

    def stop(self) -> None:
        """Let another process tell of it."""
        self._next_s = float("inf")

    def warn(
        self,
        rank: int,
        waited_s: float,
        left_s: float | None,
        what: str,
        late: Sequence[int],
        known: Callable[[int], str],
        calls: str = "save, warmup and restore",
    ) -> None:
        """Log that `rank` waits for `what`, which ranks are late, and what is `known` of the first of them.

        `left_s` is None if the process group decides. `calls` are what every rank must call.
        """
        told = [f"rank {each} {known(each)}" for each in late[:_DESCRIBED]]
        others = f"; {len(late) - len(told)} more are late" if len(late) > len(told) else ""
        until = "until the timeout of the process group" if left_s is None else f"{left_s:.0f} s more"
        _log.warning(
            "rank %d has waited %.0f s for %s, and waits %s: %s%s. Every rank must call %s, in the same order",
            *(rank, waited_s, what, until, "; ".join(told), others, calls),
        )


def described(process: Process) -> str:
    """Return a description of a process: its state, as far as it is known here."""
    activity = process.activity if process.is_here else "is on another node"
    return f"process {process.pid} {activity or 'is hidden'}"


class Attendance:
    """The ranks that wait at a place with a `name`, in a store of torch that is for their group alone. Never waits."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._world_size = world_size

    def note(self) -> None:
        """Write that this rank waits."""
        self._store.set(self._key(self._rank), "")

    def forget(self) -> None:
        """Delete that this rank waits."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.delete_key(self._key(self._rank))

    def warn(self, late: LateRanks, waited_s: float, left_s: float | None, what: str, calls: str) -> None:
        """Log which ranks are missing to agree on `what`, on the lowest of those that wait."""
        waits = [bool(self._store.check([self._key(rank)])) for rank in range(self._world_size)]
        missing = [rank for rank, is_here in enumerate(waits) if not is_here]
        if missing and True not in waits[: self._rank]:
            about = f"{named(missing)} to agree on {what}"
            late.warn(self._rank, waited_s, left_s, about, missing, functools.partial(known_of, self._store), calls)

    def _key(self, rank: int) -> str:
        return f"waits/{self._name}/{rank}"
