"""Whether restarts get anywhere: a job that fails at the same iteration again and again should give up."""

from __future__ import annotations

import logging
import os

from inprocess.fault_tolerance.config import FaultToleranceConfig

__all__ = ["TrainingProgressTracker"]

_log = logging.getLogger(__name__)


class TrainingProgressTracker:
    """Compares the iteration number in a checkpoint tracker file between cycles. One process, one thread.

    The file holds a decimal number, as Megatron's `latest_checkpointed_iteration.txt`; without one the iteration is 0.
    Without a path, or with `max_no_progress_cycles` of 0, it never gives up.
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
        """Make one as the settings say."""
        return cls(config.checkpoint_iteration_file, config.max_no_progress_cycles, config.min_progress_iterations)

    @property
    def enabled(self) -> bool:
        """Whether it can give up at all."""
        return self._file is not None and self._max_cycles > 0

    def read_iteration(self) -> int:
        """Return the number in the file; 0 if there is none, what is known already if it cannot be read."""
        if self._file is None:
            return 0
        try:
            with open(self._file) as file:
                return int(file.read().strip())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            _log.warning("%s does not tell an iteration: %s", os.fspath(self._file), error)
            return getattr(self, "_iteration", 0)

    def analyze_previous_cycle(self) -> None:
        """A cycle has ended without success: count it, or begin to count anew if it has got further."""
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
        """Whether another restart would be in vain."""
        return self.enabled and self.no_progress_cycles >= self._max_cycles
