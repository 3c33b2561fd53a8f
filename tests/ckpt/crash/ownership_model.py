"""The ownership protocol (docs/decisions/0023) as a state machine, small enough to look at every state.

    trainers   look at the owner -> (it is dead: claim, adopt or abandon, release) -> restore -> claim -> decide ->
               save, save -> end
    writers    coordinator: make the pending directory and the intent, look at the token / every rank: make the
               directory, write a file, then the part / coordinator: move newer steps aside, look at the token, rename /
               remove older steps: look at the token, rename, look at the token again, delete what was renamed or keep
               it for the next save; if another owner is there, rename it back, as that one does
    a reader   open the newest step, read one file, then the other, look at intent.json
    crashes    of every trainer and every writer, before every act
    stalls     every process may wait for ever before every act; the leases of a live one may be taken for expired

One act is one system call that others can see, or one look. `Setup` says how large; `Bug` breaks the protocol.
Simplified: a job has one save in flight, and a writer ends with its save; what a rank writes is one file; the directory
of an abandoned save is not made again (a rank that does so finds its record, and removes it); the claim of a restore
is like that of a job. `steps_model` is about what these leave out, and about stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tests.ckpt.crash.exploration import Actor, Violation, explore
from tests.ckpt.crash.ownership_state import Bug, Dir, Life, Place, Root, Save, check, check_without_crashes
from tests.ckpt.crash.ownership_writers import Job, Writers

__all__ = ["Setup", "Violation", "explore_ownership"]


class Setup(NamedTuple):
    """How large the model is, and with which mistakes.

    `steps` are published when the jobs start, without an owner. `left` says what else an earlier run has left: nothing,
    or a pending save that is "incomplete" or "complete". With `any_step` a restore may be of any step.
    Without `crashes` every process may only stall.
    """

    jobs: int = 2
    ranks: int = 2
    saves: int = 1
    steps: int = 1
    left: str = ""
    reuse: bool = False
    reader: bool = False
    any_step: bool = False
    crashes: bool = True
    bugs: frozenset[Bug] = frozenset()


class Trainer(Writers):
    """The acts of one job's trainer (those of its writers are in `Writers`)."""

    def __call__(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        for act, job_after, root_after in itertools.chain(
            self._crashes(job, root), getattr(self, f"_{job.pc}")(job, root), self.writers(job, root)
        ):
            lives = (*root.lives[: self.number], job_after.life(), *root.lives[self.number + 1 :])
            yield f"{self.name}: {act}", job_after, root_after._replace(lives=lives)

    def _crashes(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        if not self.crashes:
            return
        if job.pc != "ended":
            yield "the trainer dies", job.ended(), root
        for rank, state in enumerate(job.writers):
            if state not in ("idle", "dead"):
                yield f"the writer of rank {rank} dies", job.with_writer(rank, "dead"), root

    # -- restore -------------------------------------------------------------------------------------------------------

    def _starts(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        if root.started < self.number:
            return
        root = root._replace(started=max(root.started, self.number + 1))
        life = root.lives[root.owner] if root.owner >= 0 else Life.GONE
        if life is Life.ACTIVE:
            yield "finds the owner active", job._replace(pc="picks", seen=root.top), root
        if life is not Life.GONE:
            stalled = root._replace(stalled=root.stalled | {root.owner})
            yield "takes the owner for dead, which is stalled", self._dead_owner(job, root), stalled
        else:
            yield "finds no owner alive", self._dead_owner(job, root), root

    def _dead_owner(self, job: Job, root: Root) -> Job:
        if not any(root.having(Place.PENDING)):
            return job._replace(pc="picks", seen=root.top)
        without = Bug.ADOPT_WITHOUT_CLAIM in self.bugs
        return job._replace(pc="adopts" if without else "claims", seen=root.top)

    def _claims(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        """Claim to decide what the dead have left."""
        if root.top != job.seen and Bug.CLAIM_ON_AN_OLD_VIEW not in self.bugs:
            yield "finds the token taken", job._replace(pc="starts", seen=0), root
            return
        if root.is_alive(root.owner) and root.owner not in root.stalled:
            root = root.wrong(f"a restore fences job {root.owner}, which is alive and has never stalled")
        owed = frozenset(d.save for _, d in root.having(Place.PENDING) if d.complete)
        job = job._replace(pc="adopts", token=root.top + 1, owed=owed)
        yield f"claims token {job.token} for the restore", job, self._claimed(root)

    def _claimed(self, root: Root) -> Root:
        return root._replace(top=root.top + 1, owner=self.number)

    def _undecided(self, job: Job, root: Root) -> list[tuple[int, Dir]]:
        every = not self.bugs.isdisjoint({Bug.DECIDE_EVERYTHING, Bug.ADOPT_WITHOUT_CLAIM})
        pending = root.having(Place.PENDING)
        return [(n, d) for n, d in pending if every or root.saves[d.save].token < job.token]

    def _adopts(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        undecided = self._undecided(job, root)
        for number, d in undecided:
            if d.complete and root.saves[d.save].step in root.published():
                yield f"abandons save {d.save}, whose step is there", job, root.moved(number, Place.GIVEN_UP)
            elif d.complete:
                adopter = root.saves[d.save].token + 1 if job.token == 0 else job.token
                yield f"adopts save {d.save}", job, root.publish(number, adopter)
            else:
                yield f"abandons save {d.save}", job, self._abandon_for_restore(job, root, number)
        yield from self._puts_back(job, root)
        if not undecided and not root.misplaced():
            yield self._decided(job, root)

    def _abandon_for_restore(self, job: Job, root: Root, number: int) -> Root:
        """It is wrong to do that to a job that has not been fenced before, by one that saves."""
        _, token, victim = root.saves[root.dirs[number].save]
        after = root.moved(number, Place.ABANDONED)
        if token + 1 >= job.token and victim not in root.stalled and root.is_alive(victim):
            return after.wrong(f"job {victim}, alive and never stalled, loses a save to a restore")
        return after

    def _puts_back(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        for number in root.misplaced():
            yield f"puts save {root.dirs[number].save} back", job, root.put_back(number)

    def _decided(self, job: Job, root: Root) -> tuple[str, Job, Root]:
        """All is decided: release the root."""
        if job.token != root.top and job.token:
            return "is fenced, and looks again", job._replace(pc="starts", token=0, seen=0, owed=frozenset()), root
        for save in sorted(job.owed):
            if any(d.place is Place.ABANDONED and d.save == save for d in root.dirs):
                root = root.wrong(f"save {save}, complete when the restore claimed the root, is lost")
        after = root._replace(settled=max(root.settled, job.token), owner=-1 if job.token else root.owner)
        return "releases the root", job._replace(pc="picks", token=0, seen=root.top, owed=frozenset()), after

    def _picks(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        steps = sorted(root.published())
        for step in steps[0 if self.any_step else -1 :]:
            yield f"restores step {step}", job._replace(pc="trains", restored=step), root
        if not steps:  # there is a complete save, about to take the place of those that were moved aside
            yield "finds no step, and looks again", job._replace(pc="starts", seen=0), root

    # -- save ----------------------------------------------------------------------------------------------------------

    def _trains(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        yield "ends without a save", job.ended(), root
        life = root.lives[root.owner] if root.owner >= 0 else Life.GONE
        claimed = job._replace(pc="decides", token=root.top + 1, seen=0)
        if life is Life.GONE or root.top == job.seen:
            yield f"claims token {claimed.token}", claimed, self._claimed(root)
            return
        yield "finds a newer owner alive: it is the earlier one itself", job.ended(), root
        stalled = root._replace(stalled=root.stalled | {root.owner})
        yield f"claims token {claimed.token}, taking the owner for dead", claimed, self._claimed(stalled)

    def _decides(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        """Whatever is pending came after what this job has restored."""
        undecided = self._undecided(job, root)
        for number, d in undecided:
            if d.complete and root.saves[d.save].step not in root.published():
                yield f"adopts save {d.save} of an earlier owner", job, root.publish(number, job.token)
            else:
                yield f"abandons save {d.save} of an earlier owner", job, root.moved(number, Place.GIVEN_UP)
        yield from self._puts_back(job, root)
        if not undecided and not root.misplaced():
            after = root._replace(settled=max(root.settled, job.token))
            yield "has decided all, and saves", *self.next_save(job, after, 0)

    def _saves(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        if "dead" in job.writers:
            number = root.pending_of(self.save_of(job))
            after = root if number is None else root.moved(number, Place.GIVEN_UP)
            idle = job._replace(writers=("idle",) * len(job.writers), listed=(-1, -1))
            yield "gives its save up, a writer died", *self.next_save(idle, after, job.count + 1)

    def _ended(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        yield from ()


class Reading(NamedTuple):
    """A reader: what it does next, the directory it has open, the save it believes to read, the bytes it got."""

    pc: str = "opens"
    directory: int = -1
    save: int = -1
    bytes: tuple[int, ...] = ()


def _reader(bugs: frozenset[Bug]) -> Actor:
    """It holds on to the directory, whatever becomes of its name: a network file system may show the old one."""

    def acts(reading: Reading, root: Root) -> Iterator[tuple[str, Reading, Root]]:
        if reading.pc == "opens":
            steps = root.published()
            if steps:
                number = steps[max(steps)]
                yield "reader: opens the newest step", Reading("reads", number, root.dirs[number].intent), root
            return
        d = root.dirs[reading.directory]
        last = len(reading.bytes) + 1 == len(d.files)
        if d.place is Place.DELETED:
            yield "reader: finds files missing", Reading(), root
        elif reading.pc == "reads":
            got = reading._replace(bytes=(*reading.bytes, d.files[len(reading.bytes)]))
            yield f"reader: reads file {len(reading.bytes)}", got._replace(pc="verifies" if last else "reads"), root
        elif d.intent == reading.save or Bug.VERIFY_BEFORE_READING in bugs:
            same = all(save == reading.save for save in reading.bytes)
            wrong = root.wrong(f"a reader of save {reading.save} has accepted bytes of the saves {reading.bytes}")
            yield "reader: accepts", Reading(), root if same else wrong
        else:
            yield "reader: starts again", Reading(), root

    return acts


def explore_ownership(setup: Setup) -> int:
    """Visit every state; return how many. Violation with a shortest way to the first bad one."""
    ranks = setup.ranks
    earlier = setup.steps + bool(setup.left)
    dirs = [Dir(Place.PUBLISHED, n, n, (n,) * ranks, frozenset(range(ranks))) for n in range(setup.steps)]
    if setup.left:
        parts = ranks if setup.left == "complete" else ranks - 1
        dirs.append(Dir(Place.PENDING, setup.steps, setup.steps, (setup.steps,) * ranks, frozenset(range(parts))))
    dirs += [Dir(files=(-1,) * ranks)] * (setup.jobs * setup.saves)
    saves = [Save(n + 1, 0, -1) for n in range(earlier)] + [Save(0, 0, -1)] * (setup.jobs * setup.saves)
    root = Root(tuple(dirs), tuple(saves), (Life.GONE,) * setup.jobs)
    actors = [
        Trainer(job, earlier + job * setup.saves, setup.saves, setup.reuse, setup.any_step, setup.crashes, setup.bugs)
        for job in range(setup.jobs)
    ]
    own = [Job(writers=("idle",) * ranks)] * setup.jobs
    invariants = check if setup.crashes or setup.jobs > 2 else check_without_crashes
    if setup.reader:
        return explore([*actors, _reader(setup.bugs)], [*own, Reading()], root, invariants)
    return explore(actors, own, root, invariants)
