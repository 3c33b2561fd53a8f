"""Progress between restarts: a job that fails at the same iteration again and again should give up."""

from __future__ import annotations

import logging
import os
import re

from inprocess.bounded_waits import bounded_call
from inprocess.exception import TimeoutError
from inprocess.fault_tolerance.config import FaultToleranceConfig

__all__ = ["TrainingProgressTracker"]

_log = logging.getLogger(__name__)
_STEP = re.compile(r"step_(\d+)\Z")
_READ_TIMEOUT_S = 15.0


class TrainingProgressTracker:
    """Compares the iteration of the last checkpoint between cycles. One process, one thread.

    `checkpoint_iteration_file` holds a decimal number, like Megatron's `latest_checkpointed_iteration.txt`, or is a
    directory with one folder step_N per complete checkpoint. Without a path, or with `max_no_progress_cycles` of 0, it
    never gives up.
    """

    def __init__(
        self,
        checkpoint_iteration_file: str | None,
        max_no_progress_cycles: int = 3,
        min_progress_iterations: int = 1,
    ) -> None:
        self._file = checkpoint_iteration_file
        self._max_cycles = max_no_progress_cycles
        self._min_iterations = min_progress_iterations
        self._iteration = self.read_iteration()
        self.no_progress_cycles = 0

    @classmethod
    def from_config(cls, config: FaultToleranceConfig) -> TrainingProgressTracker:
        """Create one from the settings."""
        return cls(config.checkpoint_iteration_file, config.max_no_progress_cycles, config.min_progress_iterations)

    @property
    def enabled(self) -> bool:
        """Whether it can give up at all."""
        return self._file is not None and self._max_cycles > 0

    def read_iteration(self) -> int:
        """Return the newest step, or the number in the file: 0 if there is none, the last one if it cannot be read.

        A file system that does not answer counts as one that cannot be read.
        """
        if self._file is None:
            return 0
        path = self._file
        try:
            return bounded_call(lambda: _iteration_in(path), _READ_TIMEOUT_S, "the reading of the file")
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, TimeoutError) as error:
            _log.warning("%s has no iteration: %s", os.fspath(self._file), error)
            return getattr(self, "_iteration", 0)

    def analyze_previous_cycle(self) -> None:
        """Count a cycle that has failed, or start to count anew if it has made progress."""
        iteration = self.read_iteration()
        if iteration - self._iteration >= self._min_iterations:
            self._iteration, self.no_progress_cycles = iteration, 0
            return
        self.no_progress_cycles += 1
        _log.warning(
            "no progress beyond iteration %d in %d of at most %d cycles",
            self._iteration,
            self.no_progress_cycles,
            self._max_cycles,
        )

    def should_terminate_early(self) -> bool:
        """Whether to give up: the last cycles have made no progress."""
        return self.enabled and self.no_progress_cycles >= self._max_cycles


def _iteration_in(path: str) -> int:
    if os.path.isdir(path):
        found = [_STEP.match(name) for name in os.listdir(path)]
        return max((int(match[1]) for match in found if match), default=0)
    with open(path) as file:
        return int(file.read().strip())
