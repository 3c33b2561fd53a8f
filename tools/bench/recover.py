"""From a fault to the first finished step, next to a relaunch with torchrun and torch.distributed.checkpoint.

python -m tools.bench.recover [--gb 1] [--rounds 7] [--repeats 3] [--folder DIR] [--json FILE]

Slow figures never make it fail.
"""

import argparse
import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench.recoveries import InProcess, Recovery, relaunch
from tools.bench.recovering import SCENARIOS
from tools.bench.report import Row, environment

__all__ = ["main"]

_TITLES = {
    "bare": "restart without checkpoints",
    "memory": "restart from memory",
    "drain": "restart, a save in flight drained",
    "abort": "restart, a save in flight given up",
    "warm": "restart from storage, page cache warm",
    "cold": "restart from storage, page cache cold",
    "relaunch": "relaunch: torchrun, dcp.load, cache warm",
}
_OF_RELAUNCH, _OF_LATENCY_AND_COPY, _OF_COPY = 0.1, 1.5, 1.5

Round = dict[str, list[Recovery]]


def run(gigabytes: float, rounds: int, repeats: int, folder: Path) -> list[Round]:
    """`rounds` rounds after one that does not count. Each has every scenario `repeats` times and one relaunch."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as temporary:
        own, peer = Path(temporary).resolve() / "own", Path(temporary).resolve() / "peer"
        peer.mkdir()
        results: list[Round] = []
        with InProcess(gigabytes, own) as job:
            for number in range(rounds + 1):
                print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
                taken: Round = {name: [] for name in SCENARIOS}
                for _ in range(repeats if number else 1):
                    for name in SCENARIOS if number % 2 else reversed(SCENARIOS):
                        taken[name].append(job.recover(name))
                taken["relaunch"] = [relaunch(gigabytes, peer)]
                results.append(taken)
        print(file=sys.stderr)
    return results[1:]


def rows(results: list[Round]) -> list[Row]:
    """Every recovery is compared with the median of the limit in its round."""

    def of(name: str, key: str = "") -> list[float]:
        return [recovery.phases[key] if key else recovery.total for taken in results for recovery in taken[name]]

    def limit(*names: str) -> list[float]:
        """For as many recoveries of each round as were repeated."""
        limits = []
        for taken in results:
            parts = {name: median(recovery.total for recovery in taken[name]) for name in names if name != "memcpy"}
            copies = [recovery.memcpy for recovery in taken["memory"] if recovery.memcpy is not None]
            parts |= {"memcpy": median(copies)} if "memcpy" in names else {}
            limits += [sum(parts.values())] * len(taken["memory"])
        return limits

    copies = [recovery.memcpy or 0.0 for taken in results for recovery in taken["memory"]]
    restores = [recovery.restore for taken in results for recovery in taken["memory"]]
    found = [Row("limit: memcpy of what a rank restores, all ranks", copies)]
    for name, title in _TITLES.items():
        own = name != "relaunch"
        found.append(Row(title, of(name), limit("relaunch") if own else None, _OF_RELAUNCH if own else None))
        found += [Row(f"  {phase}", of(name, phase)) for phase in results[0][name][0].phases]
        if name == "memory":
            found.append(Row("  to bare restart + memcpy", of(name), limit("bare", "memcpy"), _OF_LATENCY_AND_COPY))
            found.append(Row("  restore by itself, to memcpy", restores, limit("memcpy"), _OF_COPY))
    return found


def print_table(title: str, found: list[Row]) -> None:
    print(title)
    print(f"{'':<50}{'median':>9}{'p95':>9}{'min':>9}{'max':>9}   ratio, target")
    for row in found:
        ordered = sorted(row.values)
        figures = (median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1], ordered[0], ordered[-1])
        cells = row.cells()
        print(f"{row.title:<50}" + "".join(f"{1e3 * s:>6.0f} ms" for s in figures) + "   " + "  ".join(cells[4:]))


def remarks(results: list[Round]) -> list[str]:
    """Where a scenario was not what it says it is."""
    wrong = []
    for name, wanted in {"memory": True, "drain": True, "abort": True, "warm": False, "cold": False}.items():
        found = [recovery.from_memory for taken in results for recovery in taken[name]]
        if others := sum(source is not wanted for source in found):
            wrong.append(f"{others} of {len(found)} of '{name}' {'read storage' if wanted else 'used memory'}")
    return wrong


def as_document(results: list[Round]) -> dict[str, Any]:
    rounds = [{name: [asdict(recovery) for recovery in taken[name]] for name in taken} for taken in results]
    return {"environment": environment(), "rows": [row.document() for row in rows(results)], "rounds": rounds}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.recover", description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state in 1e9 bytes (default: 1)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--repeats", type=int, default=3, help="faults of each kind in a round (default: 3)")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured (default: here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every value of every round to FILE")
    options = parser.parse_args(arguments)
    if options.gb <= 0 or options.rounds < 1 or options.repeats < 1:
        parser.error("--gb must be more than 0, --rounds and --repeats at least 1")
    results = run(options.gb, options.rounds, options.repeats, options.folder)
    title = (
        f"{options.gb:g} GB, the same on 2 ranks, {len(results)} rounds; from the fault to the first finished step; "
        "ratio: median (min-max), to the limit in the same round"
    )
    print_table(title, rows(results))
    for remark in remarks(results):
        print(f"note: {remark}")
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    if options.json is not None:
        options.json.write_text(json.dumps(as_document(results), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
