"""The writer's half of a save: write this rank's chunk files, say so, and wait until the save is decided.

Runs in a writer process, without torch. Read `PartWriter.__call__` from top to bottom; what a crash leaves after each
step:

    register           a lease that says that this process is alive: its death is noticed
    begin / join       a directory with an intent and no part: abandoned by the next owner
    write and sync     the same, with files
    part manifest      as good as written: if every rank gets here the step will be published, also after the death of
                       all trainers
    publish            the coordinator renames the directory; a crash just before it leaves a complete save, which the
                       next start publishes
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ckpt.async_calls import CallTimer, context
from ckpt.async_calls.messages import clip
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTimeoutError,
    FencedError,
    RemoteTraceback,
    SaveAbandonedError,
    StorageError,
)
from ckpt.saving.part import Image, PartPlan
from ckpt.saving.publish import PartFile, Retention, publish, retain
from ckpt.saving.recover import Branch, supersede, superseded, take_over
from ckpt.saving.replicas import Digests
from ckpt.storage.chunk_codec import WrittenChunk
from ckpt.storage.chunk_writers import ChunkJob, ChunkWriter, DirectChunkWriter, TensorStoreChunkWriter
from ckpt.storage.commit import Abandoned, NotDurableError, PendingSave, Published, Reason
from ckpt.storage.leases import Lease, Leases
from ckpt.storage.names import SaveId
from ckpt.storage.recycled import discard_recycled, take_recycled
from ckpt.storage.root import CheckpointRoot
from inprocess.ipc.process import Process
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["PartWriter", "SaveOptions"]

_log = logging.getLogger("ckpt")
_COORDINATOR = 0
_CHUNKS_PER_EVENT = 200
_ORPHAN_GRACE_S = 3.0  # how long a writer without a trainer waits for others who do nothing
_FIRST_PROBE_S = 1.0
_ALIVE_LOOK_S = 0.25  # how often a writer without a trainer looks whether the others are alive
_TRACEBACK_BYTES = 16 << 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a writer works. `commit_timeout_s` bounds every wait for other ranks; `threads` write at once in one
    process."""

    threads: int = 6
    commit_timeout_s: float = 600.0
    retention: Retention = field(default_factory=Retention)


class _OrphanedError(CheckpointTimeoutError):
    """No process is left that could finish this save now."""


