"""Time from a fault to the first finished step with the state restored, beside a relaunch by torchrun.

    this process                        each rank of `recover_restarted`
    InProcess.recover(situation)  ──▶   prepare the situation, barrier, rank 1 raises
                                        abort hook, finalize hook, train again, first step
         notes of all ranks       ◀──   what happened when, in CLOCK_MONOTONIC: one clock for all processes

    relaunch()                          each rank of `recover_relaunched`, through one fault under torchrun
    of_four()                           each rank of `recover_killed` under ckpt_launcher, an exception and a kill -9

In every round the one job fails in each situation, and the relaunch, its peer, and the job of four ranks run once.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Any, Self

from tools.bench.harness import (
    Row,
    add_disk_option,
    add_size_options,
    at_least,
    print_report,
    rounds,
    temporary_folder,
    write_json,
)
from tools.bench.processes import free_port, killing_after, rank_environment

_RELAUNCH, _RAISED, _KILLED = "relaunch", "raised", "killed"
SITUATIONS = {
    "bare": "restart without checkpoints",
    "memory": "restart from memory",
    "drain": "restart, a save in flight drained",
    "abort": "restart, a save in flight given up",
    "warm": "restart from storage, page cache warm",
    "cold": "restart from storage, page cache cold",
}
_FROM_MEMORY = {
    _RAISED: True,
    _KILLED: True,
    "memory": True,
    "drain": True,
    "abort": True,
    "warm": False,
    "cold": False,
}
_RANKS, _MORE_RANKS = 2, 4
_LIMIT_S = 300.0
_TARGET_RELAUNCH, _TARGET_BARE_AND_COPY, _TARGET_COPY = 0.1, 1.5, 1.5
_TARGET_REJOIN_S = 0.2  # and a copy of what a rank restores; behind the start of a rank that was killed

# The moment at the end of each phase, and the phase.
_RESTART_PHASES = {"detected": "detect", "finalize": "unwind", "settled": "drain", "finalized": "restore"}
_RESTART_PHASES |= {"entered": "rejoin", "stepped": "first step"}
_RELAUNCH_PHASES = {"started": "end and start processes", "imported": "import", "joined": "join"}
_RELAUNCH_PHASES |= {"allocated": "allocate", "loaded": "load", "stepped": "first step"}
_RAISED_PHASES = {"entered": "rejoin", "restored": "restore", "stepped": "first step"}
_KILLED_PHASES = {"joining": "detect, start the replacement", **_RAISED_PHASES}

Notes = dict[str, Any]


@dataclass(frozen=True)
class Recovery:
    """Seconds from a fault to the first step, on the last rank to pass each point; `phases` add up to `total`.

    `restore` is what the slowest rank spent on it alone, `memcpy` a copy of the same bytes if that was measured.
    `from_memory` is None where nothing was restored.
    """

    total: float
    phases: dict[str, float]
    restore: float
    memcpy: float | None
    from_memory: bool | None


Round = dict[str, list[Recovery]]


# -- jobs that fail ----------------------------------------------------------------------------------------------------


class InProcess:
    """A job of `recover_restarted`. Leaving the context ends it, by force if it does not answer."""

    def __init__(self, gigabytes: float, folder: Path) -> None:
        command = [sys.executable, "-m", "tools.bench.recover_restarted", "--gb", str(gigabytes)]
        port = free_port()
        self._errors = folder.with_suffix(".log").open("w+")
        self._ranks = [
            subprocess.Popen(
                [*command, "--folder", str(folder)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **rank_environment(rank, _RANKS, port)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            for rank in range(_RANKS)
        ]

    def __enter__(self) -> Self:
        self._answers()  # of the first step of all
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with killing_after(_LIMIT_S if kind is None else 0.0, self._ranks), ExitStack() as closing:
            closing.callback(self._errors.close)
            for rank in self._ranks:
                closing.enter_context(rank)  # closes its pipes, and waits for it
            if kind is None:
                self._tell("end")

    def recover(self, situation: str) -> Recovery:
        """Have rank 1 fail, and return how the job came back."""
        self._tell(situation)
        notes = self._answers()
        restores = [float(note.get("restore_s", 0.0)) for note in notes]
        for note, restore in zip(notes, restores, strict=True):
            note["settled"] = note["finalized"] - restore
        copies = [float(note["memcpy_s"]) for note in notes if "memcpy_s" in note]
        sources = [note["from_memory"] for note in notes if "from_memory" in note]
        total, phases = _phases(_fault_of(notes), notes, _RESTART_PHASES)
        return Recovery(total, phases, max(restores), max(copies, default=None), all(sources) if sources else None)

    def _tell(self, what: str) -> None:
        for rank in self._ranks:
            print(what, file=_open(rank.stdin), flush=True)

    def _answers(self) -> list[Notes]:
        with killing_after(_LIMIT_S, self._ranks):
            lines = [_open(rank.stdout).readline() for rank in self._ranks]
        if not all(lines):
            self._errors.seek(0)
            raise RuntimeError(f"a rank ended, or was silent for {_LIMIT_S:g} s:\n{self._errors.read()[-4000:]}")
        return [json.loads(line) for line in lines]


def relaunch(gigabytes: float, folder: Path) -> Recovery:
    """Run a job of `recover_relaunched` under torchrun, through one fault. The first one saves in `folder`."""
    notes_file = folder / "notes.jsonl"
    notes_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS)]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "tools.bench.recover_relaunched"]
    command += ["--gb", str(gigabytes), "--folder", str(folder), "--notes", str(notes_file)]
    command += [] if (folder / "shapes.json").exists() else ["--save"]
    # In the store that torchrun shares with its ranks, ranks that were started again may find addresses of dead ones.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-4000:]}")
    notes: list[Notes] = [json.loads(line) for line in notes_file.read_text().splitlines()]
    again = [note for note in notes if note["attempt"] == 1]
    total, phases = _phases(_fault_of(notes), again, _RELAUNCH_PHASES)
    return Recovery(total, phases, phases["load"], None, None)


def of_four(gigabytes: float, folder: Path) -> dict[str, Recovery]:
    """Run a job under ckpt_launcher: one of its ranks raises an exception, is later killed, and replaced."""
    folder.mkdir()
    notes_file = folder / "notes.jsonl"
    command = [sys.executable, "-m", "inprocess.fault_tolerance.launcher", "--standalone"]
    command += [
        "--nproc-per-node",
        str(_MORE_RANKS),
        "--ft-restart-policy",
        "in-process",
        "-m",
        "tools.bench.recover_killed",
    ]
    command += ["--gb", str(gigabytes), "--folder", str(folder), "--notes", str(notes_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"ckpt_launcher ended with {done.returncode}:\n{done.stderr[-4000:]}")
    shutil.rmtree(folder / "root", ignore_errors=True)
    notes: list[Notes] = [json.loads(line) for line in notes_file.read_text().splitlines()]
    return {
        name: _of_four([note for note in notes if note["kind"] == name], phases)
        for name, phases in ((_RAISED, _RAISED_PHASES), (_KILLED, _KILLED_PHASES))
    }


def _of_four(notes: list[Notes], names: dict[str, str]) -> Recovery:
    again = [note for note in notes if "stepped" in note]
    joining = max(float(note.get("joining", 0.0)) for note in again)  # of the ranks that were waiting for one
    total, phases = _phases(_fault_of(notes), [{**note, "joining": joining} for note in again], names)
    restore, copy = (max(float(note[name]) for note in again) for name in ("restore_s", "memcpy_s"))
    return Recovery(total, phases, restore, copy, all("memory" in note["tier"] for note in again))


def _fault_of(notes: list[Notes]) -> float:
    return max(float(note.get("fault", 0.0)) for note in notes)


def _phases(fault: float, notes: list[Notes], names: dict[str, str]) -> tuple[float, dict[str, float]]:
    """Return all seconds since the fault, and those of each phase; a phase ends when the last rank has noted so."""
    points = [fault, *(max(float(note[moment]) for note in notes) for moment in names)]
    lengths = [later - earlier for earlier, later in pairwise(points)]
    return points[-1] - fault, dict(zip(names.values(), lengths, strict=True))


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


# -- rounds and report -------------------------------------------------------------------------------------------------


def _measure(gigabytes: float, count: int, repeats: int, disk: Path) -> list[Round]:
    """Measure `count` rounds after one that does not count: every situation `repeats` times, and one relaunch."""
    results: list[Round] = []
    with temporary_folder(disk) as folder:
        own, peer = folder / "own", folder / "peer"
        peer.mkdir()
        with InProcess(gigabytes, own) as job:
            for number, counts in enumerate(rounds(count)):
                names = list(SITUATIONS if number % 2 else reversed(SITUATIONS))
                taken: Round = {name: [] for name in SITUATIONS}
                for name in names * (repeats if counts else 1):
                    taken[name].append(job.recover(name))
                taken[_RELAUNCH] = [relaunch(gigabytes, peer)]
                taken |= {name: [each] for name, each in of_four(gigabytes, folder / f"four{number}").items()}
                results += [taken] if counts else []
    return results


def _rows(results: list[Round]) -> list[Row]:
    """Compare every recovery with the median of the limit in its round."""

    def of(name: str, phase: str = "") -> list[float]:
        return [recovery.phases[phase] if phase else recovery.total for taken in results for recovery in taken[name]]

    def limits(of_round: Sequence[float]) -> list[float]:
        """As many of each round as there are recoveries."""
        return [limit for limit, taken in zip(of_round, results, strict=True) for _ in taken["memory"]]

    def medians(name: str) -> list[float]:
        return [median(recovery.total for recovery in taken[name]) for taken in results]

    copies = [[recovery.memcpy or 0.0 for recovery in taken["memory"]] for taken in results]
    copy = [median(of_round) for of_round in copies]
    relaunches = limits(medians(_RELAUNCH))
    bare_and_copy = limits([a + b for a, b in zip(medians("bare"), copy, strict=True)])
    restores = [recovery.restore for taken in results for recovery in taken["memory"]]
    rows = [Row("limit: memcpy of what a rank restores, all ranks", [seconds for each in copies for seconds in each])]
    for name, title in SITUATIONS.items():
        rows.append(Row(title, of(name), relaunches, _TARGET_RELAUNCH))
        rows += [Row(f"  {phase}", of(name, phase)) for phase in _RESTART_PHASES.values()]
        if name == "memory":
            rows.append(Row("  to bare restart + memcpy", of(name), bare_and_copy, _TARGET_BARE_AND_COPY))
            rows.append(Row("  restore by itself, to memcpy", restores, limits(copy), _TARGET_COPY))
    rows.append(Row("relaunch: torchrun, dcp.load, cache warm", of(_RELAUNCH)))
    rows += [Row(f"  {phase}", of(_RELAUNCH, phase)) for phase in _RELAUNCH_PHASES.values()]
    for name, what in ((_RAISED, "exception on"), (_KILLED, "kill -9 of")):
        title = f"{what} one of {_MORE_RANKS} ranks, ckpt_launcher, snapshot"
        rows += _rows_of_four(title, [recovery for taken in results for recovery in taken[name]])
    return rows


def _rows_of_four(title: str, recoveries: list[Recovery]) -> list[Row]:
    """Compare what comes behind the start of a replacement, if there is one, with a copy of what a rank restores."""
    rows = [Row(title, [each.total for each in recoveries])]
    rows += [Row(f"  {phase}", [each.phases[phase] for each in recoveries]) for phase in recoveries[0].phases]
    copies = [each.memcpy or 0.0 for each in recoveries]
    behind = [sum(each.phases[phase] for phase in _RAISED_PHASES.values()) for each in recoveries]
    limits = [_TARGET_REJOIN_S + copy for copy in copies]
    return [
        *rows,
        Row("  limit: memcpy of what a rank restores, all ranks", copies),
        Row("  with all processes there, to 0.2 s + memcpy", behind, limits, 1.0),
        Row("  restore by itself, to memcpy", [each.restore for each in recoveries], copies),
    ]


def _remarks(results: list[Round]) -> list[str]:
    """Return a line for each situation in which the state came from elsewhere than its name says."""
    wrong = []
    for name, wanted in _FROM_MEMORY.items():
        found = [recovery.from_memory for taken in results for recovery in taken[name]]
        if others := sum(source is not wanted for source in found):
            wrong.append(f"{others} of {len(found)} of '{name}' {'read storage' if wanted else 'used memory'}")
    return wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add_size_options(parser, rounds=7)
    parser.add_argument("--repeats", type=at_least(1), default=3, help="faults of each kind in a round (default: 3)")
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure in rounds, and print a table."""
    results = _measure(options.gb, options.rounds, options.repeats, options.folder)
    rows = _rows(results)
    title = (
        f"{options.gb:g} GB, the same on {_RANKS} ranks, {len(results)} rounds; from the fault to the first finished "
        "step; ratio: median (min-max), to the limit in the same round"
    )
    print_report(title, rows)
    for remark in _remarks(results):
        print(f"note: {remark}")
    found = [{name: [asdict(each) for each in taken[name]] for name in taken} for taken in results]
    write_json(options.json, {"rows": rows, "rounds": found})
