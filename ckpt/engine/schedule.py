"""The schedule of `Checkpointer.step`: which steps are saved, and which are kept in memory."""

from __future__ import annotations

import logging
from typing import Literal

from ckpt.engine.parts import CheckpointerSettings

__all__ = ["Schedule"]

_log = logging.getLogger("ckpt")
_SAVES = 2  # without `step`, until a warning: the first one may be the last step of a job that is about to end


class Schedule:
    """Which steps of one Checkpointer are due. Notices that `save_every` is given, and `step` is not called."""

    def __init__(self, settings: CheckpointerSettings) -> None:
        self._save_every = settings.save_every
        self._keep_every = None if settings.snapshots is None else settings.snapshots.every
        self._saves: int | None = 0  # without `step`; None once that was called, or warned of

    def due(self, step: int) -> Literal["save", "snapshot"] | None:
        """Return the action that is due after a step of training. ValueError if no step is ever due."""
        self._saves = None
        if self._save_every is None and self._keep_every is None:
            raise ValueError(
                "step() would never save anything: give Checkpointer save_every=1000 or snapshots=10, or call "
                "async_save(state, step) for the steps that are to be saved, and maybe_finalize() in each iteration"
            )
        if self._save_every is not None and step % self._save_every == 0:
            return "save"
        return "snapshot" if self._keep_every is not None and step % self._keep_every == 0 else None

    def note_save(self) -> None:
        """Note a save. Warns once if the schedule has no effect, as `step` is not called."""
        if self._save_every is None or self._saves is None:
            return
        self._saves += 1
        if self._saves == _SAVES:
            self._saves = None
            _log.warning(
                "save_every=%d has no effect: it says which steps `Checkpointer.step` saves, and that was not called. "
                "Call step(state, step) after each training step, or leave save_every out",
                self._save_every,
            )