@dataclass
class PartWriter:
    """One rank's part of one save (or a piece of it), to be run by a writer process; the trainer keeps the original.

    `plan` is a pickled PartPlan, made once. `region` holds the images of piece number `piece`. `values` are the
    (encoded) leaves that are not tensors, `times` what the trainer measured. The images are complete when the 8 bytes
    at `flag_offset` hold `generation`: on CUDA that may be after the call was scheduled. `sealed` are the offsets in
    the region of what has its checksum behind it. `earlier` are the chunks that were written with earlier pieces. With
    a `branch` the coordinator first takes over what earlier owners of the root left.
    `replicas` are the digests of what other ranks have, too.
    """

    root: str
    save: SaveId
    rank: int
    plan: bytes
    region: SharedMemory
    flag_offset: int
    generation: int
    piece: int
    last: bool
    values: list[Any]
    times: dict[str, float]
    options: SaveOptions
    trainer: Process
    branch: Branch | None = None
    sealed: frozenset[int] = frozenset()
    earlier: list[tuple[str, str, int, int]] = field(default_factory=list)
    replicas: Digests | None = None
    on_slot_free: Callable[[], None] | None = None
    on_written: Callable[[list[tuple[str, str, int, int]]], None] | None = None
    on_decided: Callable[[], Any] | None = None
    on_begun: Callable[[int], CallTimer | None] | None = None
    on_differing: Callable[[list[str], bool], None] | None = None
    reported: Reason | None = None

    def __getstate__(self) -> dict[str, Any]:
        callbacks = {"on_slot_free": None, "on_written": None, "on_decided": None, "on_begun": None}
        callbacks |= {"on_differing": None}
        return {**self.__dict__, **callbacks, "sealed": _offsets_as_bytes(self.sealed)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, sealed=_offsets_of_bytes(state["sealed"]))

    def __call__(self) -> None:
        """Write, and wait for the decision. Raises SaveAbandonedError unless the step is published in the end,
        FencedError if a later job owns the root, NotDurableError if it may be lost with the power."""
        plan = _plan(self.plan)
        pending = self._pending()
        lease: Lease | None = None
        try:
            lease = self._register(pending)
            self._wait_until_staged(pending)
            self._begin(pending, plan)
            written, times = self._write(pending, plan)
            self._report_slot_free(written)
            if not self.last:
                return
            manifest = self._manifest(plan, written, times)
            part = manifest, pending.write_part(self.rank, manifest)
            outcome = self._decide(pending, plan, part)
        except FencedError:
            raise  # the new owner decides about the save
        except NotDurableError as error:
            _report_or(self.on_event, {"failed": self._reason(error).to_document()})
            raise
        except _OrphanedError:
            if self.rank != _COORDINATOR:
                raise  # the part stays: the next start of the job publishes the save if it is complete
            outcome = self._give_up(pending, self._reason(_OrphanedError("every trainer died")))
        except Exception as error:
            outcome = self._give_up(pending, self._reason(error))
        finally:
            if context.current() is None:  # run by `execute_sync`, no `abandoned` will follow
                self.free_slot()
                if lease is not None:
                    lease.close()
        if isinstance(outcome, Abandoned):
            _report_or(self.on_event, {"failed": outcome.reason.to_document()})
            raise _error_for(self.save, outcome.reason)
        if self.rank == _COORDINATOR:
            retain(pending.root, self.options.retention, self.save.owner, self.save.step, plan.plan_digest)

    def on_event(self, event: dict[str, Any]) -> None:
        """Trainer: the writer said what it has written, what ranks have different, that nothing reads the slot any
        more, or why it gave up."""
        if self.on_written is not None and "written" in event:
            self.on_written([(str(d), str(key), int(size), int(crc)) for d, key, size, crc in event["written"]])
        if self.on_differing is not None and "differing" in event:
            self.on_differing([str(name) for name in event["differing"]], bool(event["mixed"]))
        if "slot_free" in event:
            self.free_slot()
        if "failed" in event:
            self.reported = Reason.from_document(event["failed"])

    def abandoned(self, error: CheckpointError) -> CheckpointError | None:
        """Trainer: the call cannot complete. Makes sure the save is decided on all ranks; None if it was published
        after all, durably as far as is known."""
        self.free_slot()
        outcome = self._give_up(self._pending(), self.reported or self._reason(error))
        if self.on_decided is not None:
            self.on_decided()
        if isinstance(outcome, Abandoned):
            result = _error_for(self.save, outcome.reason)
        elif self.reported is not None:
            result = NotDurableError(self.reported.message, rank=self.rank, step=self.save.step)
        elif self.last:
            _log.warning("step %d is published, but its writer failed afterwards: %s", self.save.step, error)
            return None
        else:
            result = error
        result.__cause__ = result.__cause__ or error
        return result

    def _pending(self) -> PendingSave:
        return PendingSave(CheckpointRoot(self.root), self.save)

    def free_slot(self) -> None:
        """Trainer: nobody reads the slot any more. Idempotent."""
        callback, self.on_slot_free = self.on_slot_free, None
        if callback is not None:
            callback()

    def _report_slot_free(self, written: list[WrittenChunk]) -> None:
        if not self.last:
            for first in range(0, len(written), _CHUNKS_PER_EVENT):
                records = [_record(chunk) for chunk in written[first : first + _CHUNKS_PER_EVENT]]
                _report_or(self.on_event, {"written": records})
        _report_or(self.on_event, {"slot_free": True})

    # -- the steps -----------------------------------------------------------------------------------------------------

    def _register(self, pending: PendingSave) -> Lease:
        """Enter this process as a writer of its rank, once for all saves of one owner."""
        try:
            return self._entered(pending)
        except StorageError:
            pending.root.make()  # if it was removed, the job goes on in a new one
            pending.check_token()
            return self._entered(pending)

    def _entered(self, pending: PendingSave) -> Lease:
        leases = self._leases(pending)
        running = context.current()
        if running is None:
            return leases.register(self.rank, self.trainer, lambda: False)
        lease = running.keep(
            ("lease", leases.path), lambda: leases.register(self.rank, self.trainer, running.trainer_gone)
        )
        lease.ensure()  # the root may have been removed since
        return lease

    def _leases(self, pending: PendingSave) -> Leases:
        return pending.root.ownership.leases(self.save.owner)

    def _wait_until_staged(self, pending: PendingSave) -> None:
        """The flag is copied behind the data on the same CUDA stream, so it arrives last."""
        flag = self.region.buffer[self.flag_offset : self.flag_offset + 8]
        for _ in self._pauses(pending, "the copies from the device", lambda: ()):
            if int.from_bytes(flag, "little") == self.generation:
                return
            if _trainer_gone():
                raise StorageError(f"the trainer of rank {self.rank} died before its state was staged")

    def _begin(self, pending: PendingSave, plan: PartPlan) -> None:
        """The coordinator opens the save; the others wait until it has."""
        if self.rank == _COORDINATOR and self.piece == 0:
            others: list[int] = []
            if self.branch is not None:
                pending.root.make()
                pending.check_token()
                wait_s = self.options.commit_timeout_s / 2  # the other ranks wait for this as long as for anything
                take_over(pending.root, self.save.owner, self.branch, wait_s, _log.warning)
                others = superseded(pending.root, self.save.owner, self.branch)
            if self.options.retention.reuse_files:
                take_recycled(pending, plan.plan_digest)
            else:
                discard_recycled(pending.root)
            continues = (self.branch or Branch()).before(pending.root)
            pending.begin(plan.world_size, plan.plan_digest, continues, others)  # the others wait for it
            with contextlib.suppress(CheckpointError):
                pending.root.clean()
            return
        for _ in self._pauses(pending, "the coordinator (rank 0) to begin the save", lambda: (_COORDINATOR,)):
            if pending.has_begun():
                return
            if pending.outcome() is not None:
                break
        raise StorageError(f"save {self.save.name} was decided before this rank could write its part")

    def _write(self, pending: PendingSave, plan: PartPlan) -> tuple[list[WrittenChunk], dict[str, float]]:
        begin = time.time()
        compressed = any(meta.compression for meta in plan.metas)
        writer: ChunkWriter
        if compressed:
            writer = TensorStoreChunkWriter(pending.path, threads=self.options.threads)
        else:
            reuse = self.options.retention.reuse_files
            writer = DirectChunkWriter(pending.path, threads=self.options.threads, reuse=reuse)
        images = [image for image in plan.images if image.piece == self.piece]
        images.sort(key=lambda image: image.image_bytes)  # the disk has work before the first large checksum is made
        described = plan.described if self.piece == 0 else ()
        running = context.current()  # the threads of the pool have none of their own

        def write_one(image: Image) -> WrittenChunk:
            view = self.region.buffer[image.offset : image.offset + image.image_bytes]
            meta = plan.metas[image.array]
            offsets = [piece.offset for piece in meta.layout(image.index).inner_chunks]
            sealed = [offset for offset in offsets if image.offset + offset in self.sealed]
            chunk = writer.write(ChunkJob(meta, plan.directories[image.array], image.index, view, frozenset(sealed)))
            if running is not None:
                running.progress()
            return chunk

        with ThreadPoolExecutor(self.options.threads, "ckpt-write") as pool:
            chunks = pool.map(write_one, images)
            documents = pool.map(lambda n: writer.describe(plan.directories[n], plan.metas[n]), described)
            written = list(chunks)
            list(documents)
        end = time.time()
        writer.finish()
        _progress()
        return written, {"write_begin": begin, "write_s": end - begin, "sync_s": time.time() - end}

    def _manifest(self, plan: PartPlan, written: list[WrittenChunk], times: dict[str, float]) -> dict[str, Any]:
        chunks: dict[str, list[list[Any]]] = {}
        for directory, key, file_bytes, crc32c in [*self.earlier, *map(_record, written)]:
            chunks.setdefault(directory, []).append([key, file_bytes, crc32c])
        replicas = {} if self.replicas is None else {"replicas": self.replicas.document(self.region.buffer)}
        return {
            "save": self.save.name,
            "rank": self.rank,
            "world_size": plan.world_size,
            "plan": plan.plan_digest,
            "arrays": {plan.directories[number]: plan.metas[number].array_document() for number in plan.described},
            "chunks": chunks,
            "values": self.values,
            "packed": plan.packed,
            "aliases": [[list(path), list(target)] for path, target in plan.aliases],
            "times": {**self.times, **times},
            **replicas,
        }

    def _decide(self, pending: PendingSave, plan: PartPlan, part: PartFile) -> Published | Abandoned:
        """The coordinator publishes as soon as all parts are there; the others wait for what becomes of the save."""
        everyone = set(range(plan.world_size))

        def awaited() -> Iterable[int]:
            return everyone - pending.parts_present() if self.rank == _COORDINATOR else (_COORDINATOR,)

        for _ in self._pauses(pending, "all ranks to finish their parts", awaited):
            outcome = pending.decided()
            if outcome is not None:
                if isinstance(outcome, Published):
                    pending.confirm()
                return outcome
            if self.rank == _COORDINATOR and pending.parts_present() >= everyone:
                return publish(
                    pending,
                    _progress,
                    {self.rank: part},
                    warn=self._report_differing,
                    before_commit=lambda: self._supersede(pending),
                )
        raise AssertionError("unreachable")

    def _supersede(self, pending: PendingSave) -> None:
        if self.branch is not None:
            supersede(pending.root, self.save.owner, self.branch, _log.warning)

    def _report_differing(self, names: list[str], mixed: bool) -> None:
        _report_or(self.on_event, {"differing": names, "mixed": mixed})

    def _pauses(self, pending: PendingSave, what: str, awaited: Callable[[], Iterable[int]]) -> Iterator[None]:
        """Yield again and again, with growing pauses; CheckpointTimeoutError after `commit_timeout_s`.

        Without a trainer only as long as a writer of the `awaited` ranks is alive, and a little longer. StorageError
        when the root cannot be written to: then the others cannot tell, either. FencedError when it has another owner.
        """
        begin = time.monotonic()
        probe_at, probe_pause_s = begin + _FIRST_PROBE_S, _FIRST_PROBE_S
        deadline = begin + self.options.commit_timeout_s
        alone_since: float | None = None
        look_at = begin
        pause_s = _FIRST_PAUSE_S
        while (now := time.monotonic()) < deadline:
            yield
            _progress()
            if now >= probe_at:
                pending.root.check_writable()
                pending.check_token()
                probe_pause_s *= 2  # a thousand waiting ranks must not keep the metadata server busy
                probe_at = now + probe_pause_s
            if not _trainer_gone():
                alone_since = None
            elif now >= look_at:
                look_at = now + _ALIVE_LOOK_S
                alive = self._leases(pending).alive_ranks() - {self.rank}
                alone_since = None if alive & set(awaited()) else alone_since or now
            if alone_since is not None and now - alone_since > _ORPHAN_GRACE_S:
                raise _OrphanedError(
                    f"rank {self.rank} waited for {what}, but its trainer and the writers it waits for are gone"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise CheckpointTimeoutError(
            f"step {self.save.step}: rank {self.rank} waited {self.options.commit_timeout_s:g} s for {what}; look for "
            "ranks that died or did not save this step, or raise the timeout",
            rank=self.rank,
            step=self.save.step,
        )

    def _give_up(self, pending: PendingSave, reason: Reason) -> Published | Abandoned:
        """Make sure the save is decided: abandoned for `reason`, unless it was decided before, or is another's to
        decide."""
        try:
            return pending.abandon(reason)
        except FencedError as error:
            return pending.outcome() or Abandoned(self._reason(error))
        except CheckpointError:  # the storage is unusable; the others find that out by themselves
            return Abandoned(reason)

    def _reason(self, error: Exception) -> Reason:
        text = error.__cause__.text if isinstance(error.__cause__, RemoteTraceback) else ""
        text = clip(text or "".join(traceback.format_exception(error)), _TRACEBACK_BYTES)
        return Reason(self.rank, type(error).__name__, clip(str(error), _TRACEBACK_BYTES), text)


# Thousands of numbers, the same for each save: one by one they would take longer than a hundred tensors.
@functools.lru_cache(maxsize=2)
def _offsets_as_bytes(offsets: frozenset[int]) -> bytes:
    return array("Q", offsets).tobytes()


@functools.lru_cache(maxsize=2)
def _offsets_of_bytes(data: bytes) -> frozenset[int]:
    return frozenset(array("Q", data))


@functools.lru_cache(maxsize=2)
def _plan(data: bytes) -> PartPlan:
    """Our own bytes, made by the trainer of this writer. Kept from one save to the next, with all that it has made."""
    plan: PartPlan = pickle.loads(data)
    return plan


def _report_or(here: Callable[[dict[str, Any]], None], event: dict[str, Any]) -> None:
    """Tell the trainer; `here` if this is the trainer."""
    running = context.current()
    (here if running is None else running.report)(event)


def _progress() -> None:
    running = context.current()
    if running is not None:
        running.progress()


def _trainer_gone() -> bool:
    running = context.current()
    return running is not None and running.trainer_gone()


def _record(chunk: WrittenChunk) -> tuple[str, str, int, int]:
    directory, _, key = chunk.file.rpartition("/")
    return directory, key, chunk.file_bytes, chunk.crc32c


def _error_for(save: SaveId, reason: Reason) -> CheckpointError:
    """What the trainer raises for a save that is not published."""
    where = "" if reason.rank is None else f"rank {reason.rank}: "
    if reason.kind == "FencedError":
        return FencedError(f"{where}{reason.message}", rank=reason.rank, step=save.step)
    kind = CheckpointExistsError if reason.kind == "CheckpointExistsError" else SaveAbandonedError
    error = kind(
        f"the save of step {save.step} was abandoned on all ranks: {where}{reason.kind}: {reason.message} "
        "(training can go on; the next save is not affected)",
        rank=reason.rank,
        step=save.step,
    )
    if reason.traceback:
        error.__cause__ = RemoteTraceback(reason.traceback)
    return error
