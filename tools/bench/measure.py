"""The rounds of the benchmark. Each measures limits and saves side by side, so that both see the same machine."""

import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckpt import Checkpointer
from tools.bench.limits import CopyLimit, DiskLimit, torch_save
from tools.bench.memory import measure_memory
from tools.bench.state import make_state, tensors
from tools.bench.training import StepLoop

__all__ = ["Benchmark", "Results", "Round", "Saved"]

_POLL_S = 0.001
_STEP_S = 0.05
_WINDOW_STEPS = 10
_SETTLE_S = 1.0  # what was removed is discarded on the device after the call that removes it
_WARM_S_PER_GB = 6.0  # two slots; a virtual machine that gives memory back gets it again at 0.5 GB/s


@dataclass(frozen=True)
class Saved:
    """Seconds from the call of `save_request`: until training goes on, and until `maybe_finalize` returned the step.
    `times` is what trainer and writer recorded of the parts of it."""

    stall: float
    durable: float
    times: dict[str, float]


@dataclass(frozen=True)
class Round:
    """Seconds of everything that is measured once in each round, bytes of memory.

    `step` is a training step by itself, `step_saving` one beside a save, `added` what one save adds to a window of
    steps, its stall included. `memory` is what all processes need more than this one did without a Checkpointer.
    """

    copy: float
    disk: float
    disk_files: float
    torch_save: float
    warmup: float
    first: Saved
    steady: Saved
    step: float
    step_saving: float
    added: float
    memory: int
    largest_writer: int


@dataclass
class Results:
    """Of one run; `staged_bytes` are those of the tensors."""

    staged_bytes: int
    tensors: int
    slots: int
    writers: int
    rounds: list[Round] = field(default_factory=list)


class Benchmark:
    """Holds the state, and the memory of the limits. `folder` is on the disk to be measured."""

    def __init__(self, total_bytes: float, folder: Path) -> None:
        self._folder = folder
        self._state = make_state(total_bytes)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors(self._state)]
        self.results = Results(sum(sizes), len(sizes), slots=2, writers=1)
        self._copy = CopyLimit(tensors(self._state))
        self._disk = DiskLimit(folder, sum(sizes))
        self._loop = StepLoop(_STEP_S)
        self._warm_s = _WARM_S_PER_GB * sum(sizes) / 1e9
        self._step = 0

    def round(self, count: bool = True) -> None:
        """Limits and saves in turns, every other round in the other order. A round that does not `count` warms up."""
        gc.collect()
        before = measure_memory().total
        with Checkpointer(self._folder, slots=self.results.slots) as checkpointer:
            begin = time.perf_counter()
            checkpointer.warmup(self._state)
            warmup = time.perf_counter() - begin
            time.sleep(self._warm_s)  # training would go on meanwhile
            first = self._save(checkpointer)
            limits, steady = self._turns(checkpointer)
            step, step_saving, added = self._train(checkpointer)
            memory, largest = self._memory(checkpointer)
        if count:
            taken = Round(
                **limits,
                warmup=warmup,
                first=first,
                steady=steady,
                step=step,
                step_saving=step_saving,
                added=added,
                memory=memory - before,
                largest_writer=largest,
            )
            self.results.rounds.append(taken)

    def close(self) -> None:
        self._copy.close()
        self._disk.close()

    def _turns(self, checkpointer: Checkpointer) -> tuple[dict[str, float], Saved]:
        saved: list[Saved] = []
        seconds: dict[str, float] = {}
        turns: dict[str, Callable[[], float]] = {
            "copy": self._copy.measure,
            "disk": self._disk.measure,
            "disk_files": lambda: self._disk.measure_files(self._chunk_files(checkpointer)),
            "torch_save": lambda: torch_save(self._folder, self._state),
        }

        def save() -> float:
            saved.append(self._save(checkpointer))
            return 0.0

        turns["save"] = save
        for name in ("copy", "disk_files", "save", "disk", "torch_save")[:: 1 if len(self.results.rounds) % 2 else -1]:
            time.sleep(_SETTLE_S)
            seconds[name] = turns[name]()
        del seconds["save"]
        return seconds, saved[0]

    def _chunk_files(self, checkpointer: Checkpointer) -> int:
        latest = checkpointer.latest_step()
        assert latest is not None
        return sum(1 for _ in self._step_folder(latest).glob("**/c.*"))

    def _save(self, checkpointer: Checkpointer) -> Saved:
        self._step += 1
        begin = time.perf_counter()
        checkpointer.queue.schedule_async_request(checkpointer.save_request(self._state, self._step))
        stall = time.perf_counter() - begin
        while not checkpointer.maybe_finalize():
            time.sleep(_POLL_S)
        durable = time.perf_counter() - begin
        part = self._step_folder(self._step) / "parts" / "rank_00000.json"
        times = json.loads(part.read_bytes())["times"]
        self._free_disk()
        return Saved(stall, durable, times)

    def _train(self, checkpointer: Checkpointer) -> tuple[float, float, float]:
        """Step alone, step beside a save, and what a save adds to the steps from its begin until it is finalized."""
        alone = self._loop.run(_WINDOW_STEPS) / _WINDOW_STEPS
        self._step += 1
        begin = time.perf_counter()
        checkpointer.async_save(self._state, self._step)
        stall = time.perf_counter() - begin
        steps, seconds = self._loop.run_until(lambda: bool(checkpointer.maybe_finalize()))
        self._free_disk()
        alone = (alone + self._loop.run(_WINDOW_STEPS) / _WINDOW_STEPS) / 2
        return alone, seconds / steps, stall + seconds - steps * alone

    def _memory(self, checkpointer: Checkpointer) -> tuple[int, int]:
        """The most seen with both slots in use: bytes of all processes, and of the largest one behind this."""
        for _ in range(self.results.slots):
            self._step += 1
            checkpointer.async_save(self._state, self._step)
        most, largest = 0, 0
        while checkpointer.queue.get_num_unfinalized_calls():
            memory = measure_memory()
            most, largest = max(most, memory.total), max(largest, *memory.background)
            checkpointer.maybe_finalize()
        self._free_disk()
        return most, largest

    def _step_folder(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}"

    def _free_disk(self) -> None:
        """Give the space of all steps back. The files stay, empty, until the end of the run: no measurement begins with
        hundreds of files just removed."""
        for path in self._folder.glob("step_*/**/c.*"):
            os.truncate(path, 0)
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
