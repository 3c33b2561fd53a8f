"""Whether checkpoints advance from cycle to cycle."""

from __future__ import annotations

import contextlib
import os
import re

from inprocess.fault_tolerance.progress_tracker import TrainingProgressTracker

__all__ = ["CheckpointProgress"]

_STEP = re.compile(r"step_(\d+)\Z")


class CheckpointProgress(TrainingProgressTracker):
    """Takes a directory for a checkpoint root with folders step_N, of which a folder appears when its save is complete.

    A file is read as the base class does. One process, one thread.
    """

    def read_iteration(self) -> int:
        """Return the newest step in the directory, or the number in the file; 0 if there is none."""
        if self._file is not None and os.path.isdir(self._file):
            with contextlib.suppress(OSError):
                found = [_STEP.match(name) for name in os.listdir(self._file)]
                return max((int(match[1]) for match in found if match), default=0)
            return getattr(self, "_iteration", 0)
        return super().read_iteration()
