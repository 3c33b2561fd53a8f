"""The writer's half of a save: write this rank's pack, record it, and wait until the save is decided.

Runs in a writer process, without torch. If only the trainer is killed, its writer goes on. If only the writer is
killed, its trainer gives the save up on all ranks, unless it is published. If both are killed:

    killed                     left in the root                        outcome
    -------------------------  --------------------------------------  -----------------------------------------------
    before `join` or `begin`   nothing, or what other ranks have left  abandoned by the other ranks or the next start
    before `begin`'s intent    .pending/<save> without an intent       abandoned by the other ranks or the next start
    after `begin`              .pending/<save> with its intent         abandoned by the other ranks or the next start
    while files are written    the same, with files                    abandoned by the other ranks or the next start
    after the part manifest    this rank's part, whole and durable     published if every rank gets here, by the
                                                                       coordinator or the next start; else abandoned
    before the rename          every part, and the step's documents    published by the next start
    after the rename           the step                                published
    while steps are removed    .abandoned/<step>-moving-..             published again by the next start
                               .abandoned/<step>-removed-..            deleted by the next removal of this or a new job
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from ckpt.async_calls.writer_main import current
from ckpt.errors import (
    CheckpointError,
    FencedError,
    StorageError,
)
from ckpt.ranks.failure import Failure
from ckpt.saving.for_readers import IN_PART, PlanFiles, files_of_plan
from ckpt.saving.giving_up import Fenced, error_for, give_up
from ckpt.saving.patience import Patience
from ckpt.saving.publish import PartFile, publish
from ckpt.saving.recover import Branch, supersede, superseded, take_over
from ckpt.saving.remover import Remover
from ckpt.saving.retention import Facts, PublishedStep, retain
from ckpt.saving.task import (
    COORDINATOR,
    NotDurable,
    PlannedFile,
    ReplicasDiffer,
    Report,
    SharePublished,
    SlotFree,
    StepsRemoved,
    WriteTask,
    are_in,
    to_event,
    unpickled_plan,
)
from ckpt.saving.waiting import LookSchedule, OrphanedError, Waiting, look_schedule, ranks_here
from ckpt.storage.chunk_layout import in_pages
from ckpt.storage.interface import Pending
from ckpt.storage.leases import Lease, Leases
from ckpt.storage.names import INDEX, pack_file
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.outcomes import Abandoned, NotDurableError, Published
from ckpt.storage.pack_writers import FileJob, WrittenFile
from ckpt.storage.parts_watch import PartsWatch
from ckpt.storage.roots import open_root
from ckpt.storage.unchanged_files import UnchangedFiles
from inprocess.ipc.deadline import Deadline

__all__ = ["Fenced", "ShareWriter", "error_for", "give_up", "write_share"]

_T = TypeVar("_T")
_log = logging.getLogger("ckpt")
_EVERYONE = "all ranks to finish their parts"
_REASON_S, _REASON_PAUSE_S = 5.0, 0.05


def write_share(task: WriteTask, report: Callable[[Report], None] | None = None) -> None:
    """Run a task; what it tells the trainer goes to `report` when this is the trainer. See `ShareWriter.run`."""
    ShareWriter(task, report).run()


class ShareWriter:
    """Writes one rank's share of one save. Lives for one call, in one thread.

    `memory_of` returns the bytes of a file, in whole pages; None: they are in the slot. It is called in the threads
    that write, as many as the task says, and the bytes are written before the thread calls it again.
    """

    def __init__(
        self,
        task: WriteTask,
        report: Callable[[Report], None] | None = None,
        memory_of: Callable[[PlannedFile], memoryview] | None = None,
    ) -> None:
        self.task = task
        self.plan = unpickled_plan(task.plan)
        self._contents = dict(zip(self.plan.files, task.contents, strict=False))
        self.pending: Pending = open_root(task.root, task.storage).pending_save(task.save)
        here = task.options.node_local
        self.packs = None if here is None else NodePacks(here, self.pending.root)
        self.context = current()  # None in the trainer; the threads of a pool have none of their own
        self._report_here = report
        self._memory_of = memory_of or self._in_slot
        self._written: SharePublished | None = None  # what will be reported, but for the time
        self._unchanged = self._kept("unchanged files", UnchangedFiles)

    def run(self) -> None:
        """Write, and wait for the decision.

        Raises SaveAbandonedError or CheckpointExistsError if the save is abandoned, FencedError if a later job owns the
        root, NotDurableError if the step is published but may be lost with the power.
        """
        task = self.task
        outcome: Published | Abandoned | Fenced
        lease: Lease | None = None
        try:
            lease = self._register()
            outcome = self._explained(self._write_and_decide())
        except FencedError:
            raise  # the new owner decides about the save
        except NotDurableError as error:
            self._report(NotDurable(str(error)))
            raise
        except OrphanedError:
            if task.rank != COORDINATOR:
                raise  # the part stays: the next start of the job publishes the save if it is complete
            outcome = give_up(self.pending, Failure.of(OrphanedError("every trainer died"), task.rank))
        except Exception as error:
            outcome = self._explained(give_up(self.pending, self._reason_for(error)))
        finally:
            self._tell_of_recoveries()
            if lease is not None and self.context is None:  # nothing keeps it from one save to the next
                lease.close()
        if isinstance(outcome, Published):
            self._unchanged.published(self.pending.root, task.save.step)
            if self._written is not None:
                self._report(replace(self._written, at=time.time()))
            if task.rank == COORDINATOR:
                self._retain()
        if not isinstance(outcome, Fenced):
            if self.packs is not None:
                self.packs.note_decided(task.save)
            self._remove_later(others=isinstance(outcome, Abandoned))
        if isinstance(outcome, Abandoned):
            self._report(outcome)
        if isinstance(outcome, Abandoned | Fenced):
            raise error_for(task.save, outcome)

    def _write_and_decide(self) -> Published | Abandoned:
        """Take all steps in order."""
        self._wait_until_staged()
        remover = self._remover()
        before_pause = self._progress if remover is None else remover.hurry
        self.pending.tries_again = Patience(self.task.options.commit_timeout_s, before_pause)
        with self._removal_held():
            self._begin()
            written, times = self._write()
        self._report(SlotFree())
        manifest = self._manifest(written, times)
        self._written = SharePublished(0.0, sum(file.nbytes for file in written if not file.is_linked), **times)
        return self._decide((manifest, self.pending.write_part(self.task.rank, manifest)))

    def _tell_of_recoveries(self) -> None:
        """Log, once, that other processes took this job for dead and decided its saves, and that it goes on."""
        told: set[int] = set() if self.context is None else self.context.keep(("recoveries", self.task.root), set)
        for token, claim in self.pending.root.ownership.passed_over.items():
            if token not in told:
                told.add(token)
                _log.warning(
                    "%s: this job seemed to be dead, as it was stopped, to %s, which decided the saves that were under "
                    "way then in its restore. This job still owns the root, and goes on",
                    self.task.root,
                    claim,
                )

    def _retain(self) -> None:
        """Remove superfluous steps."""
        root, task = self.pending.root, self.task
        about = task.save.owner, task.save.step, self.plan.plan_digest, self._facts()
        retained = retain(root, task.options.retention, *about, held=task.held)
        retained.warn(self._kept("failed removals", set[int | str]), task.root)
        if retained.removed:
            for report in StepsRemoved.reports(retained.left, list(retained.removed)):
                self._report(report)

    def _facts(self) -> Facts:
        """Return what this process knows of published steps already."""
        return self._kept("facts", dict[tuple[int, float], PublishedStep])

    def _kept(self, name: str, make: Callable[[], _T]) -> _T:
        """Return the memory of this process from one save to the next, made anew in the trainer."""
        return make() if self.context is None else self.context.keep((name, self.task.root), make)

    # -- the steps -----------------------------------------------------------------------------------------------------

    def _register(self) -> Lease:
        """Register this process as a writer of its rank, once for all saves of one owner: its death is noticed."""
        try:
            return self._registered()
        except StorageError:
            self.pending.root.make()  # if it was removed, the job goes on in a new one
            self.pending.check_token()
            return self._registered()

    def _registered(self) -> Lease:
        leases, task, running = self._leases(), self.task, self.context
        if running is None:
            return leases.register(task.rank, task.trainer, lambda: False)
        world_size = self.plan.world_size
        lease = running.keep(
            ("lease", leases.path), lambda: leases.register(task.rank, task.trainer, running.trainer_left, world_size)
        )
        lease.ensure()  # the root may have been removed since
        return lease

    def _leases(self) -> Leases:
        return self.pending.root.ownership.leases(self.task.save.owner)

    def _wait_until_staged(self) -> None:
        """Wait for the flag, which is copied behind the data on the same CUDA stream and so arrives last."""
        offset = self.task.flag_offset
        flag = self.task.region.buffer[offset : offset + 8]
        for _ in self._waiting("the copies from the device"):
            if int.from_bytes(flag, "little") == self.task.generation:
                return
            if self._trainer_left():
                raise StorageError(f"the trainer of rank {self.task.rank} died before its state was staged")

    def _begin(self) -> None:
        """Make the directory to write to. The coordinator also begins the save; the other ranks do not wait for that.

        What they write before it is in no save that can be published, until the coordinator has begun it.
        """
        if self.task.rank == COORDINATOR:
            self._open()
        else:
            self.pending.join()
        if self.packs is not None:
            self.packs.clean_before(self.task.save.owner)
        if self.task.options.retention.reuse_files:
            names = [pack_file(self.task.rank, file.number) for file in self.plan.files]
            self.pending.take_recycled(self.plan.plan_digest, names)

    def _open(self) -> None:
        """Begin the save: with its intent it can be published."""
        pending, task = self.pending, self.task
        others: list[int] = []
        if task.branch is not None:
            pending.root.make()
            pending.check_token()
            wait_s = task.options.commit_timeout_s / 2  # the other ranks wait for this as long as for anything
            take_over(pending.root, task.save.owner, task.branch, wait_s, _log.warning)
            others = superseded(pending.root, task.save.owner, task.branch)
        pending.root.discard_recycled(self.plan.plan_digest if task.options.retention.reuse_files else None)
        continues = (task.branch or Branch()).before(pending.root, task.save.owner)
        lineage = task.lineage.to_document()
        pending.begin(self.plan.world_size, self.plan.plan_digest, continues, others, lineage)

    def _write(self) -> tuple[list[WrittenFile], dict[str, float]]:
        """Write the files and make them durable; return what was written, and how long that took."""
        begin, started = time.time(), time.perf_counter()  # the second clock is never set
        plan, task = self.plan, self.task
        threads = task.options.threads
        shared = own = self.pending.pack_writer(task.rank, threads=threads, reuse=task.options.retention.reuse_files)
        if self.packs is not None:
            own = self.packs.writer(task.save, task.rank, threads=threads)
        shared.tries_again = own.tries_again = self.pending.tries_again

        self._unchanged.begin(plan.plan_digest if task.options.link_unchanged else None)

        def write_one(file: PlannedFile) -> WrittenFile:
            written = self._unchanged.write(shared if file.is_common else own, self._file_job(file))
            self._progress()
            return written

        # Those that compress would only take the contents of processors' caches from each other, if they were more.
        at_once = min(threads, len(os.sched_getaffinity(0))) if plan.to_compress else threads
        with ThreadPoolExecutor(at_once, "ckpt-write") as pool:
            writing = pool.map(write_one, plan.files)
            if plan.index:
                shared.write_documents({INDEX: plan.index, **self._for_readers().files})
            written = list(writing)
        end = time.perf_counter()
        own.finish()
        if shared is not own:
            shared.finish()
        self._unchanged.synced(shared)
        self._progress()
        return written, {"write_begin": begin, "write_s": end - started, "sync_s": time.perf_counter() - end}

    def _for_readers(self) -> PlanFiles:
        plan, options = self.plan, self.task.options
        is_scattered = options.node_local is not None and plan.has_own_files
        return files_of_plan(plan.index, plan.world_size, options.database_chunks, scattered=is_scattered)

    def _file_job(self, file: PlannedFile) -> FileJob:
        starts, sizes = self.plan.inner_chunks.each(file.first, file.end)
        to_compress = self.plan.to_compress[file.first : file.end]
        inner = starts - file.offset, sizes, are_in(self.task.checksummed, starts)
        return FileJob(file.number, file.nbytes, self._memory_of(file), *inner, to_compress, self._contents.get(file))

    def _in_slot(self, file: PlannedFile) -> memoryview:
        return self.task.region.buffer[file.offset : file.offset + in_pages(file.nbytes)]

    def _manifest(self, written: list[WrittenFile], times: dict[str, float]) -> dict[str, Any]:
        """Return the part manifest. With it in the save, this rank's part is complete."""
        plan, task = self.plan, self.task
        replicas = {} if task.replicas is None else {"replicas": task.replicas.document(task.region.buffer)}
        chunks = [[array, copy, file.number, *place] for file in written for array, copy, *place in file.chunks]
        database = {IN_PART: self._for_readers().in_part} if plan.index else {}
        return {
            "save": task.save.name,
            "rank": task.rank,
            "world_size": plan.world_size,
            "plan": plan.plan_digest,
            "files": [[file.number, file.nbytes, file.crc32c] for file in written],
            "values": task.values,
            "aliases": [[list(path), list(target)] for path, target in plan.aliases],
            "containers": [[list(path), rank, document] for path, rank, document in plan.containers],
            "times": {**task.times, **times},
            **({"chunks": chunks} if chunks else {}),
            **database,
            **replicas,
        }

    def _decide(self, part: PartFile) -> Published | Abandoned:
        """Publish as soon as all parts are there, on the coordinator; the other ranks wait for the decision."""
        return self._decide_for_all(part) if self.task.rank == COORDINATOR else self._learn_decision()

    def _decide_for_all(self, part: PartFile) -> Published | Abandoned:
        pending = self.pending
        parts = PartsWatch(pending, self.plan.world_size)
        schedule = self._schedule()
        for _ in self._waiting(_EVERYONE, lambda: parts.missing, schedule):
            schedule.operations = 1 + parts.directories_left
            if parts.look():
                published = publish(
                    pending,
                    self._progress,
                    {COORDINATOR: part},
                    warn=lambda names, mixed: self._report(ReplicasDiffer(tuple(names), mixed)),
                    before_commit=self._supersede,
                )
                self._supersede()  # an earlier owner that was about to move a step may have put it back just now
                return published
            if (outcome := pending.decided()) is not None:
                return self._confirmed(outcome)
        raise AssertionError("unreachable")

    def _learn_decision(self) -> Published | Abandoned:
        schedule = self._schedule()
        for _ in self._waiting(_EVERYONE, lambda: (COORDINATOR,), schedule):
            outcome, schedule.operations = self.pending.look()
            if outcome is not None:
                return self._confirmed(outcome)
        raise AssertionError("unreachable")

    def _schedule(self) -> LookSchedule:
        task, plan = self.task, self.plan
        lock = NodeLock(f"save {task.save.name} in {task.root}")
        least_s = self.pending.root.least_look_s
        here = ranks_here(self._leases())
        return look_schedule(task.rank, plan.world_size, here, lock, task.options.looks_per_s, least_s)

    def _confirmed(self, outcome: Published | Abandoned) -> Published | Abandoned:
        if isinstance(outcome, Published):
            self.pending.confirm()
        return outcome

    def _reason_for(self, error: Exception) -> Failure:
        """Return the reason that is recorded for an error; another rank may have abandoned the save before."""
        reason = Failure.of(error, self.task.rank)
        with contextlib.suppress(CheckpointError):
            return replace(reason, is_known=not isinstance(self.pending.outcome(), Abandoned))
        return reason

    def _explained(self, outcome: Published | Abandoned | Fenced) -> Published | Abandoned | Fenced:
        """Wait for the reason of an abandoned save that storage did not take, as on a full disk, for some seconds.

        The trainer of the rank that knows it tells the others, and may be busy.
        """
        deadline = Deadline(_REASON_S if self.context is not None and self.plan.world_size > 1 else 0.0)
        while isinstance(outcome, Abandoned) and not outcome.is_explained and not deadline.is_over:
            self._progress()
            time.sleep(_REASON_PAUSE_S)
            with contextlib.suppress(CheckpointError):
                if isinstance(found := self.pending.outcome(), Abandoned) and found.is_explained:
                    return found
        return outcome

    def _supersede(self) -> None:
        if self.task.branch is not None:
            supersede(self.pending.root, self.task.save.owner, self.task.branch, _log.warning)

    # -- removal -------------------------------------------------------------------------------------------------------

    def _remover(self) -> Remover | None:
        """Return what deletes the files of removed steps between the saves of this process; None in the trainer."""
        running, task = self.context, self.task
        if running is None:
            return None
        make = functools.partial(Remover, self.pending.root, task.rank, self.plan.world_size, self.packs)
        return running.keep(("remover", task.root, task.rank, self.plan.world_size), make)

    def _removal_held(self) -> contextlib.AbstractContextManager[object]:
        remover = self._remover()
        return contextlib.nullcontext() if remover is None else remover.held()

    def _remove_later(self, *, others: bool) -> None:
        """Delete the files of removed steps: in the background, but at once where nothing goes on after this call.

        With `others` also what is left of saves.
        """
        remover = self._remover()
        if remover is not None:
            remover.start(others=others)
            return
        with contextlib.suppress(CheckpointError):
            if self.packs is not None:
                self.packs.clean(lambda: None)
            if self.task.rank == COORDINATOR:
                self.pending.root.clean()

    # -- waiting, and what the trainer is told -------------------------------------------------------------------------

    def _waiting(
        self,
        what: str,
        awaited: Callable[[], Iterable[int]] = lambda: (),
        schedule: LookSchedule | None = None,
    ) -> Waiting:
        return Waiting(self.task, self.plan.world_size, self.context, what, awaited, schedule, pending=self.pending)

    def _progress(self) -> None:
        if self.context is not None:
            self.context.progress()

    def _trainer_left(self) -> bool:
        return self.context is not None and self.context.trainer_left()

    def _report(self, report: Report) -> None:
        if self.context is not None:
            self.context.report(to_event(report))
        elif self._report_here is not None:
            self._report_here(report)
