"""`Checkpointer`: saves and restores the state of a job under one root directory.

This is the interface; `ckpt.engine` has the parts behind it, `ckpt.options` the options.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ckpt.arguments import duration
from ckpt.async_calls import AsyncCallsQueue, AsyncRequest
from ckpt.engine.bridge import RestartBridge
from ckpt.engine.closing import Closing
from ckpt.engine.deletion import delete_step
from ckpt.engine.parts import CheckpointerSettings, Parts, node_local_path
from ckpt.engine.phases import Phases
from ckpt.engine.restores import Restores
from ckpt.engine.schedule import Schedule
from ckpt.errors import CheckpointError
from ckpt.exporting.options import ExportOptions
from ckpt.loading.options import Rename, RestoreOptions
from ckpt.loading.restore_step import RestoreReport
from ckpt.loading.unkept import unkept_containers
from ckpt.mirroring.options import Mirror
from ckpt.native import warn_if_portable
from ckpt.options import FailedSaves, Snapshots, Staging
from ckpt.pace import Pace, pace_of
from ckpt.saving.recover import Branch
from ckpt.saving.retention import Keep, keep_policy
from ckpt.storage.names import SaveId
from inprocess.ipc.reported_step import report_step
from inprocess.ipc.uncopied import Uncopied

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]


class Checkpointer(Uncopied):
    """Saves the state of a training job without stopping it, and restores it on any number of ranks.

    Every rank makes one, with the same arguments, and calls the same methods in the same order. All methods are for the
    thread that trains, unless they say otherwise; in a fork of the process they raise CheckpointError, and leaving it
    there has no effect. In the training loop::

        checkpointer.async_save(state, step)     # copies the state, and returns
        checkpointer.maybe_finalize()            # each iteration

    Guarantees: a step is published as a whole or not at all, and by all ranks; an error of a background save is raised
    by `maybe_finalize` on every rank as a `CheckpointError`, and training can go on.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Keep | int | None = None,
        save_every: Pace | int | None = None,
        snapshots: Snapshots | int | None = None,
        mirror: Mirror | str | os.PathLike[str] | None = None,
        node_local: str | os.PathLike[str] | None = None,
        export: ExportOptions | None = None,
        staging: Staging | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: timedelta | float = timedelta(minutes=10),
        read_only: bool = False,
        process_group: ProcessGroup | None = None,
        queue: AsyncCallsQueue | None = None,
        on_failed_save: FailedSaves | Literal["raise", "warn"] = "raise",
    ) -> None:
        """Start and write nothing yet. TypeError or ValueError, in a sentence, for an argument that is invalid.

        `root` is a directory (made by the first save), a ``file://`` URL, or that of an object store, such as
        ``s3://bucket/run7`` (see docs/object_stores.md); StorageError for a step, or a place inside of one.
        `storage_options` are for object stores: endpoint, region and credentials, where they are not in the environment
        (``AWS_...``); they get into no log and no file.

        `keep` says which steps are kept: the newest, as in ``keep=3``, or a policy, such as ``ckpt.Latest(3) |
        ckpt.Every(1000)``; None keeps all. The newest step is always kept, and so are pinned ones (see `pin`). When a
        save is finalized on rank 0, the other steps are gone; the writers delete their files afterwards, between the
        saves.

        With `save_every` and `snapshots` the method `step` saves the multiples of `save_every`, or what a policy says,
        such as ``ckpt.Optimal()`` (see `ckpt.pace`), and holds others in memory: ``snapshots=10``, or a `Snapshots`
        with replicas on other nodes, or memory that outlives the processes. What is saved is held in memory, too.

        `mirror`, a directory, a URL, or a `Mirror` with options: a process of each rank, of the lowest priority, copies
        published steps there, and `restore` looks there, too; `all_steps` and `pin` do not. See docs/mirrors.md.

        `node_local`: a directory on the disks of each node, for what only one rank has, nearly all of a sharded state;
        the root, which all ranks see, has the rest, and decides what is published. Needs a `mirror`: from there comes
        what a node does not have, such as one that was replaced. The path may differ among nodes. Without `export`, and
        no files are reused. See docs/mirrors.md.

        `export`: rank 0 exports every published step that is a multiple of `export.every` to a directory, in a process
        of low priority. At most one runs; while it does, the newest step that is due waits, and replaces an older one.
        What fails is logged and never raised. `close` waits for exports, at most `timeout`.

        `staging`: the memory and the files of a save. `timeout`, a timedelta or seconds, bounds every wait for other
        ranks, for a free slot, and for an earlier run's writers. `process_group` spans all ranks (default: the default
        group). A `queue` that is given is shared: `close` leaves it open.

        With `read_only` nothing is ever written to the root: for evaluation, or without write permission.

        `on_failed_save`: "raise" raises the error of a failed save on all ranks. With "warn" it is logged, and training
        and the next save go on: until saves have failed for six hours, or as a `FailedSaves` says. See `failed_steps`.
        """
        warn_if_portable()
        settings = CheckpointerSettings(
            keep=keep_policy(keep),
            save_every=pace_of("save_every", save_every),
            snapshots=Snapshots.of(snapshots),
            mirror=Mirror.of(mirror),
            node_local=node_local_path(node_local),
            export=export,
            staging=Staging.of(staging),
            storage_options=storage_options,
            timeout_s=duration("timeout", timeout).total_seconds(),
            read_only=read_only,
            process_group=process_group,
            queue=queue,
            on_failed_save=FailedSaves.of(on_failed_save),
        )
        self._parts = Parts.of(root, settings)
        self._phases = Phases(self._parts.saver.timers)
        self._closing = Closing(self._parts)
        self._schedule = Schedule(settings, self._parts.ranks, lambda: self._parts.saver.in_flight)
        self._restores = Restores(self._parts, self._schedule.restored)
        self._bridge = RestartBridge(self._parts, self._restores, self._closing, self._phases)
        self._finalized: list[int] = []  # steps that `maybe_finalize` has not returned yet

    @property
    def root(self) -> str:
        """The absolute path of the root, or its URL."""
        return self._parts.root.path

    @property
    def queue(self) -> AsyncCallsQueue:
        """The queue that runs the saves."""
        return self._parts.queue

    def save_request(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> AsyncRequest:
        """Copy this rank's share of `state` into shared memory and return the request that writes it.

        The state may change as soon as this returns (with `overlap`: parameters at the next optimizer step). Waits only
        when all slots are in use. The first call for a structure of state makes two small collectives, later ones none.
        The first of a run, and the first after a restore, claims the root (one or two more; each rank sees whether
        it can write there); the others touch no file.

        `metrics`, such as ``{"loss": 0.3}``, are recorded with the step as rank 0 gives them: a dict of numbers,
        strings, bools, None, and lists and dicts of these, of less than 64 KiB as JSON.

        Raises StateError, naming the key path, for a leaf or a metric that cannot be stored, and on all ranks when
        ranks contradict each other, or one needs more memory than `Staging.max_host_bytes`; FencedError when a job that
        started later owns the root; CheckpointExistsError when the root has steps and none was restored (see
        `start_over`). Nothing was started then.
        """
        begin = time.perf_counter()
        self._closing.check_writable()
        self._schedule.note_save()
        self._restores.has_prepared = True
        with self._phases("ckpt.stage"):
            due = self._parts.mirror is not None and self._parts.mirror.is_next_due(self._parts.saver.in_flight)
            pace = self._schedule.measured
            request, save = self._parts.saver.request(state, step, begin, metrics, mirror=due, pace=pace)
        branch = self._restores.branch
        if self._parts.mirror is not None:
            self._parts.mirror.begun(save, due)
        request.add_finalize_fn(lambda: self._note_published(save, branch))
        return request

    def async_save(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> int | None:
        """Stage `state`, schedule its save, and return the index of the call. `maybe_finalize` raises its errors.

        Raises what `save_request` raises; if `on_failed_save` lets training go on then, return None.
        """
        try:
            return self._parts.saver.schedule(self.save_request(state, step, metrics=metrics), step)
        except CheckpointError as error:
            self._parts.saver.failures.check(error)
            return None

    def snapshot(self, state: Any, step: int) -> None:
        """Copy this rank's share of `state` into shared memory and hold it there, so that a restart can restore it.

        Nothing is written, and in the steady state there is no collective and no access to storage; the root is not
        claimed. The state may change as soon as this returns (with `overlap`: parameters at the next optimizer step).
        Until a newer snapshot or save is complete in the memory of all ranks, or a newer save published, the slot is
        held. Waits, at most `timeout`, only if all are in use. The first call for a structure makes two collectives.

        Raises what `save_request` raises. CheckpointTimeoutError, with nothing changed, if no slot becomes free: then
        some rank makes no snapshots.
        """
        begin = time.perf_counter()
        self._closing.check_writable()
        self._restores.has_prepared = True
        with self._phases("ckpt.stage"):
            self._parts.saver.snapshot(state, step, begin)

    def step(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> list[int]:
        """Do what is due after a training step, and return the steps of the saves that are finalized now.

        What `save_every` says is saved, with `metrics`, as by `async_save`; what `Snapshots.every` says is kept in
        memory, as by `snapshot`. A save is a snapshot, too. The first step that is neither begins a `warmup` in the
        background, without a claim, unless a restore has. Then does what `maybe_finalize` does. Raises what these
        raise; ValueError if no step is ever due.
        """
        with self._schedule.due(step) as due:
            if due == "save":
                if self.async_save(state, step, metrics=metrics) is None:
                    self._schedule.save_failed()
            elif due == "snapshot":
                self.snapshot(state, step)
            else:
                self._closing.check_open()
                self._restores.first_seen(state)
        return self.maybe_finalize()

    def save(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save `state`, finalize it and all earlier saves, and return whether the step is published.

        Raises what `async_save` and `maybe_finalize` raise; False only if `on_failed_save` lets training go on.
        """
        scheduled = self.async_save(state, step, metrics=metrics) is not None
        self.maybe_finalize(blocking=True)
        return scheduled and self.current_step == step

    def maybe_finalize(self, blocking: bool = False) -> list[int]:
        """Finalize the saves that are decided, and return their steps. With `blocking` wait for all. No collective.

        Raises the `CheckpointError` of a save that was abandoned, unless `on_failed_save` lets training go on: it names
        rank, step and cause. Its `finalized` are the calls finalized before it.
        """
        self._closing.check_open()
        with self._phases("ckpt.finalize"):
            self._parts.finalize(blocking)
        if self._parts.exports is not None:
            self._parts.exports.poll()
        if self._parts.mirror is not None:
            self._parts.mirror.poll()
        self._parts.saver.snapshots.poll()
        steps, self._finalized = self._finalized, []
        return steps

    def restore(
        self,
        state: Any,
        step: int | None = None,
        strict: bool = True,
        *,
        only: str | Iterable[str] | None = None,
        rename: Rename | None = None,
        cast: bool = False,
        resize: bool = False,
        fall_back: bool = True,
        structure: Literal["step", "state"] = "step",
    ) -> int | None:
        """Put the newest step (or `step`) into `state`, in place, and return it: published, or whole in memory.

        None when there is none; then no method of `state` was called. Collective. Works for any world size and
        sharding. Tensors are read into the memory they have, from staging memory where that still holds the step (see
        `last_restore`), else from storage; numbers and strings are replaced in their containers; objects get
        `load_state_dict`, those of other classes than PyTorch's twice: once before large tensors are overwritten, to
        see whether they take it.

        Saves of this Checkpointer that are in flight are finalized first, as by `maybe_finalize`, which raises their
        errors when it is called next; what is not decided within `timeout` is abandoned. Waits, at most half of
        `timeout`, for saves of other Checkpointers of this program to the root, for a `step` that another job is just
        writing, and for writers of an ended run. Saves that such a run left are decided, too: complete ones are
        published, the others abandoned. Saves of another job that is alive are not touched.

        Of a step that is damaged, or that the storage fails to give, the next copy is tried: in memory, in the root, in
        the mirror; and then, without `step`, the step before, with a warning, on all ranks. With ``fall_back=False``
        that is an error. A save that follows moves a damaged step to ``.damaged/``. After a restore of an older step
        the first save moves the newer ones, which belong to another branch then, to ``.superseded/``. Nothing is
        removed.

        `only` names what to restore of the state, such as ``["model"]`` or ``["model/encoder"]``; other objects are not
        touched, other names of the step are not unexpected. `rename` turns names of the checkpoint (keys joined by "/")
        into names of the state: a function, or prefixes and what replaces them, as in ``{"_orig_mod.": ""}``, wherever
        a part of a name begins with one. `cast` converts floating-point tensors to the dtype of the state. `resize`
        restores what a tensor has in common with one of another shape, from the first element of each dimension; what
        is left keeps its values, or is 0 in the state of a new optimizer.

        Dicts and lists of values and tensors get the items that the step has, as `last_restore` says (``added``,
        ``removed``); not the topmost names of the state, nor dicts with parameters or with names like "layer.weight".
        With ``structure="state"`` their items must be those of the state. Modules and other objects with loading code
        of their own decide about names and shapes that differ.

        Raises StateMismatchError, listing every missing, unexpected or different name, before anything is changed (with
        ``strict=False`` restores what fits and logs the rest, unless nothing of an object fits); StateError, naming the
        object, when one does not take what the checkpoint has, with the state as it was; CheckpointCorruptError or
        StorageError if no step can be read, after which tensors may be overwritten in part; CheckpointNotFoundError.
        All ranks raise together.
        """
        unkept = unkept_containers(sys.getrefcount(state), state)
        self._closing.check_open()
        options = RestoreOptions.of(strict, only, rename, cast, resize, fall_back, structure, unkept)
        with self._phases("ckpt.restore"):
            return self._restores.restore(state, step, options)

    def recover(self) -> list[int]:
        """Decide the saves that an ended run left, as `restore` does first, and return the steps it may restore.

        Saves in flight are finalized, as by `restore`. Ascending; also those that only the mirror has, or that are
        whole in memory. Collective: all ranks get the steps that rank 0 sees. For a program that must know the step
        before it can build the state to restore. Raises what `restore` raises before it reads a step.
        """
        self._closing.check_open()
        with self._phases("ckpt.restore"):
            return self._restores.recover()

    def start_over(self, run: str) -> bool:
        """Begin a training anew in a root that has steps; False, with nothing done, if the newest is of `run` already.

        `run` names the training, and is recorded with its steps, so a job that is requeued may call this again; then
        `restore`, which gives None until `run` has a step. The first save moves all earlier steps to ``.superseded/``
        when it is about to be published. Collective. Raises what `recover` raises; StorageError or
        CheckpointCorruptError, with nothing done, if it cannot be read which run the newest steps are of.
        """
        self._closing.check_writable()
        return self._restores.start_over(run)

    def delete(self, step: int) -> None:
        """Remove a published step now. For rank 0 alone; the others may go on saving.

        Claims the root if this job does not own it. ValueError on another rank, CheckpointNotFoundError if the step is
        not there, StorageError if it is being read or pinned, FencedError if a job that started later owns the root.
        """
        self._closing.check_writable()
        delete_step(self._parts, step)

    def pin(self, step: int) -> None:
        """Keep a published step, whatever `keep` says, until it is unpinned: also in later runs. Any rank.

        Durable on return. CheckpointNotFoundError if the step is not there.
        """
        self._closing.check_writable()
        self._parts.root.pin_step(operator.index(step))

    def unpin(self, step: int) -> bool:
        """Let `keep` decide about a step again; False if it was not pinned. Any rank."""
        self._closing.check_writable()
        return self._parts.root.unpin_step(operator.index(step))

    def warmup(self, state: Any) -> None:
        """Plan, map the staging memory and start the writers, so that the first save costs no more than later ones.

        Collective. Claims the root, as the first save does; before a restore only one without steps.
        """
        self._closing.check_writable()
        self._parts.saver.warmup(state)

    def register(self, **state: Any) -> None:
        """Name what to restore in place after a fault, for instance ``model=model, optimizer=optimizer, rng=rng``.

        It is restored like the state ``{"model": model, ...}``, and should be saved as that. What was registered
        before under the same names is replaced. TypeError for what cannot be changed in place, like a number: put it
        into a dict.
        """
        self._restores.register(state)

    @property
    def resume_step(self) -> int | None:
        """The step that was restored last, by `restore` or after a fault; None if none was."""
        return self._restores.resume_step

    @property
    def current_step(self) -> int | None:
        """The step that was published or restored last by this Checkpointer; None if none was. Without storage access.

        Unlike `latest_step` it is never a step of another branch or job. A save counts when it is finalized. None, too,
        after a restore from memory: what is there may not be published.
        """
        return self._restores.current_step

    @property
    def replicated_step(self) -> int | None:
        """The newest snapshot whose shares are all on other nodes, too, as far as this rank knows; None if none is.

        It is the one that is restored after a node is lost. `step` and `maybe_finalize` learn of newer ones. None after
        a restore, until a snapshot is replicated again.
        """
        return None if self._parts.saver.replicator is None else self._parts.saver.replicator.replicated_step

    @property
    def last_restore(self) -> RestoreReport | None:
        """Where the bytes of the last restore came from, and what became of each name."""
        return self._restores.last

    def _note_published(self, save: SaveId, branch: Branch) -> None:
        self._finalized.append(save.step)
        self._restores.current_step = save.step
        self._parts.saver.failures.published(save.step)
        report_step(save.step)
        rank = self._parts.saver.last_rank
        if self._parts.exports is not None and rank == 0:
            self._parts.exports.published(save.step)
        if self._parts.mirror is not None and rank is not None:
            self._parts.mirror.published(save, branch, rank, self._parts.ranks.world_size)

    @property
    def failed_steps(self) -> list[int]:
        """The steps whose saves have failed since the newest one that was published or restored; empty if none has."""
        return list(self._parts.saver.failures.steps)

    def latest_step(self) -> int | None:
        """Return the newest published step of the root, not of its mirror; None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Return all published steps of the root, not of its mirror, ascending."""
        return self._parts.root.steps()

    def close(self) -> None:
        """Finalize what is pending, end the writers and exports, free the memory; then raise the first failure.

        Takes at most `timeout` in all, whatever writers and storage do. CheckpointTimeoutError names the steps that
        were not finalized in time: their writers are killed, and the saves abandoned unless all ranks had completed
        them. (A `queue` from outside keeps them.) Exports are killed then, and copies to the mirror left to a later
        job. Idempotent. Without effect in a fork of the process that made this.
        """
        self._closing.close(self._finalized)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, without waiting: the writers finish what was scheduled by themselves."""
        if error is None:
            self.close()
        else:
            self._closing.leave(kind, error, trace)

    @property
    def bridge(self) -> RestartBridge:
        """The side for `ckpt.restart`: interrupts, the recovery from a fault, and phases with time limits."""
        return self._bridge
