"""Processes as threads of which one runs at a time: before each request to the store somebody chooses who goes on.

    Turns.run   ->  go  ->  actor: ... store request        so every order of requests can be had, and a process can
                <- back <-  actor: before the next one      die before any of them

The store is a dict: what a real one guarantees to requests that come one after the other, it does as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from inprocess.coordination.verbs import VerbCall
from inprocess.coordination.wire import Op
from inprocess.exception import StaleViewError, StoreTimeoutError

_LIMIT_S = 20.0


class Killed(BaseException):
    """The process is dead: nothing of it runs any more."""


class Actor:
    """One process."""

    def __init__(self, turns: Turns, name: str, function: Callable[[Actor], Any]) -> None:
        self.name = name
        self.steps = 0
        self.killed = self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._turns = turns
        self._function = function
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """In the actor: wait for the next turn."""
        self._turns.back.release()
        self._wait()

    def take_turn(self) -> None:
        """In `Turns`: let it do one request."""
        self.steps += 1
        self._go.release()
        assert self._turns.back.acquire(timeout=_LIMIT_S), f"{self.name} hangs"
        if self.ended:
            self._thread.join(_LIMIT_S)

    def _wait(self) -> None:
        self._go.acquire()
        if self.killed:
            raise Killed

    def _run(self) -> None:
        try:
            self._wait()
            self.result = self._function(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._turns.back.release()


class Turns:
    """All processes, and who is next: `schedule` says it as long as it goes, then they take turns in a circle."""

    def __init__(self, schedule: list[int]) -> None:
        self.back = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self._schedule = list(reversed(schedule))

    def add(self, name: str, function: Callable[[Actor], Any]) -> Actor:
        actor = Actor(self, name, function)
        self.actors.append(actor)
        return actor

    def run(self, before_turn: Callable[[Actor], None], most_steps: int = 2_000) -> None:
        """Until all have ended. `before_turn(actor)` may kill it, or add others."""
        last = 0
        for _ in range(most_steps):
            waiting = [actor for actor in self.actors if not actor.ended]
            if not waiting:
                break
            last = self._schedule.pop() if self._schedule else last + 1
            actor = waiting[last % len(waiting)]
            before_turn(actor)
            actor.take_turn()
        left = [actor.name for actor in self.actors if not actor.ended]
        self.close()
        assert not left, f"these never end: {left}"
        errors = [actor.error for actor in self.actors if actor.error is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Kill who is left."""
        for actor in self.actors:
            while not actor.ended:
                actor.killed = True
                actor.take_turn()


class Contents:
    """What is in the store of one iteration."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.sets: dict[str, set[str]] = {}


class SteppedStore:
    """The store of an iteration as one process sees it; None: the whole store, which holds the restart index.

    Each request waits for the turn of the process. Requests that wait do not. Changes are guarded, as in the real
    store.
    """

    def __init__(self, contents: dict[int | None, Contents], iteration: int | None, actor: Actor) -> None:
        self._whole = contents[None]
        self._contents = contents[iteration]
        self._iteration = iteration
        self._actor = actor
        self.base_store = self if iteration is None else SteppedStore(contents, None, actor)

    def _step(self) -> None:
        """The turn of a request that is guarded."""
        self._actor.step()
        current = self._whole.values.setdefault("restart_index", "0")
        if self._iteration is not None and current != str(self._iteration):
            raise StaleViewError(f"in iteration {self._iteration}, and the job is in {current}")

    def perform_all(self, calls: list[VerbCall]) -> list[tuple[bytes, ...]]:
        """Execute requests in turns of their own: the process may die between two of them."""
        answers = []
        for op, (key,), values, *_ in calls:
            verb = {Op.SET: self.set, Op.APPEND: self.append, Op.COMPARE_SET: self.compare_set}[op]
            answer = verb(key, *[value.decode() for value in values])  # type: ignore[operator]
            answers.append(() if answer is None else (answer,))
        return answers

    def set(self, key: str, value: str) -> None:
        self._step()
        self._contents.values[key] = value

    def get(self, key: str) -> bytes:
        self._actor.step()
        return self._contents.values[key].encode()

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._step()
        self._contents.values.update(zip(keys, values, strict=True))

    def get_within(self, key: str, timeout: timedelta) -> bytes:
        self.wait([key], timeout)
        return self._contents.values[key].encode()

    def append(self, key: str, value: str) -> None:
        self._step()
        self._contents.values[key] = self._contents.values.get(key, "") + value

    def check(self, keys: list[str]) -> bool:
        self._actor.step()
        return all(key in self._contents.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._step()
        if not all(key in self._contents.values for key in keys):
            raise StoreTimeoutError(f"{keys} are not there")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._step()
        value = self._contents.values.get(key, "")
        if value == expected:
            self._contents.values[key] = desired
        return self._contents.values.get(key, expected).encode()

    def arrive(self, name: str, member: str) -> int:
        self._step()
        members = self._contents.sets.setdefault(name, set())
        members.add(member)
        return len(members)

    def meet(self, name: str, member: str, size: int, key: str, timeout: timedelta) -> bytes | None:
        self._step()
        members = self._contents.sets.setdefault(name, set())
        members.add(member)
        if key not in self._contents.values:
            if len(members) >= size:
                return None
            raise StoreTimeoutError(f"{key} is not there")
        return self._contents.values[key].encode()

    def members(self, name: str) -> frozenset[str]:
        self._actor.step()
        return frozenset(self._contents.sets.get(name, ()))
