"""The settings of one `Checkpointer`, which are its arguments, and its parts, assembled from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt.arguments import check_flag, check_mapping, in_seconds
from ckpt.async_calls import AsyncCallsQueue
from ckpt.errors import CheckpointError
from ckpt.exporting.background import BackgroundExports
from ckpt.exporting.options import ExportOptions
from ckpt.keeper.lingering import LingeringMemory
from ckpt.keeper.takeover import Job
from ckpt.keeper.trainer_side import Keeper
from ckpt.loading.restore import Tiers
from ckpt.mirroring.background import BackgroundMirror
from ckpt.mirroring.options import Mirror
from ckpt.options import FailedSaves, Snapshots, Staging
from ckpt.pace import Pace
from ckpt.planning.chunk_grid import GridOptions
from ckpt.ranks.collectives import Ranks
from ckpt.saving.retention import Keep, Retention
from ckpt.saving.save import Saver
from ckpt.saving.save_failures import SaveFailures
from ckpt.saving.stage import StagingOptions
from ckpt.saving.task import SaveOptions
from ckpt.staging.neighbors import node
from ckpt.storage.compression import FRAME_BYTES, Compression
from ckpt.storage.interface import Root
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.roots import local_path, own_directory, own_root
from ckpt.storage.stores.interface import StorageOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_MIRROR_S = 60.0  # for requests to the mirror, which are tried again later


def node_local_path(path: Any) -> str | None:
    """Return the absolute path of an argument `node_local`, or None. TypeError or StorageError if it is invalid."""
    if not isinstance(path, str | os.PathLike | None):
        raise TypeError(f"node_local must be a directory, not {path!r:.80} ({type(path).__name__})")
    return None if path is None else own_directory(local_path(path), "a directory for pack files")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointerSettings:
    """The options of a `Checkpointer`, as `Parts.of` takes them. TypeError or ValueError for those that are invalid."""

    keep: Keep | None
    save_every: Pace | None
    snapshots: Snapshots | None
    mirror: Mirror | None
    node_local: str | None
    export: ExportOptions | None
    staging: Staging
    storage_options: Mapping[str, Any] | None = field(repr=False)
    timeout_s: float
    read_only: bool
    process_group: ProcessGroup | None
    queue: AsyncCallsQueue | None
    on_failed_save: FailedSaves | None

    def __post_init__(self) -> None:
        check_flag("read_only", self.read_only)
        for name, value, kind, example in (
            ("export", self.export, ExportOptions, "ckpt.ExportOptions(directory, every=1000)"),
            ("queue", self.queue, AsyncCallsQueue, "a ckpt.AsyncCallsQueue"),
        ):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be {example}, not a {type(value).__name__}")
        check_mapping("storage_options", self.storage_options)
        if self.node_local is not None and (self.mirror is None or self.export is not None):
            raise ValueError(
                "node_local keeps each rank's files on its node alone: it needs a mirror, from which they are read on "
                "other nodes, and cannot be used with export"
            )
        if self.read_only and self.snapshots is not None and self.snapshots.linger is not None:
            raise ValueError("linger keeps snapshots, and with read_only=True there are none")

    def reuses_files(self, root: Root) -> bool:
        """Return whether saves write over the files of removed steps. ValueError if they are to, and cannot."""
        compression, wanted = self.staging.compression, self.staging.reuse_files
        can = self.keep is not None and compression is None and root.reuses_files and self.node_local is None
        if wanted and not can:
            raise ValueError(
                "reuse_files writes over the files of steps that are removed: it needs keep, no compression, no "
                f"node_local, and a local root (keep={self.keep}, compression={compression!r})"
            )
        return can if wanted is None else wanted

    def links_unchanged(self, root: Root) -> bool:
        """Return whether saves link files that hold the same. ValueError if they are to, and cannot."""
        if self.staging.link_unchanged and (self.node_local is not None or not root.reuses_files):
            raise ValueError("link_unchanged links files of steps in a directory: it needs a local root, no node_local")
        return self.staging.link_unchanged


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one Checkpointer. `reuses_files`: saves write over the files of removed steps.

    `keeper` forks all their workers; only the writers of a queue that is shared are of another one.
    """

    settings: CheckpointerSettings
    keeper: Keeper
    root: Root
    ranks: Ranks
    queue: AsyncCallsQueue
    saver: Saver
    exports: BackgroundExports | None
    mirror: BackgroundMirror | None
    mirror_root: Root | None
    packs: NodePacks | None
    reuses_files: bool

    @classmethod
    def of(cls, root: str | os.PathLike[str], settings: CheckpointerSettings) -> Parts:
        """Make the parts; nothing is written, and no process started. ValueError, TypeError, StorageError."""
        timeout_s, staging, snapshots = settings.timeout_s, settings.staging, settings.snapshots
        if not isinstance(root, str | os.PathLike):
            raise TypeError(
                f"root must be a directory, or a URL such as 's3://bucket/run7', not {root!r:.80} "
                f"({type(root).__name__})"
            )
        root_at = own_root(root, StorageOptions.of(settings.storage_options, timeout_s / 2))
        reuses_files, links = settings.reuses_files(root_at), settings.links_unchanged(root_at)
        node_path = settings.node_local
        compression = Compression.of(staging.compression)
        grid = GridOptions(
            staging.file_bytes, staging.inner_bytes, common_apart=node_path is not None, small_apart=links
        )
        if compression is not None:
            grid = replace(grid, least_inner_bytes=FRAME_BYTES)
        how_staged = StagingOptions(
            staging.slots_for(snapshots),
            staging.max_host_bytes,
            staging.overlap,
            timeout_s,
            compression,
            grid,
            staging.on_divergence,
            snapshots is not None,
            only_changes=links,
        )
        how_saved = SaveOptions(
            staging.threads,
            timeout_s,
            Retention(settings.keep, reuses_files),
            node_local=node_path,
            database_chunks=staging.database_chunks,
            link_unchanged=links,
        )
        keeper = Keeper()
        lingering = None if snapshots is None else _lingering(keeper, snapshots, root_at)
        ranks = Ranks(settings.process_group, timeout_s)
        # Its ranks agree by storage on what becomes of a save, not by collectives.
        queue = settings.queue
        if queue is None:
            queue = AsyncCallsQueue(no_dist=True, process_group=settings.process_group, keeper=keeper)
        mirror_root, mirror = _mirror(root_at, settings, keeper)
        replicated = snapshots if snapshots is not None and snapshots.replicas else None
        exports = None if settings.export is None else BackgroundExports(root_at, settings.export, keeper)
        packs = None if node_path is None else NodePacks(node_path, root_at, mirror_root)
        failures = SaveFailures(settings.on_failed_save, ranks)
        saver = Saver(root_at, ranks, queue, keeper, how_staged, how_saved, failures, replicated, lingering)
        if mirror is not None:
            saver.held = lambda: mirror.held(saver.in_flight)
        return cls(settings, keeper, root_at, ranks, queue, saver, exports, mirror, mirror_root, packs, reuses_files)

    def finalize(self, blocking: bool) -> None:
        """Finalize the saves that are decided, or with `blocking` all. Raises what `SaveFailures.check` raises."""
        while True:
            try:
                self.queue.maybe_finalize_async_calls(blocking=blocking, no_dist=True)
                return
            except CheckpointError as error:  # of one call, which has left the queue
                self.saver.failures.check(error)

    def tiers(self, mirror: Root | None) -> Tiers:
        """Return where a restore looks: in memory, in the root and in `mirror`."""
        return Tiers(self.root, mirror, self.packs, self.saver.memory_tier)


def _mirror(root: Root, settings: CheckpointerSettings, keeper: Keeper) -> tuple[Root | None, BackgroundMirror | None]:
    mirror = settings.mirror
    if mirror is None:
        return None, None
    options = StorageOptions.of(mirror.storage_options, min(_MIRROR_S, settings.timeout_s / 2))
    mirror_root = own_root(mirror.root, options)
    if mirror_root.path == root.path:
        raise ValueError(f"the mirror of {root.path} must be another root")
    return mirror_root, BackgroundMirror(root, mirror_root, mirror, options, keeper, settings.node_local)


def _lingering(keeper: Keeper, snapshots: Snapshots, root: Root) -> LingeringMemory | None:
    """Return the memory that is kept after the death of this process; ValueError if nothing identifies the job."""
    if snapshots.linger is None:
        return None
    return LingeringMemory(keeper, Job.of(snapshots.linger_id, root.path, node()), in_seconds(snapshots.linger))
