"""One rank of examples/train_lm.py, with planned faults.

    python -m tools.demo.faults FOLDER STEP:KIND[:SAVE] ... -- ARGUMENTS OF train_lm.py

Each fault happens once, on the rank with number 1 at that time, right after it has finished the step. With SAVE
"staged" all ranks have staged the save of that step, and their writers have just begun it; with "half" rank 0 has, and
this rank never will. Barriers ensure this, not pauses. In FOLDER, the rank appends to faults.jsonl what is about to
happen, and to ranks.jsonl what train_lm.py logs.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from examples import train_lm

VICTIM = 1


class InjectedError(Exception):
    """The exception of a fault."""


@dataclass(frozen=True)
class Fault:
    """A planned fault. `kind` is "exception", "hang" or "kill"; `save` is "", "staged" or "half", see the module."""

    step: int
    kind: str
    save: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, (str(self.step), self.kind, self.save)))

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Parse STEP:KIND[:SAVE]."""
        step, kind, *save = text.split(":")
        return cls(int(step), kind, *save)


class FaultInjector:
    """Observer of the training of this rank, called with each record that it logs."""

    def __init__(self, folder: Path, plan: list[Fault]) -> None:
        self._faults_file, self._ranks_file = folder / "faults.jsonl", folder / "ranks.jsonl"
        self._plan = plan
        self._process = int(os.environ["RANK"])

    def __call__(self, record: dict[str, Any]) -> None:
        _append(self._ranks_file, {"process": self._process, "rank": dist.get_rank(), **record})
        for number, fault in enumerate(self._plan):
            if fault.step == record["step"] and not self._happened(number):
                self._at(number, fault, record["event"])

    def _at(self, number: int, fault: Fault, event: str) -> None:
        is_victim = dist.get_rank() == VICTIM
        if fault.save == "half":
            if event != ("step" if is_victim else "save"):
                return
            dist.barrier()  # rank 0 has scheduled its save by now
        elif fault.save == "staged":
            if event != "save":
                return
            dist.barrier()
        elif event != "step":
            return
        if is_victim:
            _append(self._faults_file, {"number": number, **asdict(fault), "time": time.time()})
            _fail(fault)

    def _happened(self, number: int) -> bool:
        """Return whether the fault has happened: the same on all ranks until the barrier, or until the victim fails."""
        if not self._faults_file.exists():
            return False
        return any(json.loads(line)["number"] == number for line in self._faults_file.read_text().splitlines())


def _fail(fault: Fault) -> None:
    if fault.kind == "hang":
        threading.Event().wait()
    elif fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise InjectedError(f"injected after step {fault.step}")


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def main() -> None:
    end = sys.argv.index("--")
    folder, *plan = sys.argv[1:end]
    sys.argv[1:] = sys.argv[end + 1 :]
    logging.basicConfig(
        filename=Path(folder) / f"rank_{os.environ['RANK']}.log",
        level=logging.INFO,
        format="%(created).3f %(levelname)s %(name)s %(message)s",
    )
    train_lm.main(FaultInjector(Path(folder), [Fault.parse(text) for text in plan]))


if __name__ == "__main__":
    main()
