"""The commit protocol and the restart as a state machine, small enough to look at every state it can get into.

    trainers   schedule -> (fault) -> settle what is theirs, refuse the rest -> look -> wait for all -> next epoch
    writers    (the coordinator's: begin) -> write the part -> (the coordinator's, when all parts are there: publish)
    crashes    of any trainer or writer, at any moment; a survivor may publish in place of a dead coordinator
    storage    a save is pending, published or abandoned; who renames it first decides

A transition is one atomic act: a rename, a look at storage, the death of a process. `explore` takes all of them in
every order; ranks that have the same part in everything are not told apart. The invariants are those of a restart:

    C1  all ranks that look after the same epoch see the same newest step
    C2  that is the newest step published when the last of them looks
    C3  nothing of that epoch, or an earlier one, is published after the first of them has looked

`Bug` names ways to break the protocol; exploration must find what comes of each.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Bug(enum.Enum):
    """Deliberate mistakes."""

    NONE = "none"
    ABANDON_IN_TWO_ACTS = "looks whether the save is published and marks it abandoned, in two acts"
    LOOK_BEFORE_DRAIN = "restores before its saves are decided"
    PUBLISH_UNSEEN = "a writer publishes without a look at what was decided"
    SAME_SAVE_ID = "the next epoch uses the names of the one before"
    NO_REFUSAL_OF_OWN = "a rank leaves its own unwritten saves undecided"


class Violation(AssertionError):
    """An invariant does not hold; the text has the way there."""


PENDING, PUBLISHED, ABANDONED = "pending", "published", "abandoned"
RUNNING, FENCING, LOOKED, DEAD = "running", "fencing", "looked", "dead"
IDLE, HAS_CALL, WROTE, GONE = "idle", "has call", "wrote", "gone"


class Save(NamedTuple):
    """One save as storage has it. `parts` are the ranks whose part is there."""

    step: int
    epoch: int
    begun: bool = False
    decided: str = PENDING
    parts: frozenset[int] = frozenset()


class Rank(NamedTuple):
    """A trainer and its writer.

    `step` is the last one scheduled, `saw` what it restored after the restart; `doubts`: it has seen its save
    unpublished, and is about to abandon it (only with `ABANDON_IN_TWO_ACTS`).
    """

    trainer: str = RUNNING
    writer: str = IDLE
    began_at: int = 0
    step: int = 0
    call: int | None = None  # index of the save that the writer has
    settled: bool = False
    saw: int | None = None
    doubts: bool = False


class State(NamedTuple):
    """All there is. `base` is the newest step published in earlier epochs; `faulted`: the running epoch is to end."""

    ranks: tuple[Rank, ...]
    saves: tuple[Save, ...] = ()
    epoch: int = 0
    crashes: int = 0
    base: int = 0
    faulted: bool = False
    looked_at: frozenset[int] = frozenset()  # what was published when the first rank looked, this epoch
    somebody_looked: bool = False


@dataclass(frozen=True)
class Model:
    """How large, and with which mistake. Drain lets writers go on after a fault; abort ends those of living ranks."""

    world: int = 3
    steps: int = 1
    epochs: int = 2
    crashes: int = 2
    drain: bool = True
    bug: Bug = Bug.NONE

    def initial(self) -> State:
        return State(tuple(Rank() for _ in range(self.world)))

    # -- transitions ---------------------------------------------------------------------------------------------------

    def transitions(self, state: State) -> Iterator[tuple[str, State]]:
        if not state.faulted:
            yield "a fault", state._replace(faulted=True)
        if state.crashes < self.crashes:
            yield from self._crash(state)
        for number, rank in enumerate(state.ranks):
            if rank.trainer != DEAD:
                yield from self._trainer(state, number, rank)
            if rank.writer in (HAS_CALL, WROTE):
                yield from self._writer(state, number, rank)
        yield from self._next_epoch(state)

    def _crash(self, state: State) -> Iterator[tuple[str, State]]:
        more = state._replace(crashes=state.crashes + 1)
        living = sum(rank.trainer != DEAD for rank in state.ranks)
        for number, rank in enumerate(state.ranks):
            if rank.trainer != DEAD and living > 1:
                # A writer outlives its trainer while it has work.
                writer = GONE if rank.writer == IDLE else rank.writer
                dead = rank._replace(trainer=DEAD, writer=writer, saw=None, settled=False)
                yield f"trainer {number} dies", _with(more, number, dead)._replace(faulted=True)
            if rank.writer in (HAS_CALL, WROTE):
                writer = GONE if rank.trainer == DEAD else IDLE
                yield f"writer {number} dies", _with(more, number, rank._replace(writer=writer, call=None))

    def _trainer(self, state: State, number: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if rank.trainer == RUNNING and rank.step < self.steps * (state.epoch + 1) and rank.writer == IDLE:
            yield f"{number} schedules step {rank.step + 1}", self._schedule(state, number, rank)
        if rank.trainer == RUNNING and state.faulted:
            writer = IDLE if not self.drain else rank.writer
            call = None if not self.drain else rank.call
            yield f"{number} is fenced", _with(state, number, rank._replace(trainer=FENCING, writer=writer, call=call))
        if rank.trainer == FENCING:
            yield from self._fenced(state, number, rank)

    def _schedule(self, state: State, number: int, rank: Rank) -> State:
        step = rank.step + 1
        epoch = 0 if self.bug is Bug.SAME_SAVE_ID else state.epoch
        names = [(save.step, save.epoch) for save in state.saves]
        if (step, epoch) not in names:
            state = state._replace(saves=(*state.saves, Save(step, epoch)))
            names.append((step, epoch))
        changed = rank._replace(step=step, writer=HAS_CALL, call=names.index((step, epoch)))
        return _with(state, number, changed)

    def _fenced(self, state: State, number: int, rank: Rank) -> Iterator[tuple[str, State]]:
        own = range(rank.began_at + 1, rank.step + 1)
        undecided = [
            i
            for i, save in enumerate(state.saves)
            if save.decided == PENDING
            and (save.begun or save.parts or (save.epoch == state.epoch and save.step in own))
        ]
        if self.bug is Bug.NO_REFUSAL_OF_OWN:
            undecided = [i for i in undecided if state.saves[i].step > rank.step]
        if not rank.settled:
            for index in undecided:  # at once, after a grace, or at the deadline: all of that is "some time"
                yield from self._abandon(state, number, rank, index)
                yield from self._publish_in_place(state, number, index)
            if not undecided:
                yield f"{number} has settled", _with(state, number, rank._replace(settled=True))
        if rank.settled or self.bug is Bug.LOOK_BEFORE_DRAIN:
            yield f"{number} looks", self._look(state, number, rank)

    def _abandon(self, state: State, number: int, rank: Rank, index: int) -> Iterator[tuple[str, State]]:
        if self.bug is not Bug.ABANDON_IN_TWO_ACTS:
            yield f"{number} abandons {index}", _decide(state, index, ABANDONED)
        elif not rank.doubts:
            yield f"{number} finds {index} unpublished", _with(state, number, rank._replace(doubts=True))
        else:
            # It believes that the save is over, and goes on; the mark does not keep anybody from publishing.
            yield (
                f"{number} believes {index} abandoned",
                _with(state, number, rank._replace(settled=True, doubts=False)),
            )

    def _publish_in_place(self, state: State, number: int, index: int) -> Iterator[tuple[str, State]]:
        save = state.saves[index]
        if save.begun and len(save.parts) == self.world and state.ranks[0].writer == GONE:
            yield f"{number} publishes {index} for the coordinator", _decide(state, index, PUBLISHED)

    def _look(self, state: State, number: int, rank: Rank) -> State:
        published = frozenset(i for i, save in enumerate(state.saves) if save.decided == PUBLISHED)
        newest = max([state.base, *(state.saves[i].step for i in published)])
        looked = rank._replace(trainer=LOOKED, saw=newest, settled=True)
        if not state.somebody_looked:
            state = state._replace(somebody_looked=True, looked_at=published)
        return _with(state, number, looked)

    def _writer(self, state: State, number: int, rank: Rank) -> Iterator[tuple[str, State]]:
        index = rank.call
        assert index is not None
        save = state.saves[index]
        done = rank._replace(writer=GONE if rank.trainer == DEAD else IDLE, call=None)
        decided = save.decided != PENDING
        if decided and not (self.bug is Bug.PUBLISH_UNSEEN and number == 0 and rank.writer == WROTE):
            yield f"writer {number} learns the outcome of {index}", _with(state, number, done)
            return
        if rank.writer == HAS_CALL and number == 0 and not save.begun:
            yield f"writer 0 begins {index}", _save(state, index, save._replace(begun=True))
        elif rank.writer == HAS_CALL:
            written = _save(state, index, save._replace(parts=save.parts | {number}))
            yield f"writer {number} writes its part of {index}", _with(written, number, rank._replace(writer=WROTE))
        elif rank.writer == WROTE and number == 0 and len(save.parts) == self.world:
            overwrite = self.bug is Bug.PUBLISH_UNSEEN
            yield f"writer 0 publishes {index}", _with(_decide(state, index, PUBLISHED, overwrite), 0, done)
        elif rank.trainer == DEAD and state.ranks[0].writer == GONE:
            yield f"writer {number} is an orphan and ends", _with(state, number, done)

    def _next_epoch(self, state: State) -> Iterator[tuple[str, State]]:
        """Behind the barrier: all that live have looked. Those that died are replaced, as by spares."""
        living = [rank for rank in state.ranks if rank.trainer != DEAD]
        if state.epoch + 1 >= self.epochs or any(rank.trainer != LOOKED for rank in living):
            return
        step = max(rank.saw or 0 for rank in living)
        ranks = []
        for rank in state.ranks:
            orphan = rank.trainer == DEAD and rank.writer in (HAS_CALL, WROTE)
            if orphan and self.bug is not Bug.SAME_SAVE_ID:
                return  # what an orphan can still do is explored in this epoch
            ranks.append(Rank(began_at=step, step=step))
        after = State(tuple(ranks), state.saves, state.epoch + 1, state.crashes, state.base)
        yield "the next epoch", after if self.bug is Bug.SAME_SAVE_ID else _without_the_past(after)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self, state: State) -> str | None:
        """Return the violated invariants."""
        looked = [rank for rank in state.ranks if rank.trainer == LOOKED]
        saw = {rank.saw for rank in looked}
        if len(saw) > 1:
            return f"C1: ranks go on from different steps {sorted(s or 0 for s in saw)}"
        published = frozenset(i for i, save in enumerate(state.saves) if save.decided == PUBLISHED)
        newest = max([state.base, *(state.saves[i].step for i in published)])
        if looked and saw != {newest}:
            return f"C2: {saw} is not the newest published step {newest}"
        if state.somebody_looked and not published <= state.looked_at:
            return f"C3: {sorted(published - state.looked_at)} published after a rank has looked"
        for index in published:
            if len(state.saves[index].parts) < self.world:
                return f"C1: save {index} is published without all parts"
        return None


def explore(model: Model) -> int:
    """Visit every state that can be reached; returns how many. Violation with the shortest way to the first bad one."""
    first = model.initial()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    layer = [first]
    while layer:
        following = []
        for state in layer:
            for name, reached in model.transitions(state):
                reached = _alike(reached)
                if reached in came_from:
                    continue
                came_from[reached] = state, name
                problem = model.check(reached)
                if problem is not None:
                    raise Violation(f"{problem}, after:\n  " + "\n  ".join(_way(came_from, reached)))
                following.append(reached)
        layer = following
    return len(came_from)


def _way(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    names: list[str] = []
    while (before := came_from[state]) is not None:
        state, name = before
        names.append(name)
    return names[::-1]


def _without_the_past(state: State) -> State:
    """Only the newest step and the saves that can still be decided matter in the next epoch."""
    steps = [save.step for save in state.saves if save.decided == PUBLISHED]
    undecided = tuple(save for save in state.saves if save.decided == PENDING and save.begun)
    return state._replace(saves=undecided, base=max([state.base, *steps]))


def _alike(state: State) -> State:
    """The state with the ranks in a fixed order. All but the coordinator have the same part in everything."""
    order = sorted(
        range(1, len(state.ranks)),
        key=lambda number: (
            state.ranks[number]._replace(call=_or(state.ranks[number].call), saw=_or(state.ranks[number].saw)),
            [number in save.parts for save in state.saves],
        ),
    )
    if order == list(range(1, len(state.ranks))):
        return state
    order.insert(0, 0)
    saves = [save._replace(parts=frozenset(order.index(number) for number in save.parts)) for save in state.saves]
    return state._replace(ranks=tuple(state.ranks[number] for number in order), saves=tuple(saves))


def _or(number: int | None) -> int:
    return -1 if number is None else number


def _with(state: State, number: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:number], rank, *state.ranks[number + 1 :]))


def _save(state: State, index: int, save: Save) -> State:
    return state._replace(saves=(*state.saves[:index], save, *state.saves[index + 1 :]))


def _decide(state: State, index: int, how: str, overwrite: bool = False) -> State:
    """The rename: the first one wins."""
    save = state.saves[index]
    return _save(state, index, save._replace(decided=how)) if overwrite or save.decided == PENDING else state
