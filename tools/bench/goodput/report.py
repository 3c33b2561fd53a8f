"""Results of the simulated jobs, as Markdown and as a picture."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.goodput.assumptions import BASE, SLOW_STORAGE, Assumptions, Job, rates, rows
from tools.bench.goodput.costs import CopyCost, Costs
from tools.bench.goodput.simulation import Outcome, System
from tools.bench.goodput.systems import ASYNC, OURS, STORAGE

_DAY_H, _DAY_S = 24, 86400.0
_COLORS = {STORAGE: "#8d99ae", ASYNC: "#2a9d8f", OURS: "#d1495b"}
_LOSSES = {
    "saving": "#8d99ae",
    "done again": "#d1495b",
    "detecting": "#e9c46a",
    "restarting": "#2a9d8f",
    "restoring": "#264653",
}

_COSTS = {
    "save": "stall of a save",
    "snapshot": "stall of a snapshot",
    "beside": "what a save takes from the steps after it, in copies",
    "durable": "published after the stall, in writes of the same bytes",
    "exception_s": "exception, until the function runs again on 4 ranks, s",
    "kill_s": "`kill -9`, until the function runs again on 4 ranks, s",
    "noticed_s": "- of it, until it is noticed, s",
    "server_rank_s": "a restart in the coordination server, s for each rank",
    "restore": "restore from memory, in copies",
    "start_s": "a process started anew, with its imports, s",
}


@dataclass(frozen=True)
class Cell:
    """One simulated job in one of the scenarios."""

    scenario: str
    job: Job
    system: System
    outcome: Outcome

    @property
    def lost_gpu_hours(self) -> float:
        """GPU hours of a day that were not spent on steps that count."""
        return (1 - self.outcome.goodput) * self.job.gpus * _DAY_H


# -- tables ------------------------------------------------------------------------------------------------------------


def markdown(cells: Sequence[Cell], costs: Costs, assumed: Assumptions, detail: Job, seed: int) -> str:
    """Return all tables. `detail` is the job whose time is told in full, and that the scenarios vary."""
    faults = sum(cell.outcome.faults for cell in cells)
    errors = max(cell.outcome.error for cell in cells)
    parts = [
        f"Seed {seed}, {len(cells)} jobs, {faults:,} faults; largest standard error of a goodput {errors:.2%}.",
        f"Goodput, lost GPU hours of a day. A step takes {assumed.step_s:g} s; each system has its best intervals.",
    ]
    for (scenario, _), found in _sweeps(cells).items():
        parts += [f"### {_swept(scenario, found)}", _sizes(found, assumed)]
    for scenario in (BASE, SLOW_STORAGE):
        found = [cell for cell in cells if cell.job == detail and cell.scenario == scenario]
        parts += [f"### {details_title(detail, scenario)}", _details(found)]
    parts += [
        f"### What if: {_title(detail)}",
        _scenarios([cell for cell in cells if cell.job == detail]),
        "### What was measured",
        _measured(costs),
        "### What was assumed",
        _assumed(assumed),
    ]
    return "\n\n".join(parts)


def details_title(job: Job, scenario: str) -> str:
    """Return the title of the table that tells where the time of a job goes."""
    return f"Where the time goes: {_title(job)}, {scenario}"


def _title(job: Job) -> str:
    return f"{job.parameters / 1e9:g}B parameters on {job.gpus:,} GPUs"


def _table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *map(list, lines)])


def _sweeps(cells: Sequence[Cell]) -> dict[tuple[str, float], list[Cell]]:
    """Return the cells that vary the number of GPUs, by scenario and number of parameters."""
    found: dict[tuple[str, float], list[Cell]] = {}
    for cell in cells:
        if cell.scenario in (BASE, SLOW_STORAGE):
            found.setdefault((cell.scenario, cell.job.parameters), []).append(cell)
    return found


def _swept(scenario: str, cells: Sequence[Cell]) -> str:
    size = f"{cells[0].job.parameters / 1e9:g}B parameters"
    return size if scenario == BASE else f"{size}, {scenario}"


def _goodput(cell: Cell) -> str:
    return f"{cell.outcome.goodput:.1%}, {cell.lost_gpu_hours:,.0f}"


def _sizes(cells: Sequence[Cell], assumed: Assumptions) -> str:
    by_job: dict[Job, list[Cell]] = {}
    for cell in cells:
        by_job.setdefault(cell.job, []).append(cell)
    lines = []
    for job, found in by_job.items():
        faults = _DAY_S * sum(rates(job, assumed).values())
        lines.append([f"{job.gpus:,}", _bytes(job.share_bytes(assumed)), f"{faults:.1f}", *map(_goodput, found)])
    names = dict.fromkeys(cell.system.name for cell in cells)
    return _table(["GPUs", "state of a GPU", "faults a day", *names], lines)


def _bytes(count: float) -> str:
    sizes = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((f"{count / size:.3g} {unit}" for size, unit in sizes if count >= size), f"{count:.0f} bytes")


def _details(cells: Sequence[Cell]) -> str:
    header = ["", "a state each", "goodput", *_LOSSES, "a fault costs"]
    lines = []
    for cell in cells:
        outcome, step_s = cell.outcome, cell.system.step_s
        states = ", ".join(f"{tier.name} {tier.period_s(step_s):.0f} s" for tier in cell.system.tiers)
        shares = [f"{outcome.losses[name] / outcome.seconds:.2%}" for name in _LOSSES]
        down_s = sum(seconds for name, seconds in outcome.losses.items() if name != "saving")
        each = f"{down_s / outcome.faults:.0f} s"
        lines.append([cell.system.name, states, f"{outcome.goodput:.1%}", *shares, each])
    return _table(header, lines)


def _scenarios(cells: Sequence[Cell]) -> str:
    names = list(dict.fromkeys(cell.system.name for cell in cells))
    by_scenario: dict[str, list[Cell]] = {}
    for cell in cells:
        by_scenario.setdefault(cell.scenario, []).append(cell)
    return _table(["", *names], ([name, *map(_goodput, found)] for name, found in by_scenario.items()))


def _measured(costs: Costs) -> str:
    lines = []
    for name, title in _COSTS.items():
        value = getattr(costs, name)
        lines.append([title, _copy_cost(value) if isinstance(value, CopyCost) else f"{value:.3g}"])
    return _table(["", ""], lines)


def _copy_cost(cost: CopyCost) -> str:
    return f"{1e3 * cost.fixed_s:.1f} ms + {cost.ratio:.2f} copies"


def _assumed(assumed: Assumptions) -> str:
    return _table(["", "", "source"], ([f"`{each[0]}`", _quantity(*each[1:3]), each[3]] for each in rows(assumed)))


def _quantity(value: float, unit: str) -> str:
    if unit in ("bytes", "bytes/s"):
        return f"{_bytes(value)}{unit.removeprefix('bytes')}"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


# -- picture -----------------------------------------------------------------------------------------------------------


def plot(cells: Sequence[Cell], detail: Job, path: Path) -> None:
    """Draw what is lost over the number of GPUs, and of one job on what. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = _sweeps(cells)
    count = len(sweeps) + 2
    columns = math.ceil(count / 2)
    figure, panels = pyplot.subplots(2, columns, figsize=(4.2 * columns, 7.2), squeeze=False, layout="constrained")
    left = list(panels.flat)
    shares = [100 * (1 - cell.outcome.goodput) for found in sweeps.values() for cell in found]
    for (scenario, _), found in sweeps.items():
        axes = left.pop(0)
        _draw_curves(axes, found)
        axes.set_ylim(0.7 * min(shares), 1.5 * max(shares))
        axes.set_title(_swept(scenario, found), fontsize=10)
    panels.flat[0].legend(fontsize=8, frameon=False, loc="upper left")
    for scenario in (BASE, SLOW_STORAGE):
        axes = left.pop(0)
        _draw_losses(axes, [cell for cell in cells if cell.job == detail and cell.scenario == scenario])
        axes.set_title(f"{_title(detail)}\n{scenario}", fontsize=10)
    for axes in left:
        axes.set_visible(False)
    figure.suptitle(
        "Simulated: GPU time lost to faults and to guarding against them, each system at its best intervals"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=95)
    pyplot.close(figure)


def _draw_curves(axes: Any, cells: Sequence[Cell]) -> None:
    for name, color in _COLORS.items():
        found = [cell for cell in cells if cell.system.name == name]
        shares = [100 * (1 - cell.outcome.goodput) for cell in found]
        axes.plot([cell.job.gpus for cell in found], shares, marker="o", markersize=3, color=color, label=name)
    gpus = sorted({cell.job.gpus for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(gpus, [f"{count / 1024:g}k" for count in gpus], fontsize=8)
    ticks = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("lost, %")
    axes.grid(axis="y", linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_losses(axes: Any, cells: Sequence[Cell]) -> None:
    """Draw a bar for each system, divided by what the time was spent on."""
    for place, cell in enumerate(cells):
        bottom = 0.0
        for name, color in _LOSSES.items():
            height = 100 * cell.outcome.losses[name] / cell.outcome.seconds
            axes.bar(place, height, bottom=bottom, color=color, width=0.6, label=name if place == 0 else None)
            bottom += height
        axes.text(place, bottom, f"{bottom:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(cells)), [cell.system.name.replace(", ", ",\n") for cell in cells], fontsize=8)
    axes.set_ylabel("lost, %")
    axes.margins(y=0.1)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
