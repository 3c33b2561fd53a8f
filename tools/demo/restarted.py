"""One run of train_lm.py that survives every fault of a plan in its own processes; what the libraries say about it.

    faults.jsonl      before each fault, by the rank that fails
    events.jsonl      after each restart, by `inprocess`
    ranks.jsonl       what each rank of train_lm.py logs; the restores in it are those that `ckpt` reports

Times of all three are of one clock.
"""

import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.demo.training import DemoError, Settings

__all__ = ["Recovery", "loss_segments", "read_recoveries", "restarted"]

Record = dict[str, Any]
_RANKS, _ACTIVE = 3, 2


@dataclass(frozen=True)
class Recovery:
    """One restart. `fault` is None if it was not one of the plan: a busy machine can look like one that hangs.

    `starts` are the ranks that had their state back afterwards, by rank; they and `first_step` may be missing when the
    next restart came at once.
    """

    fault: Record | None
    event: Record
    pending: list[int]  # steps whose save was scheduled, and not known to be finalized
    starts: list[Record]
    first_step: Record | None

    @property
    def noticed(self) -> float:
        """When the first rank that is left learned of it."""
        return float(self.event["time"] - self.event["seconds"]["total"])

    @property
    def decided(self) -> float:
        """When all saves in flight were published or given up, as rank 0 saw it."""
        after = ("health", "barrier")
        return float(self.event["time"] - sum(self.event["seconds"].get(name, 0.0) for name in after))

    @property
    def began(self) -> float:
        return float(self.fault["time"]) if self.fault else self.noticed

    @property
    def resumed(self) -> float | None:
        """When the last rank had its state back and began to train."""
        return max((float(start["time"]) for start in self.starts), default=None)

    @property
    def step(self) -> int | None:
        """The step that was restored, on all ranks; 0 for the initial state."""
        return int(self.starts[0]["step"]) if self.starts else None

    @property
    def saves(self) -> dict[int, str]:
        """What became of the saves that were in flight. All steps up to the one that is restored are published."""
        newest = -1 if self.step is None else self.step
        return {step: "published" if step <= newest else "given up" for step in self.pending}


def restarted(name: str, folder: Path, plan: list[str], steps: int, save_every: int, soft_timeout_s: float) -> Settings:
    """How to start the run: 3 processes, of which 2 train. `folder` gets the records."""
    deaths = sum(":kill" in fault for fault in plan)
    launcher = ["tools.demo.launch", "--ranks", str(_RANKS), "--may-die", str(deaths), "--"]
    launcher += [sys.executable, "-m", "tools.demo.faults", str(folder), *plan, "--"]
    extra = ["--restart", "--active", str(_ACTIVE), "--soft-timeout", str(soft_timeout_s)]
    extra += ["--monitor-log", str(folder.resolve() / "monitor_{rank}.log")]
    return Settings(name, folder / "checkpoints", steps, save_every, extra=tuple(extra), launcher=tuple(launcher))


def read_recoveries(folder: Path, plan: list[str]) -> list[Recovery]:
    """All restarts in order. DemoError unless each fault of the plan happened and was followed by its own restart."""
    faults, events, ranks = (_read(folder / f"{name}.jsonl") for name in ("faults", "events", "ranks"))
    if len(faults) != len(plan):
        raise DemoError(f"{len(faults)} faults of {len(plan)} happened: {faults}")
    recoveries = []
    began = [0.0, *(event["time"] for event in events), float("inf")]
    for number, event in enumerate(events, start=1):
        before = [r for r in ranks if began[number - 1] < r["time"] < began[number] and r["rank"] == 0]
        after = [r for r in ranks if began[number] < r["time"] < began[number + 1]]
        own = [fault for fault in faults if began[number - 1] < fault["time"] < event["time"]]
        recoveries.append(_recovery(own[-1] if own else None, event, before, after))
    caused = [recovery.fault for recovery in recoveries if recovery.fault]
    if caused != faults:
        raise DemoError(f"of the faults {faults} only {caused} were followed by a restart")
    return recoveries


def _recovery(fault: Record | None, event: Record, before: list[Record], after: list[Record]) -> Recovery:
    starts = sorted((record for record in after if record["event"] == "start"), key=lambda start: int(start["rank"]))
    steps = [record for record in after if record["event"] == "step"]
    saves, finalized = ([r["step"] for r in before if r["event"] == name] for name in ("save", "finalized"))
    pending = [step for step in saves if step not in finalized]
    first_step = min(steps, key=lambda step: float(step["time"]), default=None)
    return Recovery(fault, event, pending, starts, first_step)


def loss_segments(folder: Path) -> list[list[Record]]:
    """The steps of rank 0, cut where a restart went back."""
    records = [record for record in _read(folder / "ranks.jsonl") if record["rank"] == 0]
    cuts = [number for number, record in enumerate(records) if record["event"] == "start"]
    segments = [records[first:last] for first, last in pairwise([*cuts, len(records)])]
    return [[record for record in segment if record["event"] == "step"] for segment in segments]


def _read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
