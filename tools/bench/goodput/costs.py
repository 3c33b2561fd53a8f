"""What saves and restarts cost on this machine: taken from the documents of other kinds of measurement.

A cost that depends on the state's size is a ratio to a copy of the same bytes, so that it can be scaled to machines
that copy faster. What does not depend on it is in seconds.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

Document = Mapping[str, Any]


@dataclass(frozen=True)
class CopyCost:
    """Seconds that training waits for a staged copy: `fixed_s`, and `ratio` times a copy of the same bytes."""

    fixed_s: float
    ratio: float

    def seconds(self, copy_s: float) -> float:
        return self.fixed_s + self.ratio * copy_s


@dataclass(frozen=True)
class Costs:
    """Medians of what was measured.

    `save` and `snapshot` stall training; `beside` is what a save takes from the steps after it, in copies. `durable`
    is the time from the stall until the step is published, to a write of the same bytes. `exception_s` and `kill_s`
    last until the wrapped function runs again on a few ranks, `noticed_s` is the part of `kill_s` until the death is
    noticed, and `server_rank_s` is the time of the processor that each rank takes in the coordination server, which
    has one thread. `restore` from memory is in copies. `start_s`: a process that is started anew, with its imports.
    """

    save: CopyCost
    snapshot: CopyCost
    beside: float
    durable: float
    exception_s: float
    kill_s: float
    noticed_s: float
    server_rank_s: float
    restore: float
    start_s: float


def costs_from(document: Document) -> Costs:
    """Return the costs in a document that this kind of measurement has written.

    KeyError or TypeError: the document is of another kind, or of another version.
    """
    values = dict(document["costs"])
    for name in ("save", "snapshot"):
        values[name] = CopyCost(**values[name])
    return Costs(**values)


# -- from documents ----------------------------------------------------------------------------------------------------

_RANKS = 512  # of the simulated job of the coordination server
_SMALL_GB = 0.004  # so little that a save takes its fixed time


def _measurements(gigabytes: float, rounds: int) -> dict[str, list[str]]:
    """Return the commands: the name of a document, the kind of measurement and its options."""
    disk = ["--folder", "{disk}"]
    return {
        "save": ["save", "--gb", str(gigabytes), "--rounds", str(rounds), *disk],
        "save_small": ["save", "--gb", str(_SMALL_GB), "--rounds", str(rounds), *disk],
        "snapshot": ["snapshot", "--gb", str(gigabytes), "--rounds", str(rounds), *disk],
        "snapshot_small": ["snapshot", "--gb", str(_SMALL_GB), "--rounds", str(rounds), *disk],
        "restart": ["restart", "--restarts", str(4 * rounds), "--faults", "exception", "kill -9", "--idle", "0"],
        "recover": ["recover", "--gb", str(gigabytes), "--rounds", "1", "--repeats", str(rounds), *disk],
        "coordination": ["coordination", "--ranks", str(_RANKS), "--restarts", str(rounds), "--idle", "0"],
    }


def measure(gigabytes: float, rounds: int, documents: Path, disk: Path) -> Costs:
    """Run the measurements whose documents are not yet in the folder `documents`, one after the other."""
    found: dict[str, Document] = {}
    for name, words in _measurements(gigabytes, rounds).items():
        path = documents / f"{name}.json"
        if not path.exists():
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            command = [word.format(disk=disk) for word in words]
            subprocess.run(
                [sys.executable, "-m", "tools.bench", *command, "--json", str(path)], check=True, stdout=sys.stderr
            )
        found[name] = json.loads(path.read_text())
    return costs_of(found)


def costs_of(documents: Mapping[str, Document]) -> Costs:
    """Return the medians of the rounds of the documents."""
    large, small = ([_stalled(each) for each in documents[name]["rounds"]] for name in ("save", "save_small"))
    snapshots, small_snapshots = (documents[name]["world_size_1"] for name in ("snapshot", "snapshot_small"))
    restarts = documents["restart"]["restarts"]
    recoveries = [recovery for taken in documents["recover"]["rounds"] for recovery in taken["memory"]]
    relaunches = [recovery["phases"] for taken in documents["recover"]["rounds"] for recovery in taken["relaunch"]]
    (coordination,) = documents["coordination"]["results"]
    return Costs(
        save=_copy_cost(large, small),
        snapshot=_copy_cost(snapshots, small_snapshots),
        beside=max(0.0, median((each["added"] - each["stall"]) / each["copy"] for each in large)),
        durable=median((each["durable"] - each["stall"]) / each["disk"] for each in large),
        exception_s=median(each["running"] for each in restarts["exception"]),
        kill_s=median(each["running"] for each in restarts["kill -9"]),
        noticed_s=median(each["detected"] for each in restarts["kill -9"]),
        server_rank_s=median(each["cpu_s"] for each in coordination["one"]) / coordination["ranks"],
        restore=median(each["restore"] / each["memcpy"] for each in recoveries),
        start_s=median(each["end and start processes"] + each["import"] for each in relaunches),
    )


def _stalled(saved: Document) -> Document:
    """Return a round of saves with what was measured in the steady state."""
    return {**saved, **saved["steady"]}


def _copy_cost(large: list[Document], small: list[Document]) -> CopyCost:
    """Return the cost that is linear in the bytes: a state of few bytes gives what is fixed, a large one the rest."""
    fixed_s = median(each["stall"] for each in small)
    ratio = median((each["stall"] - fixed_s) / each["copy"] for each in large)
    return CopyCost(fixed_s, max(0.0, ratio))
