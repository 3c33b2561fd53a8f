"""Where things are in a root in a directory, for `root.CheckpointRoot` and the modules that it is made of."""

from __future__ import annotations

import os

from ckpt.errors import StorageError
from ckpt.storage import directories, files
from ckpt.storage.copied_steps import CopiedObjects
from ckpt.storage.interface import Root
from ckpt.storage.links import refuse_link, refuse_links
from ckpt.storage.names import step_name, step_numbers
from ckpt.storage.ownership import Ownership
from ckpt.storage.step_source import LocalStep, StepSource
from ckpt.storage.stores.directory import DirectoryStore

__all__ = ["DirectoryRoot"]


class DirectoryRoot(Root):
    """The directories of a root, and the steps in them."""

    store: DirectoryStore

    def __init__(self, path: str) -> None:
        if "://" in path:
            raise StorageError(f"{path}: only directories can be used here, not URLs")
        self.path = path
        self.ownership = Ownership(path)
        self.store = DirectoryStore(path)
        self.copied = CopiedObjects(path)
        """The steps that were copied here from a store."""

    @property
    def pending_path(self) -> str:
        """The directory of saves that are neither published nor abandoned."""
        return refuse_link(os.path.join(self.path, ".pending"))

    @property
    def abandoned_path(self) -> str:
        """The directory of abandoned saves and removed steps."""
        return refuse_link(os.path.join(self.path, ".abandoned"))

    @property
    def superseded_path(self) -> str:
        """The directory of steps of branches that were left."""
        return refuse_link(os.path.join(self.path, ".superseded"))

    @property
    def damaged_path(self) -> str:
        """The directory of steps that were found damaged."""
        return refuse_link(os.path.join(self.path, ".damaged"))

    def step_path(self, step: int) -> str:
        """Return the directory of `step` once it is published; or where it was copied to from an object store."""
        path = os.path.join(self.path, step_name(step))
        is_copied = self.copied.are_there() and not files.exists(path)
        return self.copied.steps(only=False).get(step, path) if is_copied else path

    def steps(self) -> list[int]:
        """See `Root.steps`."""
        names = self.names(self.path)
        steps = step_numbers(names)
        return sorted(steps | self.copied.steps(only=not steps).keys() if "saves" in names else steps)

    def source_of(self, step: int) -> StepSource:
        """See `Root.source_of`."""
        return LocalStep(self.step_path(step))

    def pinned_steps(self, *, fresh: bool = False) -> set[int]:
        """See `PublishedSteps.pinned_steps`. A look changes nothing, as a fresh list on a network file system does."""
        path = os.path.join(self.path, "pins")
        names = directories.fresh_names_below(self.path, "pins") if fresh else directories.names_in(path)
        return step_numbers(names)

    def _make_pin(self, step: int) -> bool:
        """See `PublishedSteps._make_pin`. The file is made in its folder, which may be of all users of the root."""
        for made in directories.make_directories(self.path, "pins")[:-1]:
            directories.fsync_directory(made)
        return files.create_exclusive(os.path.join(self.path, "pins", step_name(step)), b"")

    def names(self, path: str) -> list[str]:
        """Return the names in a directory of the root; none if it does not exist. StorageError if it cannot be read."""
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise StorageError(f"checkpoint root {self.path} is a file; choose a directory") from None
        except OSError as error:
            raise StorageError(f"cannot list {path}: {error.strerror} (check its permissions and owner)") from error

    def make(self) -> None:
        """Make the root and its directories for pending and abandoned saves, durably."""
        self.check_links()
        for path in (self.path, self.pending_path, self.abandoned_path):
            directories.make_with_parents(path)

    def check_links(self) -> None:
        """See `Root.check_links`."""
        refuse_links(self.path)

    def check_writable(self) -> None:
        """Raise StorageError when the root cannot be made or written to."""
        self.make()
        directories.check_writable(self.pending_path)
