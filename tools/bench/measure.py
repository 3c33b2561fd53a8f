"""The rounds of the benchmark. Each measures limits and saves side by side, so that both see the same machine."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckpt import Checkpointer
from tools.bench.limits import CopyLimit, DiskLimit, torch_save
from tools.bench.memory import Memory, measure_memory
from tools.bench.state import make_state, tensors
from tools.bench.training import StepLoop

__all__ = ["Memories", "Results", "Round", "measure"]

_POLL_S = 0.001
_STEP_S = 0.05
_WINDOW_STEPS = 40
_SETTLE_S = 0.2


@dataclass(frozen=True)
class Saved:
    """Seconds from the call of `save_request`: until training goes on, until `maybe_finalize` returned the step. `parts`
    is what the writer says it did."""

    stall: float
    durable: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Round:
    """Seconds of everything that is measured once in each round. `step` is of one training step alone, `step_saving`
    of one beside a save, `save_in_steps` what one save adds to a window of steps, its stall included."""

    copy: float
    disk: float
    torch_save: float
    first: Saved
    steady: Saved
    warmup: float
    step: float
    step_saving: float
    save_in_steps: float


@dataclass(frozen=True)
class Memories:
    """Before a Checkpointer existed, and the most seen while two saves were in flight."""

    before: int
    most: int
    largest_background: int
    background: int


@dataclass
class Results:
    """Of one run. `staged_bytes` are those of the tensors."""

    staged_bytes: int
    tensors: int
    slots: int
    rounds: list[Round] = field(default_factory=list)
    memories: list[Memories] = field(default_factory=list)


def measure(total_bytes: float, rounds: int, folder: Path, tick: Callable[[], None]) -> Results:
    """Run `rounds` rounds, after one that does not count. `folder` is on the disk to be measured and stays empty."""
    bench = _Bench(total_bytes, folder)
    try:
        bench.round(0)
        tick()
        for number in range(1, rounds + 1):
            bench.results.rounds.append(bench.round(number))
            tick()
    finally:
        bench.close()
    return bench.results


class _Bench:
    def __init__(self, total_bytes: float, folder: Path) -> None:
        self._folder = folder
        self._state = make_state(total_bytes)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors(self._state)]
        self.results = Results(sum(sizes), len(sizes), slots=2)
        self._copy = CopyLimit(tensors(self._state))
        self._disk = DiskLimit(folder, sum(sizes))
        self._loop = StepLoop(_STEP_S)
        self._step = 0

    def round(self, number: int) -> Round:
        """Limits and saves in turns, in the other order in every other round."""
        before = measure_memory().total
        with self._checkpointer() as checkpointer:
            begin = time.perf_counter()
            checkpointer.warmup(self._state)
            warmup = time.perf_counter() - begin
            self._until_warm(checkpointer)
            first = self._save(checkpointer)
            seconds: dict[str, float] = {}
            saves: list[Saved] = []
            turns: list[Callable[[], None]] = [
                lambda: seconds.update(copy=self._copy.measure()),
                lambda: saves.append(self._save(checkpointer)),
                lambda: seconds.update(disk=self._disk.measure()),
                lambda: seconds.update(peer=torch_save(self._folder, self._state)),
            ]
            for turn in turns if number % 2 else reversed(turns):
                turn()
                time.sleep(_SETTLE_S)
            step, step_saving, added = self._train(checkpointer)
            if number:
                self.results.memories.append(self._memory(checkpointer, before))
        return Round(seconds["copy"], seconds["disk"], seconds["peer"], first, saves[0], warmup, step, step_saving, added)
