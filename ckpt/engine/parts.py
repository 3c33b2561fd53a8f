"""The parts of one `Checkpointer`, and their assembly from its settings."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckpt.arguments import in_seconds
from ckpt.async_calls import AsyncCallsQueue
from ckpt.engine.settings import Settings
from ckpt.exporting.background import BackgroundExports
from ckpt.keeper.lingering import LingeringMemory
from ckpt.keeper.takeover import Job
from ckpt.keeper.trainer_side import Keeper
from ckpt.loading.restore import Tiers
from ckpt.mirroring.background import BackgroundMirror
from ckpt.options import Snapshots
from ckpt.planning.chunk_grid import GridOptions
from ckpt.ranks.collectives import Ranks
from ckpt.saving.retention import Retention
from ckpt.saving.save import Saver
from ckpt.saving.stage import StagingOptions
from ckpt.saving.task import SaveOptions
from ckpt.staging.neighbors import node
from ckpt.storage.interface import Root
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.options import StorageOptions
from ckpt.storage.roots import own_root

__all__ = ["Parts"]

_MIRROR_S = 60.0  # for requests to the mirror, which are tried again later


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one Checkpointer. `reuses_files`: saves write over the files of removed steps.

    `keeper` forks all their workers; only the writers of a queue that is shared are of another one.
    """

    settings: Settings
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
    def of(cls, root: str | os.PathLike[str], settings: Settings) -> Parts:
        """Make the parts; nothing is written, and no process started. ValueError, TypeError, StorageError."""
        timeout_s, staging, snapshots = settings.timeout_s, settings.staging, settings.snapshots
        if not isinstance(root, str | os.PathLike):
            raise TypeError(
                f"root must be a directory, or a URL such as 's3://bucket/run7', not {root!r:.80} "
                f"({type(root).__name__})"
            )
        root_at = own_root(root, StorageOptions.of(settings.storage_options, timeout_s / 2))
        reuses_files = settings.reuses_files(root_at)
        node_path = settings.node_local
        grid = GridOptions(staging.file_bytes, staging.inner_bytes, common_apart=node_path is not None)
        how_staged = StagingOptions(
            staging.slots_for(snapshots),
            staging.max_host_bytes,
            staging.overlap,
            timeout_s,
            staging.compression,
            grid,
            settings.on_divergence,
            snapshots is not None,
        )
        how_saved = SaveOptions(
            staging.threads,
            timeout_s,
            Retention(settings.keep, reuses_files),
            node_local=node_path,
            database_chunks=staging.database_chunks,
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
        saver = Saver(root_at, ranks, queue, keeper, how_staged, how_saved, replicated, lingering)
        if mirror is not None:
            saver.held = lambda: mirror.held(saver.in_flight)
        return cls(settings, keeper, root_at, ranks, queue, saver, exports, mirror, mirror_root, packs, reuses_files)

    def tiers(self, mirror: Root | None) -> Tiers:
        """Return where a restore looks: in memory, in the root and in `mirror`."""
        return Tiers(self.root, mirror, self.packs, self.saver.memory_tier)


def _mirror(root: Root, settings: Settings, keeper: Keeper) -> tuple[Root | None, BackgroundMirror | None]:
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
