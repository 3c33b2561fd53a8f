"""Breadth-first exploration of actors that share one state.

An actor is a function ``(own, shared) -> [(act, own, shared), ...]``: what it can do next, each one atomic, and what it
and the shared state are afterwards. A state of the whole is the shared one and that of every actor. What an actor can
do depends on two of these only, so it is computed once for each pair; and every part is a small number, so that
millions of states fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

Acts = Iterable[tuple[str, Hashable, Hashable]]
Actor = Callable[[Any, Any], Acts]

_BITS = 20
_MASK = (1 << _BITS) - 1


class Violation(AssertionError):
    """An invariant does not hold; the text has the shortest way there."""


class _Numbers:
    """Numbers for equal values, in the order in which they are met."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._number_of: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        number = self._number_of.setdefault(value, len(self.values))
        if number == len(self.values):
            assert number <= _MASK, "too many different values of one part: the model is too large"
            self.values.append(value)
        return number


class _Search:
    def __init__(self, actors: Sequence[Actor], check: Callable[[Any], str | None]) -> None:
        self._actors = actors
        self._check = check
        self._own = [_Numbers() for _ in actors]
        self._shared = _Numbers()
        self._steps: list[dict[int, list[tuple[str, int]]]] = [{} for _ in actors]
        self._problems: dict[int, str] = {}
        self._checked = 0
        self.came_from: dict[int, int] = {}

    def pack(self, own: Iterable[Any], shared: Any) -> int:
        """The whole state as one number: the shared part in the lowest bits."""
        key = self._share(shared)
        for place, (numbers, value) in enumerate(zip(self._own, own, strict=True), 1):
            key |= numbers.of(value) << (_BITS * place)
        return key

    def _share(self, shared: Any) -> int:
        number = self._shared.of(shared)
        if number == self._checked:
            self._checked += 1
            problem = self._check(shared)
            if problem is not None:
                self._problems[number] = problem
        return number

    def steps(self, key: int) -> Iterable[tuple[str, int]]:
        """Every act that is possible, and the state after it."""
        for place, actor in enumerate(self._actors, 1):
            shift = _BITS * place
            mine = key & (_MASK << shift | _MASK)
            known = self._steps[place - 1].get(mine)
            if known is None:
                own, shared = self._own[place - 1].values[mine >> shift], self._shared.values[key & _MASK]
                # Two states differ by a number: what an act adds to one part, and to the other.
                known = [
                    (act, (self._own[place - 1].of(after) << shift | self._share(common)) - mine)
                    for act, after, common in actor(own, shared)
                ]
                self._steps[place - 1][mine] = known
            for act, difference in known:
                yield act, key + difference

    def run(self, first: int) -> int:
        self.came_from[first] = -1
        layer = [first]
        while layer:
            following = []
            for key in layer:
                for act, reached in self.steps(key):
                    if reached not in self.came_from:
                        self.came_from[reached] = key
                        following.append(reached)
                        if reached & _MASK in self._problems:
                            problem = self._problems[reached & _MASK]
                            raise Violation(f"{problem}, after:\n  " + "\n  ".join([*self._way(key), act]))
            layer = following
        return len(self.came_from)

    def _way(self, key: int) -> list[str]:
        acts = []
        while (before := self.came_from[key]) >= 0:
            acts.append(next(act for act, reached in self.steps(before) if reached == key))
            key = before
        return acts[::-1]


def explore(actors: Sequence[Actor], own: Sequence[Any], shared: Any, check: Callable[[Any], str | None]) -> int:
    """Visit every state that can be reached from the first one; return how many there are.

    `own` has the first state of each actor. `check(shared)` says what is violated, or None. Violation with a shortest
    way to the first bad state.
    """
    search = _Search(actors, check)
    return search.run(search.pack(own, shared))


def follow(
    actors: Sequence[Actor],
    own: Sequence[Any],
    shared: Any,
    acts: Sequence[str],
    silent: Callable[[str], bool],
    extra: Callable[[str], bool],
) -> str | None:
    """Return why a sequence of acts is no path of the model; None if it is one.

    Acts of the model that are `silent` may happen between two of them. Those of the sequence that are `extra` need not
    be acts of the model.
    """
    search = _Search(actors, lambda _: None)
    states = {search.pack(own, shared)}
    for place, act in enumerate(acts):
        reached = _silently(search, states, silent)
        following = {after for state in reached for name, after in search.steps(state) if name == act}
        if not following and not extra(act):
            possible = sorted({name for state in reached for name, _ in search.steps(state) if not silent(name)})
            before = "\n  ".join(acts[:place])
            return f"the model has no {act!r} after:\n  {before}\nthere it has: {'; '.join(possible)}"
        states = following | (reached if extra(act) else set())
    return None


def _silently(search: _Search, states: set[int], silent: Callable[[str], bool]) -> set[int]:
    """The states that can be reached by silent acts."""
    reached, new = set(states), list(states)
    while new:
        state = new.pop()
        for name, after in search.steps(state):
            if silent(name) and after not in reached:
                reached.add(after)
                new.append(after)
    return reached
