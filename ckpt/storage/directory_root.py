"""The interface of a root in a directory, for the modules that `root` is made of."""

from __future__ import annotations

from abc import abstractmethod

from ckpt.storage.interface import Root

__all__ = ["DirectoryRoot"]


class DirectoryRoot(Root):
    """The part of `root.CheckpointRoot` that the modules behind it use."""

    @property
    @abstractmethod
    def pending_path(self) -> str:
        """The directory of saves that are neither published nor abandoned."""

    @property
    @abstractmethod
    def abandoned_path(self) -> str:
        """The directory of abandoned saves and removed steps."""

    @property
    @abstractmethod
    def superseded_path(self) -> str:
        """The directory of steps of branches that were left."""

    @abstractmethod
    def step_path(self, step: int) -> str:
        """Return the directory of `step` once it is published."""

    @abstractmethod
    def move_step(self, step: int, where: str, token: int | None = None) -> str | None:
        """Move a published step to directory `where`, if it exists, and return its new path."""
