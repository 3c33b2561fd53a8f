"""The turn of one system: each method measures one thing. All ranks call the same methods."""

import ctypes
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ckpt.native import crc32c
from tools.bench.limits import cached_share, drop_cache
from tools.bench.systems import SYSTEMS, Place, make_system
from tools.bench.systems.jobs import MemoryRequest, Turn
from tools.bench.systems.state import local_tensors
from tools.bench.workload import State, StepLoop, size_of

_POLL_S = 0.001
_FEWEST_STEPS = 6
_SETTLE_S = 1.0  # what was removed is discarded on the device after the call that removes it
_WARM_S_PER_GB = 10.0  # training would go on meanwhile; fresh memory comes at 0.3 to 0.5 GB/s in a virtual machine
_WINDOW = 1.25  # times what the last save took


@dataclass(frozen=True)
class Tools:
    """What a turn needs of the job.

    `memory` is None on all ranks but 0. A window of training has at most `most_steps` steps.
    """

    memory: MemoryRequest | None
    most_steps: int


class SystemTurn:
    """An open system; `close` it before `loads`. Steps count from 1, or go on after `last_step`."""

    def __init__(self, name: str, place: Place, state: State, tools: Tools, last_step: int = 0) -> None:
        self._entry = SYSTEMS[name]
        if self._entry.one_rank_only and place.world_size > 1:
            raise ValueError("saves from one process only")
        self._system = make_system(name, place)
        self._place, self._state, self._tools = place, state, tools
        self._step = last_step
        self._durable_s = 0.0
        self._load_cpu_s = 0.0  # of the last load, by all threads of this rank
        self._memory_so_far = (0, 0)

    def saves(self) -> Turn:
        """Prepare, save for the first time, save once without counting, and save again.

        The one that does not count uses the second half of a double buffer for the first time.
        """
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier system freed must not serve this one
        dist.barrier()
        if self._tools.memory is not None:
            self._tools.memory.begin()
        begin = time.perf_counter()
        self._system.prepare(self._state)
        prepared = time.perf_counter() - begin
        self._memory_so_far = (0, 0) if self._tools.memory is None else self._tools.memory.end()
        time.sleep(_SETTLE_S + _WARM_S_PER_GB * size_of(local_tensors(self._state)) / 1e9)
        stall_first, durable_first = self._save()
        self._save()
        time.sleep(_SETTLE_S)
        stall, durable = self._save()
        self._durable_s = durable
        return {
            "prepare_s": prepared,
            "stall_first_s": stall_first,
            "durable_first_s": durable_first,
            "stall_s": stall,
            "durable_s": durable,
        }

    def training(self, loop: StepLoop) -> Turn:
        """Run the same number of steps without a save, with one that begins with them, and without one again.

        There are enough steps for the save to end among them; if it does not, waiting for it counts, too.
        """
        alone = loop.run(_FEWEST_STEPS, _meet) / _FEWEST_STEPS
        wanted = torch.tensor(math.ceil(_WINDOW * self._durable_s / alone))
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        steps = max(_FEWEST_STEPS, min(int(wanted), self._tools.most_steps))
        before = self._timed(lambda: loop.run(steps, _meet))
        self._step += 1
        done = False

        def between() -> None:
            nonlocal done
            _meet()
            done = done or self._system.poll()

        def with_save() -> None:
            self._system.save(self._state, self._step)
            loop.run(steps, between)
            if not done:
                self._wait()

        window = self._timed(with_save)
        after = self._timed(lambda: loop.run(steps, _meet))
        return {"extra_s": window - (before + after) / 2, "step_s": alone, "steps": steps / self._place.world_size}

    def memory(self) -> Turn:
        """Return the most that all processes had while the system was prepared, or while a save was in flight."""
        if self._tools.memory is not None:
            self._tools.memory.begin()
        dist.barrier()
        self._save()
        if self._tools.memory is None:
            return {}
        _, most = self._tools.memory.end()
        before, preparing = self._memory_so_far
        return {"memory_bytes": float(max(most, preparing) - before)}

    def from_memory(self) -> Turn:
        """Load the newest step without storage; return nothing for systems that cannot do that."""
        load = getattr(self._system, "load_from_memory", None)
        if load is None or not self._entry.from_memory:
            return {}
        seconds = self._loaded(lambda: load(self._state, self._step))
        return {"load_memory_s": seconds}

    def close(self) -> None:
        """Close the system on all ranks."""
        dist.barrier()
        self._system.close()

    def loads(self, warm: bool = True) -> Turn:
        """Load the newest step from the device, and with `warm` again from the page cache."""
        files = [path for path in self._place.folder.rglob("*") if path.is_file()]
        taken: Turn = {}
        if self._place.rank == 0:
            drop_cache(files)
            taken["cached_share"] = cached_share(files)
        dist.barrier()
        asked, fetched = _bytes_read()
        taken["load_cold_s"] = self._loaded(lambda: self._system.load(self._state, self._step))
        asked_after, fetched_after = _bytes_read()
        taken |= {"asked_bytes": asked_after - asked, "fetched_bytes": fetched_after - fetched}
        taken["local_bytes"] = float(size_of(local_tensors(self._state)))
        if hasattr(self._system, "read_s"):
            taken["load_cold_read_s"] = self._system.read_s
        if warm:
            self._system.load(self._state, self._step)  # what was read past the page cache is not in it yet
            self._unload()
            for path in files:
                _read(path)
            taken["load_warm_s"] = self._loaded(lambda: self._system.load(self._state, self._step))
            taken["load_warm_cpu_s"] = self._load_cpu_s
            if hasattr(self._system, "read_s"):
                taken["load_warm_read_s"] = self._system.read_s
        return taken

    def counts(self, counter: Path) -> Turn:
        """Count the files that a steady save makes, the bytes of those it writes, and the calls of fsync of the job."""
        self.saves()
        # Only rank 0 looks: its writer, which removes old steps, has ended.
        known = self._files() if self._place.rank == 0 else []
        dist.barrier()
        before = counter.stat().st_size if counter.exists() else 0
        self._save()
        dist.barrier()
        if self._place.rank:
            return {}
        now, made = self._files(), {about.st_ino for about in known}
        written = {(about.st_ino, about.st_mtime_ns) for about in known}
        after = counter.stat().st_size if counter.exists() else 0
        return {
            "files": sum(about.st_ino not in made for about in now),
            "file_bytes": sum(about.st_size for about in now if (about.st_ino, about.st_mtime_ns) not in written),
            "fsyncs": after - before,
        }

    def files_of_last(self) -> float:
        """Return how many files the newest of two equal steps has."""
        return len(self._files()) / 2 if self._place.rank == 0 else 0

    def _files(self) -> list[os.stat_result]:
        return [path.stat() for path in self._place.folder.rglob("*") if path.is_file()]

    def _save(self) -> tuple[float, float]:
        self._step += 1
        self._begin_together()
        begin = time.perf_counter()
        self._system.save(self._state, self._step)
        stall = time.perf_counter() - begin
        self._wait()
        return stall, time.perf_counter() - begin

    def _wait(self) -> None:
        while not self._system.poll():
            time.sleep(_POLL_S)

    def _loaded(self, load: Callable[[], None]) -> float:
        """Return the seconds of a load, after which the tensors must be what they were."""
        tensors = local_tensors(self._state)
        expected = [_fingerprint(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        begin = time.process_time()
        seconds = self._timed(load)
        self._load_cpu_s = time.process_time() - begin
        self._unload()
        differ = sum(_fingerprint(tensor) != e for tensor, e in zip(tensors, expected, strict=True))
        if differ:
            raise AssertionError(f"{differ} of {len(tensors)} tensors came back different")
        return seconds

    def _unload(self) -> None:
        """Close what the system keeps open after a load."""
        unload = getattr(self._system, "unload", None)
        if unload is not None:
            unload()

    def _timed(self, work: Callable[[], object]) -> float:
        self._begin_together()
        begin = time.perf_counter()
        work()
        self._finish_gpu()
        return time.perf_counter() - begin

    def _begin_together(self) -> None:
        self._finish_gpu()
        dist.barrier()

    def _finish_gpu(self) -> None:
        if self._place.device == "cuda":
            torch.cuda.synchronize()


def empty_folder(folder: Path) -> None:
    """Free the space of all files in a folder.

    The files stay until the end of the run: a file system may be slow for a while after many were removed.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.truncate(path, 0)


def _meet() -> None:
    """Synchronize the ranks, as a training step does."""
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))


def _fingerprint(tensor: torch.Tensor) -> int:
    """Return a checksum of what is in a tensor."""
    return crc32c(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)


def _bytes_read() -> tuple[float, float]:
    """Return the bytes that this process has read with system calls, and those that came from a device for it."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return float(lines["rchar"]), float(lines["read_bytes"])


def _read(path: Path) -> None:
    buffer = bytearray(4 << 20)
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
