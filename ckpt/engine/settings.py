"""The arguments of a `Checkpointer`, checked and in one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckpt.arguments import check_flag, check_mapping, whole_number
from ckpt.async_calls import AsyncCallsQueue
from ckpt.exporting.options import ExportOptions
from ckpt.mirroring.options import Mirror
from ckpt.options import Snapshots, Staging
from ckpt.saving.retention import Keep
from ckpt.storage.interface import Root

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CheckpointerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointerSettings:
    """The options of a `Checkpointer`, as `Parts.of` takes them. TypeError or ValueError for those that are invalid."""

    keep: Keep | None
    save_every: int | None
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
    on_divergence: Literal["error", "warn", "ignore"]

    def __post_init__(self) -> None:
        check_flag("read_only", self.read_only)
        if self.save_every is not None:
            whole_number("save_every", self.save_every, unit="steps")
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

    @property
    def has_schedule(self) -> bool:
        """Whether `Checkpointer.step` ever saves a step, or keeps it in memory."""
        return self.save_every is not None or (self.snapshots is not None and self.snapshots.every is not None)

    def saves(self, step: int) -> bool:
        """Return whether `Checkpointer.step` saves a step."""
        return self.save_every is not None and step % self.save_every == 0

    def keeps(self, step: int) -> bool:
        """Return whether `Checkpointer.step` keeps a step in memory, if it does not save it."""
        every = None if self.snapshots is None else self.snapshots.every
        return every is not None and step % every == 0
