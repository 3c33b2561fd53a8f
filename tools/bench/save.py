"""Stall, time to durable and memory of a save, beside a copy in memory and a write to the disk in the same round.

One rank. Limits and saves alternate, so that both see the same machine.
"""

import argparse
import gc
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ckpt import Checkpointer, Staging
from tools.bench.harness import (
    Row,
    add_disk_option,
    add_size_options,
    megabytes,
    print_report,
    rounds,
    temporary_folder,
    write_json,
)
from tools.bench.limits import CopyLimit, DiskLimit
from tools.bench.processes import measure_memory
from tools.bench.unchanged import UnchangedSaves, measure_unchanged
from tools.bench.workload import StepLoop, make_state, size_of, tensors

_POLL_S = 0.001
_STEP_S = 0.05
_WINDOW_STEPS = 10
_SETTLE_S = 1.0  # what was removed is discarded on the device after the call that removes it
_WARM_S_PER_GB = 6.0  # a virtual machine that gives memory back gets it again at 0.5 GB/s
_SLOTS, _WRITERS = 2, 1
_TARGET = 1.5
_FIRST_TARGET, _ADDED_TARGET, _REST_TARGET = 2.0, 1.3, 1.1
_WRITER_BYTES = 150e6
_UNCHANGED_TARGET = 0.05


@dataclass(frozen=True)
class _Saved:
    """Seconds from the call of `save_request`: until training goes on, and until `maybe_finalize` returned the step.

    `times` is what trainer and writer recorded of the parts of the save.
    """

    stall: float
    durable: float
    times: dict[str, float]

    @property
    def after_stall(self) -> float:
        return self.durable - self.stall

    @property
    def queued(self) -> float:
        """Until the writer begins, after the stall."""
        return self.times["write_begin"] - self.times["begin"] - self.times["stall_s"]

    @property
    def publishing(self) -> float:
        """What is left: manifest, publication, answer."""
        return self.after_stall - self.queued - self.times["write_s"] - self.times["sync_s"]


@dataclass(frozen=True)
class _Round:
    """Seconds of everything that is measured once per round, and bytes of memory.

    `step` is a training step by itself, `step_saving` one beside a save, `added` what one save adds to a window of
    steps, its stall included. `at_rest` is what all processes need more than this one did without a Checkpointer, after
    saves that found their slot free, and `memory` with both slots in use. `unprepared` is a first save without warm-up.
    """

    copy: float
    disk: float
    disk_files: float
    torch_save: float
    warmup: float
    unprepared: _Saved
    first: _Saved
    steady: _Saved
    step: float
    step_saving: float
    added: float
    at_rest: int
    memory: int
    largest_writer: int
    unchanged: UnchangedSaves


class _Measurement:
    """The state, and the memory of the limits. `folder` is on the disk to be measured."""

    def __init__(self, total_bytes: float, folder: Path) -> None:
        self._folder = folder
        self._state = make_state(total_bytes)
        self.tensors = sum(1 for _ in tensors(self._state))
        self.staged_bytes = size_of(tensors(self._state))
        self._copy = CopyLimit(tensors(self._state))
        self._disk = DiskLimit(folder / "limit", self.staged_bytes)
        self._loop = StepLoop(_STEP_S)
        self._step = 0

    def round(self, backwards: bool) -> _Round:
        """Measure everything once; limits and save take turns in one order or the other."""
        gc.collect()
        with Checkpointer(self._folder) as checkpointer:
            unprepared = self._save(checkpointer)
        before = measure_memory().total
        with Checkpointer(self._folder, staging=Staging(slots=_SLOTS)) as checkpointer:
            begin = time.perf_counter()
            checkpointer.warmup(self._state)
            warmup = time.perf_counter() - begin
            time.sleep(_WARM_S_PER_GB * self.staged_bytes / 1e9)  # training would go on meanwhile
            first = self._save(checkpointer)
            limits, steady = self._turns(checkpointer, backwards)
            step, step_saving, added = self._train(checkpointer)
            at_rest = measure_memory().total
            memory, largest = self._memory(checkpointer)
        unchanged = measure_unchanged(self._state, self._folder)
        shutil.rmtree(self._folder / "unchanged")
        return _Round(
            **limits,
            warmup=warmup,
            unprepared=unprepared,
            first=first,
            steady=steady,
            step=step,
            step_saving=step_saving,
            added=added,
            at_rest=at_rest - before,
            memory=memory - before,
            largest_writer=largest,
            unchanged=unchanged,
        )

    def close(self) -> None:
        self._copy.close()

    def _turns(self, checkpointer: Checkpointer, backwards: bool) -> tuple[dict[str, float], _Saved]:
        saved: list[_Saved] = []

        def save() -> float:
            saved.append(self._save(checkpointer))
            return saved[-1].durable

        turns: dict[str, Callable[[], float]] = {
            "copy": self._copy.measure,
            "disk_files": lambda: self._disk.write_files(self._chunk_files(checkpointer)),
            "save": save,
            "disk": self._write_one_file,
            "torch_save": lambda: _torch_save(self._folder / "peer.pt", self._state),
        }
        seconds = {}
        for name in reversed(turns) if backwards else turns:
            time.sleep(_SETTLE_S)
            seconds[name] = turns[name]()
        del seconds["save"]
        return seconds, saved[0]

    def _write_one_file(self) -> float:
        seconds = self._disk.write()
        self._disk.remove()
        return seconds

    def _chunk_files(self, checkpointer: Checkpointer) -> int:
        latest = checkpointer.latest_step()
        assert latest is not None
        return sum(1 for _ in self._step_folder(latest).glob("packs/*/*"))

    def _save(self, checkpointer: Checkpointer) -> _Saved:
        self._step += 1
        begin = time.perf_counter()
        checkpointer.queue.schedule_async_request(checkpointer.save_request(self._state, self._step))
        stall = time.perf_counter() - begin
        while not checkpointer.maybe_finalize():
            time.sleep(_POLL_S)
        durable = time.perf_counter() - begin
        part = self._step_folder(self._step) / "parts" / "000" / "rank_00000.json"
        times = json.loads(part.read_bytes())["times"]
        self._free_disk()
        return _Saved(stall, durable, times)

    def _train(self, checkpointer: Checkpointer) -> tuple[float, float, float]:
        """Return the time of a step alone, of one beside a save, and what a save adds to the steps until it is done."""
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
        """Return the most seen with both slots in use: bytes of all processes, and of the largest one but this."""
        for _ in range(_SLOTS):
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
        """Give the space of all steps back.

        The files stay, empty, until the end of the run: no measurement begins with hundreds of files just removed.
        """
        for path in self._folder.glob("step_*/packs/*/*"):
            os.truncate(path, 0)
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _torch_save(path: Path, state: object) -> float:
    """Return the seconds of `torch.save` and fsync, which training would wait for."""
    begin = time.perf_counter()
    try:
        with path.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        return time.perf_counter() - begin
    finally:
        path.unlink(missing_ok=True)


