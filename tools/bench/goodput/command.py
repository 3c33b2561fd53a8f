"""Options of the simulated fleet: what to simulate, and where the measured costs come from."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.bench.goodput.assumptions import BASE, SCENARIOS, SLOW_STORAGE, Assumptions, Job, rates
from tools.bench.goodput.costs import Costs, costs_from, measure
from tools.bench.goodput.report import Cell, details_title, markdown, plot
from tools.bench.goodput.simulation import simulate, with_best_intervals
from tools.bench.goodput.systems import systems
from tools.bench.harness import (
    add_disk_option,
    add_size_options,
    at_least,
    positive,
    publish,
    temporary_folder,
    write_json,
)

BEGIN = "<!-- begin: goodput, written by python -m tools.bench -->"
END = "<!-- end: goodput, written by python -m tools.bench -->"

_GPUS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
_DETAIL_GPUS = 16384
_BILLIONS = (8.0, 70.0, 400.0)
_LEAST = 100  # recoveries, for a standard error
_LEAST_GPUS = 16  # two nodes: the replicas of one are on the other


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    parser.add_argument(
        "--gpus", type=at_least(_LEAST_GPUS), nargs="+", default=_GPUS, help="of the jobs (default: 1024 ... 65536)"
    )
    parser.add_argument(
        "--parameters", type=positive, nargs="+", default=_BILLIONS, metavar="B", help="in 1e9 (default: 8 70 400)"
    )
    parser.add_argument(
        "--recoveries", type=at_least(_LEAST), default=4000, metavar="N", help="of each job (default: 4000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="measure nothing: the costs of an earlier --json")
    parser.add_argument(
        "--documents", type=Path, metavar="DIR", help="keep what other kinds measure here, and do not measure it again"
    )
    add_size_options(parser, rounds=3)
    add_disk_option(parser)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="picture (needs matplotlib)")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="put what decides between the markers of this page, and all tables as CSV beside it",
    )


def run(given: argparse.Namespace) -> None:
    """Get the costs, simulate all jobs, print the tables, and draw the picture if asked to."""
    costs = _costs(given)
    numbers, sizes = sorted(set(given.gpus)), sorted({1e9 * billions for billions in given.parameters})
    detail_gpus = _DETAIL_GPUS if _DETAIL_GPUS in numbers else max(numbers)
    detail = Job(detail_gpus, max(sizes))
    swept = {BASE: sizes, SLOW_STORAGE: [max(sizes)]}
    cells = []
    for name, assumed in SCENARIOS.items():
        jobs = [Job(gpus, parameters) for parameters in swept.get(name, []) for gpus in numbers]
        for job in jobs or [detail]:
            cells += _simulated(name, job, costs, assumed, given.recoveries, given.seed)
    print(file=sys.stderr)
    assumed = SCENARIOS[BASE]
    text = markdown(cells, costs, assumed, detail, given.seed)
    print(text)
    values = {"seed": given.seed, "costs": asdict(costs), "assumptions": asdict(assumed)}
    write_json(given.json, {**values, "jobs": [_document(cell) for cell in cells]})
    if given.plots is not None:
        plot(cells, detail, given.plots / "goodput.png")
    if given.table is not None:
        publish(given.table, text, BEGIN, END, "goodput", {details_title(detail, BASE)})


def _costs(given: argparse.Namespace) -> Costs:
    if given.costs is not None:
        try:
            return costs_from(json.loads(given.costs.read_text()))
        except (KeyError, TypeError) as error:
            sys.exit(f"{given.costs} has no costs: it must be what an earlier run has written with --json ({error!r})")
    with temporary_folder(given.folder) as disk:
        documents = given.documents or disk
        documents.mkdir(parents=True, exist_ok=True)
        return measure(given.gb, given.rounds, documents, disk)


def _simulated(name: str, job: Job, costs: Costs, assumed: Assumptions, recoveries: int, seed: int) -> list[Cell]:
    """Simulate the job with each system at its best intervals."""
    print(f"\r{name}: {job.gpus} GPUs, {job.parameters / 1e9:g}B      ", end="", file=sys.stderr, flush=True)
    per_second, cells = rates(job, assumed), []
    for system in systems(job, costs, assumed):
        best = with_best_intervals(system, per_second)
        cells.append(Cell(name, job, best, simulate(best, per_second, recoveries, seed)))
    return cells


def _document(cell: Cell) -> dict[str, Any]:
    intervals = {tier.name: tier.interval for tier in cell.system.tiers}
    named = {"scenario": cell.scenario, "system": cell.system.name, **asdict(cell.job), "intervals": intervals}
    return {**named, "goodput": cell.outcome.goodput, **asdict(cell.outcome)}
