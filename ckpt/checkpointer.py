"""`Checkpointer`: saves and restores the state of a job under one root directory."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ckpt.async_calls import AsyncCallsQueue, AsyncRequest, CallTimer
from ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError, StorageError
from ckpt.exporting.background import BackgroundExports
from ckpt.exporting.options import ExportOptions
from ckpt.lingering.job import Job
from ckpt.lingering.keeping import LingeringMemory
from ckpt.loading.all_or_none import Alone, Group
from ckpt.loading.candidates import saves_of
from ckpt.loading.options import Rename, RestoreOptions
from ckpt.loading.restore import Tiers, Undecided, candidates, restore
from ckpt.loading.restore_step import RestoreReport
from ckpt.mirroring.background import BackgroundMirror
from ckpt.mirroring.options import Mirror
from ckpt.native import warn_if_portable
from ckpt.planning.chunk_grid import GridOptions
from ckpt.ranks import Ranks
from ckpt.saving.recover import Branch, recover_for_restore
from ckpt.saving.replicator import ReplicaOptions
from ckpt.saving.retention import Keep, Retention, keep_policy
from ckpt.saving.save import Saver
from ckpt.saving.scheduled import wait_for_program, wait_for_step
from ckpt.saving.stage import StagingOptions
from ckpt.saving.task import SaveOptions
from ckpt.staging.neighbors import node
from ckpt.storage.interface import Root
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.options import StorageOptions
from ckpt.storage.root import local_path
from ckpt.storage.roots import own_directory, own_root
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import Origin
from inprocess.ipc.reported_step import report_step
from inprocess.ipc.restart_index import current_restart_index
from inprocess.ipc.threads import finishes_within
from inprocess.ipc.uncopied import Uncopied

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]

Phase = Callable[[str], AbstractContextManager[object]]

_GRID = GridOptions()
_MIRROR_S = 60.0  # for requests to the mirror, which are tried again later
_ANSWER_S = 5.0  # for writers to report saves that are already decided
_LEAVING_S = 5.0  # to leave the root and end processes, when nothing is waited for; an eighth of `timeout` at most
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _Due:
    """Which steps are saved, and which are kept in memory."""

    save_every: int | None
    snapshot_every: int | None

    @classmethod
    def of(cls, save_every: int | None, snapshot_every: int | None) -> _Due:
        for name, every in (("save_every", save_every), ("snapshot_every", snapshot_every)):
            if every is not None and every < 1:
                raise ValueError(f"{name} must be at least 1, not {every}")
        return cls(save_every, snapshot_every)

    def saves(self, step: int) -> bool:
        return self.save_every is not None and step % self.save_every == 0

    def keeps(self, step: int) -> bool:
        return self.snapshot_every is not None and step % self.snapshot_every == 0


class Checkpointer(Uncopied):
    """Saves the state of a training job without stopping it, and restores it on any number of ranks.

    Every rank makes one, with the same arguments, and calls the same methods in the same order. All methods are for the
    thread that trains, unless they say otherwise; in a fork of the process they raise CheckpointError, and leaving it
    there has no effect. In the training loop::

        checkpointer.queue.schedule_async_request(checkpointer.save_request(state, step))
        checkpointer.maybe_finalize()            # each iteration

    Guarantees: a step is published as a whole or not at all, and by all ranks; an error of a background save is raised
    by `maybe_finalize` on every rank as a `CheckpointError`, and training can go on.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        queue: AsyncCallsQueue | None = None,
        keep: Keep | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        process_group: ProcessGroup | None = None,
        snapshot_every: int | None = None,
        save_every: int | None = None,
        replicas: Literal[0, 1] = 0,
        replica_bandwidth: float | None = None,
        replica_host: str | None = None,
        replica_place: str | None = None,
        linger: timedelta | None = None,
        linger_id: str | None = None,
        slots: int | None = None,
        max_host_bytes: int | None = None,
        overlap: bool = False,
        compression: str | None = None,
        threads: int = 6,
        timeout: timedelta = timedelta(minutes=10),
        file_bytes: int = _GRID.file_bytes,
        inner_bytes: int = _GRID.inner_bytes,
        reuse_files: bool | None = None,
        read_only: bool = False,
        on_divergence: Literal["error", "warn", "ignore"] = "error",
        export: ExportOptions | None = None,
        mirror: Mirror | None = None,
        node_local: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start and write nothing yet.

        With `snapshot_every` and `save_every` the method `step` makes snapshots and saves of the steps that are
        multiples of these; what is saved is also held in memory (see docs/snapshots.md).

        `root` is a directory (made by the first save), a ``file://`` URL, or that of an object store, such as
        ``s3://bucket/run7`` (see docs/object_stores.md); StorageError for a step, or a place inside of one.
        `storage_options` are for object stores: endpoint, region and credentials, where they are not in the environment
        (``AWS_...``); they get into no log and no file. A `queue` that is given is shared: `close` leaves it open.
        `keep` says which steps are kept, such as ``ckpt.Latest(3) | ckpt.Every(1000)``; None keeps all. `keep_last` and
        `keep_every` are short for these two. The newest step is always kept, and so are pinned ones (see `pin`). When a
        save is finalized on rank 0, the other steps are gone; the writers delete their files afterwards, between the
        saves.
        `process_group` spans all ranks of the job (default: the default group). `slots` staging slots (2, with
        `snapshot_every` 3, with `replicas` 5) are used in turn, of together at most `max_host_bytes`. `overlap`: on
        CUDA, let training go on while the copies run; the optimizers in the state wait for them before their next step.
        `compression` is None or "zstd". `threads` write at once in the writer. `timeout` bounds every wait for other
        ranks, for a free slot, and for an earlier run's writers. A rank begins a new file when one has `file_bytes`;
        what is read and verified at once has `inner_bytes` at most.

        `replicas`: 1 has each rank's share of snapshots sent to a rank on another node, beside training, so that
        `restore` finds them when a node is lost. Each rank sends at most `replica_bandwidth` bytes per second, and
        receives at the address `replica_host` of its node (None: that which reaches MASTER_ADDR). `replica_place` names
        what fails as a whole, instead of the node. See docs/snapshots.md.

        `linger`: for so long after the death of a trainer a process of its rank keeps its snapshots, so that the next
        processes of the same job on the same node can restore them; `close` gives them up. `linger_id` says which
        processes are of the same job, with the same root: None for the run id of ckpt_launcher or torchrun. ValueError
        if there is none. See docs/snapshots.md.

        `reuse_files`: a save writes over the files of the step that was removed last, if it has the same structure,
        instead of making new ones; until then, or `close`, they stay on the disk. That is the default where steps are
        removed and without `compression`. `restore` and inspect_ckpt keep a step they read from being removed; another
        program that copies or maps the files of a step while it is removed can see bytes of a later one (see
        docs/guide.md).

        With `read_only` nothing is ever written to the root, and no save is possible: for evaluation beside a training
        job, or without write permission.

        `on_divergence` says what is done when parameters or optimizer state that several ranks have differ, as far as
        the samples that each save takes show: "error" abandons the save on all ranks, "warn" publishes a mixture and
        logs it, "ignore" takes no samples. Buffers, small tensors of unknown use and values are saved from the lowest
        rank that has them; for the latter two differences are logged (see docs/guide.md).

        `export`: rank 0 exports every published step that is a multiple of `export.every` to a directory, in a process
        of low priority. At most one runs; while it does, the newest step that is due waits, and replaces an older one.
        What fails is logged and never raised. `close` waits for exports, at most `timeout`.

        `mirror`: a process of each rank, of the lowest priority, copies published steps to a second root, and `restore`
        looks there, too. `all_steps`, `latest_step`, `delete` and `pin` are about the first root only. See `Mirror` and
        docs/mirrors.md.

        `node_local`: a directory on the disks of each node, for what only one rank has, nearly all of a sharded state;
        the root, which all ranks see, has the rest, and decides what is published. Needs a `mirror`: from there comes
        what a node does not have, such as one that was replaced. The path may differ among nodes. Without `reuse_files`
        and `export`. See docs/mirrors.md.
        """
        warn_if_portable()
        policy = keep_policy(keep, keep_last, keep_every)
        root_at = own_root(root, StorageOptions.of(storage_options, timeout.total_seconds() / 2))
        node_path = None if node_local is None else own_directory(local_path(node_local), "a directory for pack files")
        if node_path is not None and (mirror is None or export is not None):
            raise ValueError(
                "node_local keeps each rank's files on its node alone: it needs a mirror, from which they are read on "
                "other nodes, and cannot be used with export"
            )
        can_reuse = policy is not None and compression is None and root_at.reuses_files and node_path is None
        reuse_files = can_reuse if reuse_files is None else reuse_files
        if reuse_files and not can_reuse:
            raise ValueError(
                "reuse_files writes over the files of steps that are removed: it needs keep or keep_last, no "
                f"compression, no node_local, and a local root (the policy is {policy}, compression={compression!r})"
            )
        self._timeout_s = timeout.total_seconds()
        options = SaveOptions(threads, self._timeout_s, Retention(policy, reuse_files), node_local=node_path)
        grid = GridOptions(file_bytes, inner_bytes, common_apart=node_path is not None)
        self._due = _Due.of(save_every, snapshot_every)
        snapshots = snapshot_every is not None
        if replicas not in (0, 1):
            raise ValueError(f"replicas must be 0 or 1, not {replicas!r}")
        replication = ReplicaOptions(replica_bandwidth, replica_host, replica_place) if replicas else None
        slots = slots if slots is not None else 5 if replicas else 3 if snapshots else 2
        if snapshots and slots < 2:
            raise ValueError(f"snapshots need at least two slots, one to hold one while the next is made, not {slots}")
        if replicas and slots < 4:
            raise ValueError(f"replicas need at least four slots, two of them to hold what is replicated, not {slots}")
        lingering = _lingering(linger, linger_id, root_at, read_only)
        staging = StagingOptions(
            slots, max_host_bytes, overlap, self._timeout_s, compression, grid, on_divergence, snapshots
        )
        self._root = root_at
        self._ranks = Ranks(process_group, self._timeout_s)
        self._owns_queue = queue is None
        self._queue = queue if queue is not None else AsyncCallsQueue(process_group=process_group)
        self._mirror_root: Root | None = None
        self._mirror: BackgroundMirror | None = None
        if mirror is not None:
            mirror_options = StorageOptions.of(mirror.storage_options, min(_MIRROR_S, self._timeout_s / 2))
            self._mirror_root = own_root(mirror.root, mirror_options)
            if self._mirror_root.path == root_at.path:
                raise ValueError(f"the mirror of {root_at.path} must be another root")
            self._mirror = BackgroundMirror(root_at, self._mirror_root, mirror, mirror_options, node_path)
        self._packs = None if node_path is None else NodePacks(node_path, root_at, self._mirror_root)
        self._branch = Branch()
        self._exports = None if export is None else BackgroundExports(self._root, export)
        self._saver = Saver(self._root, self._ranks, self._queue, staging, options, replication, lingering)
        if self._mirror is not None:
            mirror_process, saver = self._mirror, self._saver
            saver.held = lambda: mirror_process.held(saver.in_flight)
        self._reuse_files = reuse_files
        self._read_only = read_only
        self._registered: dict[str, Any] = {}
        self._phases: list[Phase] = []
        self._resume_step: int | None = None
        self._current_step: int | None = None
        self._last_restore: RestoreReport | None = None
        self._interrupted_at: float | None = None
        self._restores_later = False
        self._seen_left: int | None = None  # the newest token, when the last restore decided what an ended run left
        self._finalized: list[int] = []  # steps that `maybe_finalize` has not returned yet
        self._closed = False
        self._origin = Origin()

    @property
    def root(self) -> str:
        """The absolute path of the root, or its URL."""
        return self._root.path

    @property
    def queue(self) -> AsyncCallsQueue:
        """The queue that runs the saves."""
        return self._queue

    def save_request(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> AsyncRequest:
        """Copy this rank's share of `state` into shared memory and return the request that writes it.

        The state may change as soon as this returns (with `overlap`: parameters at the next optimizer step). Waits only
        when all slots are in use. The first call for a structure of state makes two small collectives, later ones none.
        The first of a run, and the first after a restore, claims the root (one or two more; each rank sees whether
        it can write there); the others touch no file.

        `metrics`, such as ``{"loss": 0.3}``, are recorded with the step as rank 0 gives them: a dict of numbers,
        strings, bools, None, and lists and dicts of these, of less than 64 KiB as JSON.

        Raises StateError, naming the key path, for a leaf or a metric that cannot be stored, and on all ranks when
        ranks contradict each other; FencedError when a job that started later owns the root. Nothing was started then.
        """
        begin = time.perf_counter()
        self._check_writable()
        with self._phase("ckpt.stage"):
            due = self._mirror is not None and self._mirror.is_next_due(self._saver.in_flight)
            request, save = self._saver.request(state, step, begin, metrics, mirror=due)
        branch = self._branch
        if self._mirror is not None:
            self._mirror.begun(save, due)
        request.add_finalize_fn(lambda: self._note_published(save, branch))
        return request

    def async_save(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> int:
        """Stage `state`, schedule its save, and return the index of the call. `maybe_finalize` raises its errors."""
        request = self.save_request(state, step, metrics=metrics)
        try:
            return self._queue.schedule_async_request(request)
        except Exception as error:
            self._saver.not_scheduled(error)
            raise

    def snapshot(self, state: Any, step: int) -> None:
        """Copy this rank's share of `state` into shared memory and hold it there, so that a restart can restore it.

        Nothing is written, and in the steady state there is no collective and no access to storage; the root is not
        claimed. The state may change as soon as this returns (with `overlap`: parameters at the next optimizer step).
        The slot is held until a newer snapshot or save is complete in the memory of all ranks, or a newer save is
        published. Waits, at most `timeout`, only if all slots are in use. The first call for a structure of state makes
        two small collectives, later ones none.

        Raises what `save_request` raises, and StateError if the share does not fit one slot. CheckpointTimeoutError if
        no slot becomes free: then some rank makes no snapshots. Nothing was changed then.
        """
        begin = time.perf_counter()
        self._check_writable()
        with self._phase("ckpt.stage"):
            self._saver.snapshot(state, step, begin)

    def step(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> list[int]:
        """Do what is due after a training step, and return the steps of the saves that are finalized now.

        A step that is a multiple of `save_every` is saved, with `metrics`, as by `async_save`; another one that is a
        multiple of `snapshot_every` is kept in memory, as by `snapshot`. A save is a snapshot, too. Then does what
        `maybe_finalize` does. Raises what these raise.
        """
        if self._due.saves(step):
            self.async_save(state, step, metrics=metrics)
        elif self._due.keeps(step):
            self.snapshot(state, step)
        return self.maybe_finalize()

    def save(self, state: Any, step: int, *, metrics: Mapping[str, Any] | None = None) -> None:
        """Save `state`, and finalize it and all earlier saves: the step is published on return.

        Raises what `maybe_finalize` raises.
        """
        self.async_save(state, step, metrics=metrics)
        self.maybe_finalize(blocking=True)

    def maybe_finalize(self, blocking: bool = False) -> list[int]:
        """Finalize the saves that are decided, and return their steps. With `blocking` wait for all. No collective.

        Raises the `CheckpointError` of a save that was abandoned: it names rank, step and cause. Its `finalized` are
        the calls finalized before it.
        """
        self._check_open()
        with self._phase("ckpt.finalize"):
            self._queue.maybe_finalize_async_calls(blocking=blocking)
        if self._exports is not None:
            self._exports.poll()
        if self._mirror is not None:
            self._mirror.poll()
        self._saver.snapshots.poll()
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

        None when there is none; then no method of `state` was called.

        Collective. Works for any world size and sharding. Tensors are read into the memory they have, from staging
        memory where that still holds the step (see `last_restore`), else from storage; numbers and strings are replaced
        in their containers; objects get `load_state_dict`, those of other classes than PyTorch's twice: once before
        large tensors are overwritten, to see whether they take it.

        Saves of this Checkpointer that are in flight are finalized first, as by `maybe_finalize`, which raises the
        errors of those that have failed when it is called next. What is not decided within `timeout` is abandoned.
        Saves of other Checkpointers of this program to the root are waited for, and so is a `step` that another job is
        just writing, at most half of `timeout`.
        Saves that an ended run left are decided, too: complete ones are published, the others abandoned; writers that
        still finish some are waited for, at most half of `timeout`. Saves of another job that is alive are not touched.

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
        ``strict=False`` restores what fits and logs the rest, unless no tensor fits); StateError, naming the object,
        when one does not take what the checkpoint has, with the state as it was; CheckpointCorruptError or StorageError
        if no step can be read, after which tensors may be overwritten in part; CheckpointNotFoundError. All ranks raise
        together.
        """
        self._check_open()
        options = RestoreOptions.of(strict, only, rename, cast, resize, fall_back, structure)
        self._ranks.doing = "the restore" if step is None else f"the restore of step {step}"
        with self._phase("ckpt.restore"):
            tiers, memory, left = self._tiers(self._mirror_root), self._saver.memory, self._undecided(step)
            report = restore(tiers, state, step, options, self._ranks, memory, left, self._read_only)
            self._note_restored(report)
            self._settle(report, current_restart_index() or 0)
            self._continue_from(report, self._seen_left, self._ranks.rank)
            # Without a step nothing of `state` is called: an optimizer's `state_dict` may begin its state.
            if report is not None and not self._read_only and options.only is None:
                self._saver.warmup_in_background(state)
        return self._resume_step

    def recover(self) -> list[int]:
        """Decide the saves that an ended run left, as `restore` does first, and return the steps it may restore.

        Saves in flight are finalized, as by `restore`. Ascending; also those that only the mirror has, or that are
        whole in memory. Collective: all ranks get the steps that rank 0 sees. For a program that must know the step
        before it can build the state to restore. Raises what `restore` raises before it reads a step.
        """
        self._check_open()
        self._ranks.doing = "the recovery of earlier saves"
        with self._phase("ckpt.restore"):
            found = candidates(self._tiers(self._mirror_root), None, self._ranks, self._undecided(None))
            return sorted({place.step for place in found.places})

    def _undecided(self, step: int | None) -> Undecided:
        """Wait for saves of other Checkpointers of this program, and return how the others are decided.

        That is before a restore, of `step`, which begins now.
        """
        self._seen_left = None
        deadline = time.monotonic() + self._timeout_s
        wait_for_program(self._root, deadline - self._timeout_s / 2, but=self._saver.scheduled)
        return Undecided(
            lambda: self._decide_left(step),
            lambda: [save.name for save in self._saver.scheduled()],
            lambda common: self._saver.drain(common, deadline),
        )

    def _decide_left(self, step: int | None) -> None:
        """Wait for the writers of `step`, if it is named, and decide what an ended run left, on the coordinator.

        With `read_only` nothing is decided.
        """
        wait_s = self._timeout_s / 2  # the other ranks wait for this one meanwhile
        if step is not None:
            wait_for_step(self._root, step, time.monotonic() + wait_s, self._saver.scheduled)
        if self._read_only:
            return
        if self._mirror_root is not None:
            with contextlib.suppress(StorageError):
                self._saver.claim_above = self._mirror_root.ownership.newest()
        saver = self._saver
        self._seen_left = recover_for_restore(self._root, saver.seen, saver.token, wait_s, _log.warning)

    def delete(self, step: int) -> None:
        """Remove a published step now. For rank 0 alone; the others may go on saving.

        Claims the root if this job does not own it. ValueError on another rank, CheckpointNotFoundError if the step is
        not there, StorageError if it is being read or pinned, FencedError if a job that started later owns the root.
        """
        self._check_writable()
        if self._ranks.rank != 0:
            raise ValueError(f"rank {self._ranks.rank} cannot delete step {step}: call delete on rank 0 alone")
        if step not in self._root.steps():
            raise CheckpointNotFoundError(
                f"{self._root.path} has no published step {step}; it has {self._root.steps() or 'none'}", step=step
            )
        if not self._root.remove_step(step, self._saver.own()):
            if step in self._root.pinned_steps():
                raise StorageError(f"step {step} of {self._root.path} is pinned: unpin it first")
            raise StorageError(f"step {step} of {self._root.path} is being read: delete it when its readers are done")

    def pin(self, step: int) -> None:
        """Keep a published step, whatever `keep` says, until it is unpinned: also in later runs. Any rank.

        Durable on return. CheckpointNotFoundError if the step is not there.
        """
        self._check_writable()
        self._root.pin_step(operator.index(step))

    def unpin(self, step: int) -> bool:
        """Let `keep` decide about a step again; False if it was not pinned. Any rank."""
        self._check_writable()
        return self._root.unpin_step(operator.index(step))

    def warmup(self, state: Any) -> None:
        """Plan, map the staging memory and start the writers, so that the first save costs no more than later ones.

        Collective, and claims the root, as the first save does.
        """
        self._check_writable()
        self._saver.warmup(state)

    def register(self, **state: Any) -> None:
        """Name what to restore in place after a fault, for instance ``model=model, optimizer=optimizer, rng=rng``.

        It is restored like the state ``{"model": model, ...}``, and should be saved as that. What was registered
        before under the same names is replaced. TypeError for what cannot be changed in place, like a number: put it
        into a dict.
        """
        for name, value in state.items():
            if value is None or isinstance(value, (bool, int, float, complex, str, bytes, tuple)):
                raise TypeError(
                    f"{name}={value!r} cannot be restored in place, it is a {type(value).__name__}: register a dict "
                    "that holds it"
                )
        self._registered.update(state)

    @property
    def resume_step(self) -> int | None:
        """The step that was restored last, by `restore` or after a fault; None if none was."""
        return self._resume_step

    @property
    def current_step(self) -> int | None:
        """The step that was published or restored last by this Checkpointer; None if none was. Without storage access.

        Unlike `latest_step` it is never a step of another branch or job. A save counts when it is finalized. None, too,
        after a restore from memory: what is there may not be published.
        """
        return self._current_step

    @property
    def replicated_step(self) -> int | None:
        """The newest snapshot whose shares are all on other nodes, too, as far as this rank knows; None if none is.

        It is the one that is restored after a node is lost. `step` and `maybe_finalize` learn of newer ones. None after
        a restore, until a snapshot is replicated again.
        """
        return None if self._saver.replicator is None else self._saver.replicator.replicated_step

    @property
    def last_restore(self) -> RestoreReport | None:
        """Where the bytes of the last restore came from, and what became of each name."""
        return self._last_restore

    def observe_phases(self, phase: Phase, background: Callable[[str, int], CallTimer | None] | None = None) -> None:
        """Enter the context `phase(name)` around the work that the trainer does here, in its thread.

        There may be several; an equal one replaces nothing and is ignored. For events without time limits, in another
        thread, see `ckpt.observe`.

        The names are ``ckpt.stage`` (`save_request`), ``ckpt.finalize`` (`maybe_finalize`) and ``ckpt.restore``.
        ``background("ckpt.write", at_ns)`` is called in the same thread when this rank's writer begins a save, with the
        time of CLOCK_MONOTONIC. When its timer runs out, the writer is killed and the save abandoned on all ranks: by
        the next method that handles messages of writers, or at once if one is waiting.
        """
        if phase not in self._phases:
            self._phases.append(phase)
        if background is not None:
            self._saver.timers.add("ckpt.write", background)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for phase in self._phases:
                stack.enter_context(phase(name))
            yield

    def recover_from_fault(self, drain_timeout: timedelta | None, rank: int | None = 0) -> None:
        """Decide every save in flight, forget the process group, and restore the registered state to the newest step.

        Snapshots stay as they are, and are not waited for. What is restored here is a published step: to agree on one
        that is in memory alone, ranks need each other (see `restore_registered`).

        For the bridge to a restart (`ckpt.restart`), on every surviving rank, when nothing else runs in this process.
        Makes no collective. With a `drain_timeout` a save that all ranks have completely staged is still published,
        within that time; without, all saves that are not published by now are given up, and this waits for no other
        process. An earlier save is never published after this has returned.

        `rank` is that of this process before the fault, in case it has not used its process group yet; None if it was a
        spare: it has no part in any save, and restores nothing here. Raises what `restore` raises; also
        CheckpointCorruptError for a damaged step, because other ranks may not find it damaged.
        """
        self._check_open()
        drain_s = 0.0 if drain_timeout is None else drain_timeout.total_seconds()
        if drain_timeout is None:
            self._saver.stop_writers()
        last, last_rank = self._last_restore, self._saver.last_rank
        rank = last_rank if last_rank is not None else rank
        if rank is not None:
            self._saver.settle_all(rank, time.monotonic() + drain_s)
        self._queue.recover(min(drain_s, _ANSWER_S))
        if rank is not None:
            self._saver.refuse_left(rank)
        self._saver.forget_saves()
        self._note_restored(None)
        if self._registered and rank is not None and not self._restores_later:
            options, tiers = RestoreOptions(), self._tiers(self._mirror_after_fault(last))
            report = restore(tiers, self._registered, None, options, Alone(rank), self._saver.memory)
            self._note_restored(report)
            self._settle(report, 1 + self._saver.snapshots.last_restart)
            self._continue_from(report, None, rank)
        self._interrupted_at = None

    def leave_restoring_to_next_iteration(self) -> None:
        """Let `recover_from_fault` restore nothing: `restore_registered` does, in the next iteration.

        For the bridge to a restart, `ckpt.restart.CheckpointInitialize`.
        """
        self._restores_later = True

    def restore_registered(self, ranks: Group, restart: int) -> None:
        """After a fault, restore the registered state to the newest step that is whole in memory or published.

        Collective, through `ranks`, which need no process group. `restart` is the index of the iteration that begins.
        Raises what `restore` raises.
        """
        self._check_open()
        if not self._registered:
            return
        with self._phase("ckpt.restore"):
            options, tiers = RestoreOptions(), self._tiers(self._mirror_root)
            report = restore(tiers, self._registered, None, options, ranks, self._saver.memory)
            self._note_restored(report)
            self._settle(report, restart)
            self._continue_from(report, None, ranks.rank)

    def _tiers(self, mirror: Root | None) -> Tiers:
        return Tiers(self._root, mirror, self._packs, self._saver.memory_tier)

    def _mirror_after_fault(self, last: RestoreReport | None) -> Root | None:
        """Return the mirror if the newest step is there, and None otherwise: so that all ranks look in one place.

        They have restored the same step from the same place before, and published the same steps since.
        """
        mirror = self._mirror_root
        if mirror is None or last is None or last.root != mirror.path:
            return None
        left = self._saver.memory_tier.left
        newer = [step for step in self.all_steps() if step >= last.step and self._root.save_of(step) not in left]
        return None if newer else mirror

    def _continue_from(self, report: RestoreReport | None, seen: int | None, rank: int) -> None:
        self._branch = Branch(-1) if report is None else self._branch_of(report, rank)
        if self._mirror is not None and report is not None and report.left:
            self._mirror.another_branch()
        self._saver.continue_from(self._branch, seen)

    def _branch_of(self, report: RestoreReport, rank: int) -> Branch:
        """Return what the next save continues: of a step that was in memory alone, the last one published before it.

        Not one of a branch that training has left, and that no save has moved aside yet.
        """
        left = self._saver.branch
        damaged, unreadable = report.damaged, report.unreadable
        if left is not None:  # these were found by an earlier restore, and no save has moved them aside yet
            damaged += tuple(step for step in left.damaged if step > report.step and step not in damaged)
            unreadable += tuple(step for step in left.unreadable if step > report.step and step not in unreadable)
        if not report.in_memory or rank != 0:
            return Branch(report.step, report.save, damaged, unreadable)

        def save_of(step: int) -> str | None:  # no error, which rank 0 alone would have
            return saves_of(self._root, None, [step]).get(step)

        steps = [step for step in self._root.steps() if step <= report.step]
        if left is not None and left.step is not None and left.step <= report.step:
            own = self._saver.token
            saves = {step: parse_save_name(save_of(step) or "") for step in steps if step > left.step}
            steps = [step for step in steps if step <= left.step or ((save := saves[step]) and save.owner == own)]
        before = max(steps, default=None)
        return Branch(-1) if before is None else Branch(before, save_of(before), damaged, unreadable)

    def interrupt(self) -> None:
        """Wake a thread that waits in a method. From any thread; see `AsyncCallsQueue.interrupt`."""
        self._interrupted_at = self._interrupted_at or time.time()
        self._saver.interrupt()

    @property
    def interrupted_at(self) -> float | None:
        """When `interrupt` was first called since the last fault, in seconds since 1970; None if it was not."""
        return self._interrupted_at

    def _note_published(self, save: SaveId, branch: Branch) -> None:
        self._finalized.append(save.step)
        self._current_step = save.step
        report_step(save.step)
        rank = self._saver.last_rank
        if self._exports is not None and rank == 0:
            self._exports.published(save.step)
        if self._mirror is not None and rank is not None:
            self._mirror.published(save, branch, rank, self._ranks.world_size)

    def _settle(self, report: RestoreReport | None, restart: int) -> None:
        if report is None:
            self._saver.memory_tier.settle(None, restart=restart)
        else:
            self._saver.memory_tier.settle(report.step, report.save, restart=restart, left=report.left)

    def _note_restored(self, report: RestoreReport | None) -> None:
        self._last_restore = report
        self._resume_step = None if report is None else report.step
        if report is not None:
            report_step(report.step)
        self._current_step = None if report is None or report.in_memory else report.step

    def latest_step(self) -> int | None:
        """Return the newest published step of the root, not of its mirror; None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Return all published steps of the root, not of its mirror, ascending."""
        return self._root.steps()

    def close(self) -> None:
        """Finalize what is pending, end the writers and exports, free the memory; then raise the first failure.

        Takes at most `timeout` in all, whatever writers and storage do. CheckpointTimeoutError names the steps that
        were not finalized in time: their writers are killed, and the saves abandoned unless all ranks had completed
        them. (A `queue` from outside keeps them.) Exports are killed then, and copies to the mirror left to a later
        job. Idempotent. Without effect in a fork of the process that made this.
        """
        if self._closed or not self._origin.is_here:
            return
        self._closed = True
        ending = Deadline(self._timeout_s)
        waiting = ending.before_end(self._leaving_s)
        try:
            self._finalize_all(waiting)
        finally:
            self._saver.close(ending)
            if self._exports is not None:
                finishes_within(ending, functools.partial(self._exports.close, waiting), "ckpt-end-exports")
            if self._mirror is not None:
                self._mirror.close(waiting)
        if self._reuse_files and self._saver.last_rank == 0:
            finishes_within(ending, self._delete_recycled, "ckpt-delete-recycled")

    @property
    def _leaving_s(self) -> float:
        return min(_LEAVING_S, self._timeout_s / 8)

    def _delete_recycled(self) -> None:
        if self._saver.is_owner:
            for path in self._root.discard_recycled():
                try:
                    self._root.delete_contents(path, lambda: None, is_record=False)
                except StorageError as error:
                    _log.warning("files kept for the next save are not all deleted: %s", error)

    def _finalize_all(self, deadline: Deadline) -> None:
        """Finalize all calls, and close the queue unless it is shared."""
        steps = self._saver.steps_in_flight
        try:
            if self._owns_queue:
                self._queue.close(timeout_s=deadline.left_s)
            else:
                self._queue.finalize_all(deadline)
        except CheckpointTimeoutError as error:
            left = sorted(steps - set(self._finalized))
            if not left:
                raise
            raise CheckpointTimeoutError(
                f"close: the saves of steps {left} were not finalized in {self._timeout_s:g} s: {error}",
                rank=self._saver.last_rank,
                step=left[0],
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, without waiting: the writers finish what was scheduled by themselves."""
        if error is None or not self._origin.is_here:
            self.close()
            return
        self._closed = True
        if self._owns_queue:
            self._queue.__exit__(kind, error, trace)
        ending = Deadline(self._leaving_s)
        self._saver.close(ending, linger=True)
        if self._exports is not None:
            finishes_within(ending, self._exports.abort, "ckpt-end-exports")
        if self._mirror is not None:
            self._mirror.abort()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer is closed")
        if not self._origin.is_here:
            raise CheckpointError(
                f"this Checkpointer belongs to process {self._origin.pid}; process {os.getpid()} is a fork of it, such "
                "as a data loader worker, and can neither save nor restore with it"
            )

    def _check_writable(self) -> None:
        self._check_open()
        if self._read_only:
            raise CheckpointError("this Checkpointer was made with read_only=True: it saves and removes nothing")


def _lingering(linger: timedelta | None, linger_id: str | None, root: Root, read_only: bool) -> LingeringMemory | None:
    """Return what keeps memory of this process after its death; ValueError if that cannot be."""
    if linger is None:
        if linger_id is not None:
            raise ValueError("linger_id has a meaning only with linger, which says how long memory is kept")
        return None
    if linger <= timedelta(0):
        raise ValueError(f"linger must be a positive time, not {linger}")
    if read_only:
        raise ValueError("linger keeps snapshots, and with read_only=True there are none")
    return LingeringMemory(Job.of(linger_id, root.path, node()), linger.total_seconds())
