"""A directory of Lightning's checkpoints while it is saved to: which names and steps are removed, and when."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch.distributed as dist

import ckpt
from ckpt import Checkpointer, CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError, StorageError
from ckpt.integrations.lightning_names import exists, is_link, read_name, remove_name, write_name
from ckpt.integrations.lightning_reading import taken_steps

__all__ = ["Directory"]

_log = logging.getLogger("ckpt")
_WAIT_S = 5.0  # after an exception: most saves end in that time, and an error that is told later is not missed


class Directory:
    """A directory that is saved to: its checkpointer, and what is to be done when its saves are published."""

    def __init__(self, root: str, checkpointer: Checkpointer, *, shared: bool) -> None:
        self.checkpointer = checkpointer
        self.shared = shared  # by all ranks, which save together
        self._root = root
        self.is_recovered = (
            False  # what an earlier job left is decided; the same on all ranks only until one is replaced
        )
        self._last: int | None = None  # the number of the newest save
        self._saves: dict[int, str] = {}  # the paths of saves that are not known to be published, by step
        self._removals: list[tuple[int, str]] = []  # each path with the step that must be published before

    @property
    def leads(self) -> bool:
        """Whether this rank writes and removes names."""
        return not self.shared or not dist.is_initialized() or dist.get_rank() == 0

    def prepare(self, path: str, global_step: int) -> int:
        """Write the name of a save, and return the number of its step: the global step, or the next free number."""
        if is_link(path):
            remove_name(path)
        self._removals = [removal for removal in self._removals if removal[1] != path]
        earlier = read_name(path) if exists(path) else []
        if self._last is None:
            taken = taken_steps(self._root)  # before the published ones: a save that is published meanwhile is of those
            self._last = max(self.checkpointer.all_steps() + taken, default=-1)
        step = max(global_step, self._last + 1)
        write_name(path, [step, *earlier])
        return step

    def save(
        self, checkpoint: dict[str, Any], path: str, step: int, metrics: dict[str, Any], *, recovers: bool
    ) -> None:
        """Stage and schedule a save; recover before, if all ranks do."""
        if recovers:  # else its steps are taken for those of another training; here each has its name
            self.checkpointer.recover()
            self.is_recovered = True
        self._last = step
        self._saves[step] = path
        self.checkpointer.async_save(checkpoint, step, metrics=metrics)

    def finalize(self, blocking: bool = False) -> None:
        """Finalize the saves that are decided. Raises the error of one that was abandoned."""
        for step in self.checkpointer.maybe_finalize(blocking):
            self._published(step)

    def remove_later(self, path: str) -> None:
        """Remove a name and its steps, once the newest save is published."""
        self._removals.append((max(self._saves, default=-1), path))
        if not self._saves:
            self._remove(-1)

    def settle(self, blocking: bool = True) -> list[CheckpointError]:
        """Finalize the saves that are decided, or with `blocking` all; return the failures."""
        errors: list[CheckpointError] = []
        while True:
            try:
                self.finalize(blocking)
                return errors
            except CheckpointError as error:  # of one save, which is no longer in the queue
                errors.append(error)
                if isinstance(error, CheckpointTimeoutError):
                    return errors

    def close(self) -> list[CheckpointError]:
        """Wait for all saves, finalize them and end the writer; return the failures."""
        try:
            return self.settle()
        finally:
            self.checkpointer.close()

    def end_after_exception(self) -> bool:
        """End by this rank alone, and return True, unless a save is still in flight after a few seconds.

        A later owner of the root would fence off a writer that has not begun its save. If ranks share the directory,
        saves are finalized by all of them together, so only what they know already counts, and nothing is waited for.
        """
        if not self.shared:
            ckpt.wait_until_written(self._root, timeout=_WAIT_S)
            for failure in self.settle(blocking=False):
                _log.warning("%s", failure)
        if self._saves:
            return False
        self.checkpointer.__exit__(*sys.exc_info())
        return True

    def _published(self, step: int) -> None:
        path = self._saves.get(step)
        self._saves = {other: name for other, name in self._saves.items() if other > step}
        if not self.leads:
            return
        if path is not None and exists(path):
            steps = read_name(path)
            kept = [other for other in steps if other >= step or not self._delete(other)]
            if kept != steps:
                write_name(path, kept)
        self._remove(step)

    def _remove(self, published: int) -> None:
        """Remove the names that waited for this step."""
        due = [removal for removal in self._removals if removal[0] <= published]
        for removal in due:
            path = removal[1]
            if exists(path):
                kept = [step for step in read_name(path) if not self._delete(step)]
                if kept:
                    continue  # again, after the next save
                remove_name(path)
            self._removals.remove(removal)

    def _delete(self, step: int) -> bool:
        """Remove a step; False, and a warning, if that is not possible now."""
        try:
            self.checkpointer.delete(step)
        except CheckpointNotFoundError:
            pass  # it was never published
        except StorageError as error:
            _log.warning("step %d of %s is not removed yet: %s", step, self._root, error)
            return False
        return True
