"""A step that is held on all ranks while it is read."""

from __future__ import annotations

from typing import Protocol

from ckpt.errors import CheckpointError, CheckpointNotFoundError
from ckpt.ranks.group import Alone, Group
from ckpt.storage.interface import Root
from ckpt.storage.node_packs import NodeLocalStep, NodePacks
from ckpt.storage.step_source import HeldStep, StepSource


class HeldSource(Protocol):
    """A step while it is read on all ranks.

    `is_node_local`: not every rank may be able to read what it needs. `mirror_files` were read from the mirror so far.
    """

    @property
    def is_node_local(self) -> bool: ...
    @property
    def mirror_files(self) -> int: ...

    def open(self) -> StepSource:
        """Begin to read, and return the files. May be collective; raises on all ranks or none then."""

    def check(self) -> None:
        """Raise a CheckpointError unless everything that this rank has read is of this step."""


class StepHold:
    """Holds one step on all ranks while it is read. The coordinator makes the lease, for all, and releases it last."""

    def __init__(self, root: Root, step: int, ranks: Group, read_only: bool, packs: NodePacks | None = None) -> None:
        """`packs`: where the pack files of this root are on this node."""
        self.root = root
        self._packs = packs
        self._step = step
        self._ranks = ranks
        self._leads = not read_only and ranks.rank == 0 and not isinstance(ranks, Alone)
        self._reader: HeldStep | None = None
        self._node_local: NodeLocalStep | None = None

    def open(self) -> StepSource:
        """Begin to read, and return the files. CheckpointNotFoundError if the step does not exist any more."""
        self._reader = self.root.hold_step(self._step, lease=self._leads, renewing=True)
        if self._packs is None:
            return self._reader.source
        self._node_local = self._packs.source(self._step, self._reader.source, lease=self._leads)
        return self._node_local

    def check(self) -> None:
        """Raise CheckpointNotFoundError unless everything that this rank has read is of this step."""
        if self._reader is not None:
            self._reader.check()
        if self._node_local is not None:
            self._node_local.check()

    @property
    def is_node_local(self) -> bool:
        """Whether not every rank can read every file. The same on all ranks."""
        return self._packs is not None

    @property
    def mirror_files(self) -> int:
        """How many pack files this rank has read from the mirror because they are not on its node, or damaged there."""
        return 0 if self._node_local is None else len(self._node_local.from_mirror)

    def was_removed(self, error: CheckpointError) -> bool:
        """Return whether the step was removed or replaced, as seen by any rank. Collective."""
        is_gone = isinstance(error, CheckpointNotFoundError)
        still_there = not is_gone and (self._reader is None or self._reader.still_there)
        return b"-" in self._ranks(b"+" if still_there else b"-")

    def close(self) -> None:
        """Release the step. Idempotent."""
        if self._node_local is not None:
            self._node_local.close()
        if self._reader is not None:
            self._reader.close()
