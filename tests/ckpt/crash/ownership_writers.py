"""The writers of one job in the model of the ownership protocol: begin, write, publish, retain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.ckpt.crash.ownership_state import Bug, Dir, Life, Place, Root, Save


class Job(NamedTuple):
    """A trainer and the writers of its ranks: what each does next, and what it remembers.

    `seen` is the token that the restore has seen, `owed` the saves that were complete when it claimed the root;
    `restored` is a step, `count` the number of saves done; `listed` is a step and the save it was, when a process
    decided to move it.
    """

    pc: str = "starts"
    writers: tuple[str, ...] = ()
    token: int = 0
    seen: int = 0
    restored: int = 0
    count: int = 0
    owed: frozenset[int] = frozenset()
    listed: tuple[int, int] = (-1, -1)

    def with_writer(self, rank: int, state: str) -> Job:
        return self._replace(writers=(*self.writers[:rank], state, *self.writers[rank + 1 :]))

    def ended(self, writers: bool = False) -> Job:
        """The trainer is gone; with `writers` they are, too. What nobody can remember is forgotten."""
        if writers or all(state in ("idle", "dead", "fenced") for state in self.writers):
            return Job("ended", ("idle",) * len(self.writers))
        return self._replace(pc="ended", seen=0, owed=frozenset())

    def life(self) -> Life:
        if self.pc != "ended":
            return Life.ACTIVE
        return Life.GONE if all(state in ("idle", "dead", "fenced") for state in self.writers) else Life.FINISHING


@dataclass(frozen=True)
class Writers:
    """The acts of one job's writers. Its saves have the numbers from `first_save` on."""

    number: int
    first_save: int
    saves: int
    reuse: bool
    any_step: bool
    crashes: bool
    bugs: frozenset[Bug]

    @property
    def name(self) -> str:
        return "ABC"[self.number]

    def save_of(self, job: Job) -> int:
        return self.first_save + job.count

    def writers(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        for rank, state in enumerate(job.writers):
            if state in ("idle", "dead", "fenced"):
                continue
            acts = self._coordinator if rank == 0 and state not in ("joins", "written") else self._any
            for act, after, root_after in acts(job, root, rank, state):
                if after.pc == "ended" or after.writers[0] == "fenced":
                    after = after.ended()
                elif set(after.writers) == {"idle"}:
                    after, root_after = self.next_save(after, root_after, job.count + 1)
                yield f"writer {rank} {act}", after, root_after

    def next_save(self, job: Job, root: Root, count: int) -> tuple[Job, Root]:
        """Schedule save number `count` of the job, or end."""
        if count == self.saves:
            return job.ended(), root
        called = job._replace(pc="saves", count=count, writers=("called",) * len(job.writers))
        save = self.save_of(called)
        about = Save(job.restored + count + 1, job.token, self.number)
        return called, root._replace(saves=(*root.saves[:save], about, *root.saves[save + 1 :]))

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _any(self, job: Job, root: Root, rank: int, state: str) -> Iterator[tuple[str, Job, Root]]:
        save = self.save_of(job)
        number = root.pending_of(save)
        if number is None and self._is_decided(root, save):
            yield "learns the outcome", job.with_writer(rank, "idle"), self._learns(root, save)
        elif number is not None and state == "written":
            d = root.dirs[number]
            done = "waits" if rank == 0 else "idle"
            written = root.with_dir(number, d._replace(parts=d.parts | {rank}))
            yield "writes its part", job.with_writer(rank, done), written
        elif number is not None:
            after = self._with_file(root, number, rank, save)
            retired = next((other for other, _ in root.having(Place.RETIRED)), None)
            if retired is None:
                yield "writes its file", job.with_writer(rank, "written"), after
            else:  # a reader that holds on to the file sees it written over
                after = self._with_file(after, retired, rank, save)
                yield "takes its file of a removed step and writes it", job.with_writer(rank, "written"), after
        else:
            yield "makes the pending directory", job, self._made(root, save)

    def _with_file(self, root: Root, number: int, rank: int, save: int) -> Root:
        d = root.dirs[number]
        return root.with_dir(number, d._replace(files=(*d.files[:rank], save, *d.files[rank + 1 :])))

    def _made(self, root: Root, save: int) -> Root:
        if root.pending_of(save) is not None:
            return root
        return root.with_dir(save, Dir(Place.PENDING, save, files=root.dirs[save].files))

    def _is_decided(self, root: Root, save: int) -> bool:
        return any(d.save == save and d.place not in (Place.NOWHERE, Place.PENDING) for d in root.dirs)

    def _learns(self, root: Root, save: int) -> Root:
        """A save that was adopted is told, too."""
        there = any(d.save == save for _, d in root.having(Place.PUBLISHED))
        return root._replace(told=root.told | {save}) if there else root

    # -- the coordinator's: begin --------------------------------------------------------------------------------------

    def _coordinator(self, job: Job, root: Root, rank: int, state: str) -> Iterator[tuple[str, Job, Root]]:
        yield from getattr(self, f"_writer_{state}")(job, root)

    def _writer_called(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        others = self._others(job, root) if Bug.SUPERSEDE_FIRST in self.bugs else []
        if others:
            number = root.published()[max(others)]
            after = self.superseded(root.moved(number, Place.ASIDE), root.dirs[number].save)
            yield f"moves step {max(others)} aside at once", job, after
        elif Bug.LOOK_BEFORE_MAKING not in self.bugs:
            yield self._make(job, root, "made")
        elif root.top == job.token:
            yield "looks at the token too early", job.with_writer(0, "early"), root
        else:
            yield "is fenced", job.with_writer(0, "fenced"), root

    def _writer_early(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        yield self._make(job, root, "made")

    def _make(self, job: Job, root: Root, then: str) -> tuple[str, Job, Root]:
        save = self.save_of(job)
        if root.pending_of(save) is None and self._is_decided(root, save):
            return "finds its save decided", job.with_writer(0, "idle"), root
        return "makes the pending directory", job.with_writer(0, then), self._made(root, save)

    def _writer_made(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        number = root.pending_of(self.save_of(job))
        if number is None:
            yield "finds its save decided", job.with_writer(0, "idle"), root
        else:
            d = root.dirs[number]._replace(intent=self.save_of(job))
            then = "joins" if Bug.LOOK_BEFORE_MAKING in self.bugs else "begun"
            yield "makes the intent", job.with_writer(0, then), root.with_dir(number, d)

    def _writer_begun(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        """A fenced save is removed again: its part of rank 0 is not there, so that no owner has published it."""
        number = root.pending_of(self.save_of(job))
        if root.top == job.token:
            yield "looks at the token", job.with_writer(0, "joins"), root
        elif number is None or Bug.FENCED_WRITER_ABANDONS in self.bugs:
            yield from self._is_fenced(job, root)
        else:
            yield "is fenced, and removes its save", job.with_writer(0, "fenced"), root.moved(number, Place.DELETED)

    def _is_fenced(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        number = root.pending_of(self.save_of(job))
        if number is not None and Bug.FENCED_WRITER_ABANDONS in self.bugs:
            root = root.moved(number, Place.ABANDONED)
        yield "is fenced", job.with_writer(0, "fenced"), root

    # -- the coordinator's: publish ------------------------------------------------------------------------------------

    def _writer_waits(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        save = self.save_of(job)
        number = root.pending_of(save)
        if number is None:
            yield "learns the outcome", job.with_writer(0, "idle"), self._learns(root, save)
            return
        missing = set(range(len(job.writers))) - root.dirs[number].parts
        if not missing:
            if others := self._others(job, root):
                yield from self._lists(job, root, others)
            elif root.top == job.token or Bug.NO_LOOK_AT_PUBLISH in self.bugs:
                yield "looks at the token before the rename", job.with_writer(0, "commits"), root
            else:
                yield from self._is_fenced(job, root)
        elif job.pc == "ended" and all(job.writers[rank] in ("dead", "idle") for rank in missing):
            yield "ends, nobody writes the rest", job.with_writer(0, "idle"), root

    def _others(self, job: Job, root: Root) -> list[int]:
        """The steps of other owners that are newer than what this job continues."""
        return [step for step, n in root.published().items() if step > job.restored and self.is_foreign(root, n, job)]

    def _lists(self, job: Job, root: Root, others: list[int]) -> Iterator[tuple[str, Job, Root]]:
        step = max(others)
        listed = step, root.dirs[root.published()[step]].save
        if root.top == job.token:
            yield f"lists step {step} to be moved aside", job.with_writer(0, "moves")._replace(listed=listed), root
        else:
            yield from self._is_fenced(job, root)

    def _writer_moves(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        """Whatever has the name of the step is moved, perhaps by a writer that has been fenced meanwhile."""
        step, listed = job.listed
        number = root.published().get(step)
        if number is None:
            yield f"finds no step {step}", job.with_writer(0, "waits")._replace(listed=(-1, -1)), root
        else:
            moves = job.with_writer(0, "checks")._replace(listed=(number, listed))
            yield f"renames step {step} out of the way", moves, root.moved(number, Place.MOVED, job.token)

    def _writer_checks(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        if root.top == job.token:
            yield "looks at the token again", job.with_writer(0, "settles"), root
        else:
            yield "is fenced, and puts the step back", *self._back(job, root)

    def _back(self, job: Job, root: Root) -> tuple[Job, Root]:
        number, _ = job.listed
        mine = root.dirs[number].place is Place.MOVED and root.dirs[number].mover == job.token
        return job.with_writer(0, "fenced")._replace(listed=(-1, -1)), root.put_back(number) if mine else root

    def _writer_settles(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        number, _ = job.listed
        d = root.dirs[number]
        after = job.with_writer(0, "waits")._replace(listed=(-1, -1))
        if d.place is Place.MOVED and d.mover == job.token:
            yield f"moves save {d.save} aside", after, self.superseded(root.moved(number, Place.ASIDE), d.save)
        else:
            yield "finds it put back", after, root

    def _writer_commits(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        save = self.save_of(job)
        number, step = root.pending_of(save), root.saves[save].step
        if number is None:
            yield "finds its save decided", job.with_writer(0, "idle"), self._learns(root, save)
        elif step in root.published() and root.saves[root.dirs[root.published()[step]].save].token < job.token:
            yield f"finds step {step} put back", job.with_writer(0, "waits"), root
        elif step in root.published():
            after = root.moved(number, Place.GIVEN_UP)
            if self.is_foreign(root, root.published()[step], job):
                after = after.wrong(
                    f"step {step} of an owner that has decided all is refused: another has published it"
                )
            yield f"finds step {step} taken", job.with_writer(0, "idle"), after
        else:
            after = root.publish(number)
            others = self._others(job, root)
            if others:
                after = after.wrong(f"step {step} continues {job.restored}, beside the steps {others} of other owners")
            yield f"publishes step {step}", job.with_writer(0, "keeps"), after._replace(told=root.told | {save})

    def is_foreign(self, root: Root, number: int, job: Job) -> bool:
        return root.saves[root.dirs[number].save].token != job.token

    # -- the coordinator's: retention ----------------------------------------------------------------------------------

    def _writer_keeps(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        """The newest step stays. Look what is older, and at the token."""
        published = root.published()
        old = [step for step in published if step < root.saves[self.save_of(job)].step]
        if not old or root.top != job.token:
            yield "has nothing to remove", job.with_writer(0, "idle"), root
        else:
            listed = min(old), root.dirs[published[min(old)]].save
            yield f"lists step {min(old)} for removal", job.with_writer(0, "removes")._replace(listed=listed), root

    def _writer_removes(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        step, listed = job.listed
        number = root.published().get(step)
        if number is None:
            yield f"finds no step {step}", job.with_writer(0, "keeps")._replace(listed=(-1, -1)), root
        else:
            removes = job.with_writer(0, "inspects")._replace(listed=(number, listed))
            yield f"renames step {step} out of the way", removes, root.moved(number, Place.MOVED, job.token)

    def superseded(self, root: Root, save: int) -> Root:
        """What is moved by a later owner, or by its own, is no longer told to be there."""
        return root._replace(told=root.told - {save})

    def _writer_inspects(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        if root.top == job.token or Bug.REMOVE_UNSEEN in self.bugs:
            yield "looks at the token again", job.with_writer(0, "deletes"), root
        else:
            yield "is fenced, and puts the step back", *self._back(job, root)

    def _writer_deletes(self, job: Job, root: Root) -> Iterator[tuple[str, Job, Root]]:
        number, listed = job.listed
        job = job.with_writer(0, "keeps")._replace(listed=(-1, -1))
        d = root.dirs[number]
        if d.place is not Place.MOVED or d.mover != job.token:
            yield "finds it put back", job, root
            return
        root = self.superseded(root, listed)
        if self.reuse:
            for earlier, _ in list(root.having(Place.RETIRED)):
                root = root.moved(earlier, Place.DELETED)
            intent = d.intent if Bug.OVERWRITE_WITH_INTENT in self.bugs else -1
            retired = d._replace(place=Place.RETIRED, save=-1, intent=intent, parts=frozenset(), mover=0)
            yield "removes the intent, and keeps the files", job, root.with_dir(number, retired)
        else:
            yield "deletes it", job, root.moved(number, Place.DELETED)