def _rows(taken: list[_Round], staged_bytes: int) -> list[Row]:
    def of(pick: Callable[[_Round], float]) -> list[float]:
        return [pick(each) for each in taken]

    copy, disk, files = of(lambda r: r.copy), of(lambda r: r.disk), of(lambda r: r.disk_files)
    durable = of(lambda r: r.steady.after_stall)
    full_s, full_bytes = of(lambda r: r.unchanged.full_s), of(lambda r: r.unchanged.full_bytes)
    slots_bytes = float(_SLOTS * staged_bytes)
    rest, rest_target = [float(staged_bytes)] * len(taken), _REST_TARGET + _WRITER_BYTES * _WRITERS / staged_bytes
    memory_target = 1.05 + _WRITER_BYTES * _WRITERS / slots_bytes
    return [
        Row("limit: copy to warm memory, all threads", copy),
        Row("limit: O_DIRECT write + fsync, one file", disk),
        Row("limit: the same in as many files as a save", files, disk),
        Row("peer: torch.save + fsync (training waits)", of(lambda r: r.torch_save), disk),
        Row("stall, first save without warm-up", of(lambda r: r.unprepared.stall), copy, _FIRST_TARGET),
        Row("stall, first save after warm-up", of(lambda r: r.first.stall), copy),
        Row("stall, steady", of(lambda r: r.steady.stall), copy, _TARGET),
        Row("durable and published, from the call", of(lambda r: r.steady.durable), disk),
        Row("durable and published, after the stall", durable, disk, _TARGET),
        Row("  the same, to the limit of as many files", durable, files),
        Row("  until the writer begins", of(lambda r: r.steady.queued)),
        Row("  data", of(lambda r: r.steady.times["write_s"])),
        Row("  sync, metadata", of(lambda r: r.steady.times["sync_s"])),
        Row("  manifest, publish, answer", of(lambda r: r.steady.publishing)),
        Row(
            "1 % changes, linked: durable, from the call",
            of(lambda r: r.unchanged.unchanged_s),
            full_s,
            _UNCHANGED_TARGET,
        ),
        Row("  limit: one read of all bytes", of(lambda r: r.unchanged.read_s), full_s),
        Row("  bytes written", of(lambda r: r.unchanged.unchanged_bytes), full_bytes, _UNCHANGED_TARGET, megabytes),
        Row("warm-up call", of(lambda r: r.warmup)),
        Row("training step, no save in flight", of(lambda r: r.step)),
        Row("training step, save in flight", of(lambda r: r.step_saving), of(lambda r: r.step)),
        Row("one save costs training, stall included", of(lambda r: r.added), copy, _ADDED_TARGET),
        Row("memory beside the state, at rest", of(lambda r: r.at_rest), rest, rest_target, megabytes),
        Row(
            "memory beside the state, both slots in use",
            of(lambda r: r.memory),
            [slots_bytes] * len(taken),
            memory_target,
            megabytes,
        ),
        Row("  largest writer, without shared memory", of(lambda r: r.largest_writer), show=megabytes),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add_size_options(parser, rounds=9)
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure in rounds, and print a table."""
    taken: list[_Round] = []
    with temporary_folder(options.folder) as folder:
        measurement = _Measurement(1e9 * options.gb, folder)
        try:
            for counts in rounds(options.rounds):
                found = measurement.round(backwards=len(taken) % 2 == 0)
                taken += [found] if counts else []
        finally:
            measurement.close()
    rows = _rows(taken, measurement.staged_bytes)
    title = (
        f"{measurement.staged_bytes / 1e9:.2f} GB in {measurement.tensors} tensors, world size 1, {len(taken)} rounds; "
        "ratio: median of the rounds, to the limit in the same round"
    )
    print_report(title, rows)
    size = {"staged_bytes": measurement.staged_bytes, "tensors": measurement.tensors}
    values = {**size, "slots": _SLOTS, "writers": _WRITERS, "rounds": [asdict(each) for each in taken]}
    write_json(options.json, {"rows": rows, **values})
