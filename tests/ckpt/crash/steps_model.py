"""The steps of one root, which several owners change: a model of directories and of stores, to look at every state.

    owners     claim -> take in copied steps -> adopt or abandon what is pending -> look at the token -> undo changes
               that earlier owners have begun, withdraw records that came too late -> save -> remove a step
    restores   the same up to the save, with a claim that fences no owner
    a save     begin, look at the token, write / supersede / look at the token, publish, look at the files
    a change   of a published step, to removed or superseded: look at readers and pins, mark the step, look at the
               pins and the token, make the change; or publish it again if another owner is there
    a pinner   leave a lease, look at the step, pin it, look again
    storage    deletes the files of removed and abandoned saves, and forgets them, at any time: an hour may have passed
    crashes    of every owner, before every act
    stalls     every process may wait indefinitely before every act; the first owner is taken for dead then

One act is one request that others can see, or one look. In a directory a rename decides: of what has the name `step_N`
when it is made, whatever save that is. In a store a numbered record decides: of one save, after the record that was
read. So a step that is being changed has no name in a directory, and is published in a store. `Setup` says how large
the model is; `Bug` breaks the protocol. When all owners have ended, one more claims the root and decides what they
left: then nothing may be lost, doubled or undecided. `steps_state` has what must hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.ckpt.crash.exploration import Actor, explore
from tests.ckpt.crash.steps_changes import Changes, Owner
from tests.ckpt.crash.steps_state import Bug, Kind, Root, Save, check


class Setup(NamedTuple):
    """How large the model is, and with which mistakes.

    `steps` are published when it starts, by the first owner; of those, `copied` are still where another program has
    put them. `programs` say what each owner does, in order, with the other `saves`; of number `late` of all
    saves a second rank writes a part.
    """

    kind: Kind = Kind.STORE
    steps: tuple[int, ...] = (1,)
    copied: tuple[int, ...] = ()
    programs: tuple[tuple[tuple[str, int], ...], ...] = ()
    saves: tuple[Save, ...] = ()
    late: int = -1
    pins: int = 0
    forgets: bool = False
    crashes: bool = True
    bugs: frozenset[Bug] = frozenset()


@dataclass(frozen=True)
class Owners(Changes):
    """The acts of one owner; those that change published steps are in `Changes`."""

    def __call__(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if job.pc == "ended" or (self.last and sum(root.running) > 1):
            return
        if self.crashes and not self.last:
            yield f"{self.name}: dies", job.ended(), root.ended(self.number)._replace(crashed=True)
        for act, after, changed in getattr(self, f"_{job.pc}")(job, root):
            yield f"{self.name}: {act}", after, changed.ended(self.number) if after.pc == "ended" else changed

    # -- claim, and decide what earlier owners left --------------------------------------------------------------------

    def _claims(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        token = root.top + 1
        if self.last and not root.crashed and any(save.is_listed and not save.intent for save in root.saves):
            root = root.wrong("a step is published without its files, and no owner is left to withdraw it")
        claims = job._replace(token=token, is_restore=False)
        yield "claims the root", self.following(claims), root._replace(top=token, owner=token)

    def _recovers(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        """A restore claims the root to decide what is pending. It fences no owner that goes on."""
        restores = job._replace(token=root.top + 1, is_restore=True)
        yield "claims the root for a restore", self.following(restores), root._replace(top=restores.token)

    def _lists_copied(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        copied = [n for n, save in enumerate(root.saves) if save.state == "copied"]
        taken = frozenset(n for n in copied if self.is_taken(root, n))
        order = copied if self.kind is Kind.DIRECTORY else copied[::-1]
        listed = job._replace(pc="takes_in", todo=tuple(order), seen=taken)
        yield from self._takes_in(listed, root) if not copied else [("lists copied steps", listed, root)]

    def is_taken(self, root: Root, number: int) -> bool:
        """Whether another save is published as the step of a copied one."""
        return root.is_listed(root.saves[number].step) and Bug.TAKE_IN_TWICE not in self.bugs

    def _takes_in(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if not job.todo:
            yield from self._lists_pending(job, root)
            return
        number, rest = job.todo[0], job._replace(todo=job.todo[1:])
        save, taken = root.saves[number], number in job.seen
        if self.kind is Kind.DIRECTORY:
            taken = self.is_taken(root, number)  # the rename tells
            if number in root.leases and save.state == "copied":
                yield f"leaves save {number}, which is being read", rest, root
            elif save.state == "copied":
                yield f"takes save {number} in", rest, root.decided(number, "superseded" if taken else "published")
            else:
                yield f"does not find save {number}", rest, root
        elif save.version >= 0 or save.state not in ("copied", "none"):
            yield f"finds a record of save {number}", rest, root
        else:
            state = "superseded" if taken else "published"
            looks = rest._replace(pc="keeps", save=number, back="takes_in")
            then = rest if Bug.TAKE_IN_WITHOUT_LOOK in self.bugs else looks
            yield f"takes save {number} in", then, root.decided(number, state)

    def _lists_pending(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        listed = job._replace(pc="decides", todo=tuple(root.pending(job.token)), seen=frozenset())
        yield "lists pending saves", listed, root

    def _decides(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if not job.todo:
            yield from self._checks(job, root)
            return
        number, rest = job.todo[0], job._replace(todo=job.todo[1:], save=job.todo[0])
        save = root.saves[number]
        if save.is_decided:
            yield f"finds save {number} decided", rest, root
        elif save.whole:
            yield f"finds save {number} whole", rest._replace(pc="publishes", back="decides"), root
        else:
            yield f"finds save {number} incomplete", rest._replace(pc="abandons", back="decides"), root

    def _abandons(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if self.is_fenced(job, root):
            yield "looks at the token: fenced", job.ended(), root
        else:
            yield "looks at the token", job._replace(pc="abandoned"), root

    def _abandoned(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        done = job._replace(pc="decides", save=-1, back="") if job.back else job.ended()
        if root.saves[job.save].is_decided:
            yield f"finds save {job.save} decided", done, root
        else:
            yield f"abandons save {job.save}", done, root.decided(job.save, "abandoned")

    def _checks(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if self.is_fenced(job, root) and Bug.ADOPT_BEFORE_CLAIM not in self.bugs:
            yield "looks at the token: fenced", job.ended(), root
        else:
            yield "looks at the token", job._replace(pc="lists_begun"), root

    def _lists_begun(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        """What earlier owners have begun to change, or put too late."""
        before = min(job.token, root.owner)  # a restore leaves the changes of an owner that may go on
        begun = [n for n, save in enumerate(root.saves) if save.state == "changing" and save.by < before]
        if Bug.NO_UNDO in self.bugs:
            begun = []
        late = [n for n, save in enumerate(root.saves) if save.is_late(before)]
        absent = [n for n, save in enumerate(root.saves) if save.is_listed and not save.intent]
        listed = job._replace(pc="undoes", todo=(*begun, *late, *absent))
        yield "lists what was begun", listed, root

    def _undoes(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if not job.todo:
            settled = root if job.is_restore else root.settled_by(job.token)
            yield "has decided all", self.following(job), settled
            return
        number, rest = job.todo[0], job._replace(todo=job.todo[1:], save=job.todo[0], back="undoes")
        save = root.saves[number]
        if save.state == "changing" and save.by < job.token:
            yield f"finds save {number} being changed", rest._replace(pc="looks_back", version=save.version), root
        elif save.is_late(job.token):
            yield f"abandons save {number}, which came too late", rest, root.decided(number, "abandoned")
        elif save.is_listed and not save.intent:
            yield f"withdraws save {number}", rest, root.changed(number, "removed")
        else:
            yield f"finds save {number} in order", rest, root

    # -- a save --------------------------------------------------------------------------------------------------------

    def _begins(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        number = self.of(job)
        save = root.saves[number]
        if save.is_decided:
            yield f"finds save {number} decided", self.given_up(job), root
        else:
            made = save._replace(token=job.token, made=True)
            if self.kind is Kind.STORE:
                made, act, then = made._replace(intent=True), f"makes the intent of save {number}", "begun"
            else:
                act = f"makes the directory of save {number}"
                then = "begun" if Bug.LOOK_BEFORE_INTENT in self.bugs else "makes_intent"
            yield act, job._replace(pc=then, save=number), root.with_save(number, made)

    def _begun(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        """The look after what others see of the save. A fenced one takes it away again."""
        save = root.saves[job.save]
        then = "makes_intent" if Bug.LOOK_BEFORE_INTENT in self.bugs and not save.intent else "writes"
        if not self.is_fenced(job, root) or Bug.NO_LOOK_AT_BEGIN in self.bugs:
            yield "looks at the token", job._replace(pc=then), root
        else:
            left = save if save.is_decided else save._replace(intent=False, made=self.kind is Kind.STORE)
            yield "looks at the token: fenced", job.ended(), root.with_save(job.save, left)

    def _makes_intent(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        save = root.saves[job.save]
        if not save.made:
            yield f"finds save {job.save} decided", self.given_up(job), root
        else:
            then = "writes" if Bug.LOOK_BEFORE_INTENT in self.bugs else "begun"
            made = root.with_save(job.save, save._replace(intent=True))
            yield f"makes the intent of save {job.save}", job._replace(pc=then), made

    def _writes(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        """The parts of all ranks. In a store they can be put at any time; then no intent is with them."""
        save = root.saves[job.save]
        then = job._replace(pc="waits")
        if Bug.RECORD_BEFORE_DATA in self.bugs:
            yield "leaves the data for later", then, root
        elif save.made or self.kind is Kind.STORE:
            written = save._replace(parts=save.parts | {0})
            yield f"writes save {job.save}", then, root.with_save(job.save, written)
        else:
            yield f"finds save {job.save} decided", self.given_up(job), root

    def _waits(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        """The coordinator publishes when all parts are there; a trainer may give the save up at any time."""
        save = root.saves[job.save]
        if save.ranks > 1:
            yield "gives the save up", job._replace(pc="abandons"), root
        if save.whole or save.is_decided or save.ranks == 1:
            supersedes = ("supersede", 0) in self.program
            yield from (self._lists_others if supersedes else self._publishes)(job, root)

    def _looks(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        """The last owner has decided everything: see what it finds."""
        yield "looks at what is left", job.ended(), root._replace(problem=root.problem or root.what_is_wrong())


def _late_rank(setup: Setup) -> Actor:
    """The writer of rank 1 of a save: it puts its part whenever it comes, whatever became of the save."""
    number, place = setup.late, len(setup.programs) + 1

    def acts(own: str, root: Root) -> Iterator[tuple[str, str, Root]]:
        for act, after, changed in writing(own, root):
            yield act, after, changed.ended(place) if after == "ended" else changed

    def writing(own: str, root: Root) -> Iterator[tuple[str, str, Root]]:
        save = root.saves[number]
        store = setup.kind is Kind.STORE
        written = root.with_save(number, save._replace(parts=save.parts | {1}))
        if own == "joins" and store:
            yield "rank 1: finds no record", "ended" if save.is_decided else "writes", root
        elif own == "joins":
            made = save if save.is_decided else save._replace(made=True)  # else it is a directory beside that one
            yield "rank 1: makes the directory", "joined", root.with_save(number, made)
        elif own == "joined":
            yield "rank 1: looks for the record", "ended" if save.state == "abandoned" else "writes", root
        elif own == "writes":
            there = store or (save.made and not save.is_decided)
            yield f"rank 1: writes its part of save {number}", "ended", written if there else root

    return acts


class Pinning(NamedTuple):
    """A process that pins a step: what it does next, and the save that it has found."""

    pc: str = "opens"
    save: int = -1


def _pinner(setup: Setup) -> Actor:
    """It reads the step meanwhile. In a store a step that is being changed is published, and may be opened."""

    def acts(own: Pinning, root: Root) -> Iterator[tuple[str, Pinning, Root]]:
        if own.pc == "ended":
            return
        if own.pc == "opens":
            found = root.listed(setup.pins)
            if found is not None:
                yield "pinner: opens the step", Pinning("leases", found), root
            return
        save = root.saves[own.save]
        there = save.is_listed if own.pc == "holds" else save.state in ("published", "copied")
        leaves = root._replace(leases=root.leases - {own.save})
        if own.pc == "leases":
            yield "pinner: leaves a lease", own._replace(pc="holds"), root._replace(leases=root.leases | {own.save})
        elif own.pc == "pins":
            yield "pinner: pins it", own._replace(pc="looks"), root._replace(pins=root.pins | {setup.pins})
        elif not there and not (own.pc == "looks" and Bug.PIN_WITHOUT_LOOK in setup.bugs):
            yield "pinner: finds it removed", Pinning("ended"), leaves._replace(pins=frozenset())
        elif own.pc == "holds":
            yield "pinner: finds it published", own._replace(pc="pins"), root
        else:
            yield "pinner: has pinned it", Pinning("ended"), leaves._replace(pinned=root.pinned | {own.save})

    return acts


def _janitor(own: int, root: Root) -> Iterator[tuple[str, int, Root]]:
    """The files of what is gone are deleted, and then its records."""
    for number, save in enumerate(root.saves):
        if save.state in ("removed", "abandoned") and (save.intent or save.parts):
            yield f"save {number} is deleted", own, root.with_save(number, save.without_files())
        elif save.state in ("removed", "abandoned"):
            forgotten = save._replace(state="none", version=-1, made=False)
            yield f"save {number} is forgotten", own, root.with_save(number, forgotten)


def actors_of(setup: Setup) -> tuple[list[Actor], list[object], Root]:
    """Return the actors of a setup, the first state of each, and that of the root."""
    published = [Save(step, 1, step - 1, "published", 0, "", 0, True, True, frozenset({0})) for step in setup.steps]
    copied = [Save(step, 1, step - 1, "copied", -1, "", 0, True, True, frozenset({0})) for step in setup.copied]
    programs = (*setup.programs, (("claim", 0), ("decide", 0), ("look", 0)))
    last = len(programs) - 1
    owners = [
        Owners(number, program, setup.kind, setup.crashes, setup.bugs, number == last)
        for number, program in enumerate(programs)
    ]
    root = Root((*published, *copied, *setup.saves), running=(*[True] * len(programs), setup.late >= 0), top=1)
    actors: list[Actor] = list(owners)
    own: list[object] = [owner.first() for owner in owners]
    if setup.late >= 0:
        actors.append(_late_rank(setup))
        own.append("joins")
    if setup.pins:
        actors.append(_pinner(setup))
        own.append(Pinning())
    if setup.forgets:
        actors.append(_janitor)
        own.append(0)
    return actors, own, root


def explore_steps(setup: Setup) -> int:
    """Visit every state; return how many. Violation with a shortest way to the first bad one."""
    actors, own, root = actors_of(setup)
    return explore(actors, own, root, check)
