"""How long a restart takes after a fault, next to making a process group again; and what idling costs.

python -m tools.bench.restart [--ranks 4] [--restarts 50] [--kinds ...] [--soft-timeout 2] [--idle 20] [--json FILE]

Slow figures never make it fail.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools.bench.report import Row, environment, print_table
from tools.bench.restarting import KINDS, Idle, Restart, measure_idle, measure_restarts

__all__ = ["main"]

_RESTART_S, _DETECTION_S, _HANG_S = 0.3, 0.2, 0.2
_FLOORS = 4.0
_IDLE = 0.01

# Phases as they are called in events.jsonl: each lasts until the next one begins.
_PHASES = {
    "outcome": "last call",
    "last_call": "abort hook",
    "aborted": "main thread back in bytecode, throw",
    "thrown": "unwinding",
    "acknowledged": "monitor thread ends",
    "finalize": "finalize",
    "health": "health check",
    "barrier": "iteration barrier",
    "assignment": "assignment",
    "begin": "garbage, beginning of the next iteration",
}


def run(ranks: int, restarts: int, kinds: list[str], soft_timeout_s: float) -> dict[str, list[Restart]]:
    """The restarts of each kind."""
    found = {}
    for kind in kinds:
        print(f"\r{kind}: {restarts} restarts of {ranks} ranks ...    ", end="", file=sys.stderr, flush=True)
        found[kind] = measure_restarts(kind, ranks, restarts, soft_timeout_s)
        for reason in {reason for restart in found[kind] for reason in restart.unplanned}:
            print(f"\nnot planned: {reason}", file=sys.stderr)
    print(file=sys.stderr)
    return found


def rows(results: dict[str, list[Restart]], idle: Idle | None, soft_timeout_s: float) -> list[Row]:
    found = []
    for kind, restarts in results.items():
        found += _rows_of(kind, restarts, soft_timeout_s)
    if idle is not None:
        found += [Row(f"idle: {name}", [share], [_IDLE], 1.0, _percent) for name, share in idle.shares.items()]
    return found


def _rows_of(kind: str, restarts: list[Restart], soft_timeout_s: float) -> list[Row]:
    running = [restart.running for restart in restarts]
    floor = [restart.floor for restart in restarts]
    allowed = soft_timeout_s + _HANG_S if kind == "hang" else _RESTART_S
    found = [
        Row(f"{kind}: running again on all ranks", running, floor, _FLOORS if kind == "exception" else None),
        Row(f"  to {allowed:g} s", running, [allowed] * len(running), 1.0 if kind in ("exception", "hang") else None),
        Row("  95 of 100 take at most", [percentile(running, 0.95)]),
        Row("  limit: destroy and make the group, barrier", floor),
        Row("  and until the new group works", [restart.ready for restart in restarts], floor),
        Row("  detected", [r.detected for r in restarts], *_detection(kind, len(restarts))),
    ]
    unplanned = sum(bool(restart.unplanned) for restart in restarts)
    if unplanned:
        found.append(
            Row("  restarts followed by an unplanned one", [float(unplanned)], show=lambda count: f"{count:.0f}")
        )
    names = dict.fromkeys(name for restart in restarts for name in restart.phases)
    for name in names:
        values = [restart.phases.get(name, 0.0) for restart in restarts]
        found.append(Row(f"  - {_PHASES.get(name, name)}", values, show=_fine))
    return found


def _detection(kind: str, count: int) -> tuple[list[float] | None, float | None]:
    return ([_DETECTION_S] * count, 1.0) if kind == "kill -9" else (None, None)


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values which so many of them do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def as_document(results: dict[str, list[Restart]], idle: Idle | None, soft_timeout_s: float) -> dict[str, Any]:
    return {
        "environment": environment(),
        "rows": [row.document() for row in rows(results, idle, soft_timeout_s)],
        "restarts": {kind: [asdict(restart) for restart in restarts] for kind, restarts in results.items()},
        "idle": None if idle is None else asdict(idle),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.restart", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="at the start of each job (default: 4)")
    parser.add_argument("--restarts", type=int, default=50, help="of each kind (default: 50)")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--soft-timeout", type=float, default=2.0, metavar="S", help="of the hangs (default: 2)")
    parser.add_argument("--idle", type=float, default=20.0, metavar="S", help="how long to idle; 0: not at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every value to FILE")
    options = parser.parse_args(arguments)
    if options.ranks < 2 or options.restarts < 1 or options.soft_timeout <= 1:
        parser.error("--ranks must be at least 2, --restarts at least 1 and --soft-timeout more than 1")
    torch.set_num_threads(1)  # of this process and those forked from it
    results = run(options.ranks, options.restarts, options.kinds, options.soft_timeout)
    idle = measure_idle(options.idle) if options.idle > 0 else None
    title = f"{options.ranks} ranks, gloo, {options.restarts} restarts of each kind; ratio: median of the restarts"
    print_table(title, rows(results, idle, options.soft_timeout))
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    if options.json is not None:
        document = as_document(results, idle, options.soft_timeout)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _fine(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


if __name__ == "__main__":
    sys.exit(main())
