"""One run of examples/train_lm.py, observed from outside: its log, its checkpoints, its processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from ckpt.storage.roots import open_root

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
_MARKER = "DEMO_RUN_ID"
_POLL_S = 0.005
_LOOK_S = 0.25


class DemoError(Exception):
    """A result of the demo is not as expected; the message says which."""


@dataclass(frozen=True)
class Settings:
    """Options of a run."""

    name: str
    root: str  # a folder or a URL
    steps: int
    save_every: int
    world_size: int = 2
    batch: int = 2
    extra: tuple[str, ...] = ()  # for train_lm.py
    launcher: tuple[str, ...] = ()  # what starts the ranks; default: torchrun

    def command(self, log: Path) -> list[str]:
        """Return the command line of a run that writes its records to `log`."""
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(self.world_size), str(SCRIPT))
        options = {"root": self.root, "steps": self.steps, "save-every": self.save_every, "batch": self.batch}
        given = [word for name, value in {**options, "log-file": log}.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", *(self.launcher or torchrun), *given, *self.extra]


class TrainingRun:
    """A launcher and the trainers and writers under it. Leaving the context kills what is left of them."""

    def __init__(self, settings: Settings, out: Path) -> None:
        self.settings = settings
        self.records: list[dict[str, Any]] = []
        self.published_at: dict[int, float] = {}  # step -> time.time() when its directory was first seen
        self._log = out / f"{settings.name}.jsonl"
        self._output = out / f"{settings.name}.txt"
        self._id = uuid.uuid4().hex
        self._read = 0
        self._root = open_root(settings.root)
        self._look_at = 0.0
        with self._output.open("wb") as output:
            self._launcher = subprocess.Popen(
                settings.command(self._log),
                env={**os.environ, "OMP_NUM_THREADS": "1", _MARKER: self._id},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._launcher.kill()
        self._launcher.wait()

    def follow(self, deadline: float, on_record: Callable[[dict[str, Any]], bool]) -> int | None:
        """Call `on_record` with each new record until it returns True; return the exit code if the run ends first."""
        while True:
            code = self._launcher.poll()
            self._see_published()
            for record in self._new_records():
                self.records.append(record)
                if on_record(record):
                    return None
            if code is not None:
                return code
            if time.monotonic() > deadline:
                raise DemoError(f"{self.settings.name}: takes too long\n{self.output()}")
            time.sleep(_POLL_S)

    def is_published(self, step: int) -> bool:
        """Return whether the checkpoint of the step exists."""
        return step in self.published_steps()

    def published_steps(self) -> list[int]:
        """Return the steps of all checkpoints, in order."""
        return self._root.steps()

    def trainers(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in order."""
        return sorted(psutil.Process(self._launcher.pid).children(), key=lambda each: int(each.environ()["RANK"]))

    def kill_trainers(self) -> int:
        """Send SIGKILL to every trainer, and to no other process; return how many there were."""
        trainers = self.trainers()
        for trainer in trainers:
            trainer.send_signal(signal.SIGKILL)
        return len(trainers)

    def processes(self) -> list[psutil.Process]:
        """Return every living process of this run, orphans included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARKER) == self._id:
                    found.append(process)
        return found

    def wait_for_silence(self, timeout: float) -> float:
        """Wait until no process of this run is left; return the seconds."""
        began = time.monotonic()
        while left := self.processes():
            if time.monotonic() - began > timeout:
                raise DemoError(f"{self.settings.name}: processes {[p.pid for p in left]} still run after {timeout} s")
            time.sleep(10 * _POLL_S)
        return time.monotonic() - began

    def output(self) -> str:
        """Return what launcher and trainers have printed; long output is cut in the middle."""
        lines = self._output.read_text(errors="replace").splitlines()
        return "\n".join(lines if len(lines) <= 120 else [*lines[:60], "...", *lines[-60:]])

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the records of this event."""
        return [record for record in self.records if record["event"] == event]

    def _new_records(self) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        with self._log.open("rb") as log:
            log.seek(self._read)
            lines = log.read()
        whole = lines[: lines.rfind(b"\n") + 1]  # a line that is still being written comes next time
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _see_published(self) -> None:
        if "://" in self.settings.root and time.monotonic() < self._look_at:
            return  # each look is a request
        self._look_at = time.monotonic() + _LOOK_S
        for step in self.published_steps():
            self.published_at.setdefault(step, time.time())
