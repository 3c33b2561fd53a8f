"""Two pictures: how often the limit each system takes, and where this package stands to its targets."""

import math
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench.suite.figures import FIGURES, OURS, Figure, Verdict, ratios_of, values_of, verdicts
from tools.bench.suite.plan import Measured, Scenario
from tools.bench.systems import SYSTEMS

__all__ = ["plot"]

_SHOWN = ("stall", "extra", "durable", "cold", "warm", "memory")
_OURS, _PEER, _MET, _MISSED = "#d1495b", "#8d99ae", "#2a9d8f", "#d1495b"
_FLOOR = 0.05  # of a logarithmic axis: training may by chance be faster beside a save


def plot(measured: Measured, folder: Path) -> list[Path]:
    """Writes the pictures, one of each transformer job and one of all targets. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, scenario in enumerate(s for s in measured.scenarios if s.kind == "saving"):
        paths.append(folder / f"systems-{number + 1}.png")
        figure = _systems(pyplot, scenario)
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    found = [verdict for verdict in verdicts(measured) if verdict.target]
    if found:
        paths.append(folder / "targets.png")
        figure = _targets(pyplot, found)
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def _systems(pyplot: Any, scenario: Scenario) -> Any:
    """A panel for each figure, a bar for each system: median of the ratios, with the least and the most."""
    panels = [f for f in FIGURES if f.key in _SHOWN and any(values_of(scenario, f, s) for s in scenario.turns)]
    columns = 3
    rows = max(1, -(-len(panels) // columns))
    systems = list(scenario.turns)
    size = (13, rows * (1.1 + 0.32 * len(systems)) + 0.6)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    figure.suptitle(f"{scenario.title}: times the limit (bar: median; line: least to most; dashed: target)")
    for number, panel in enumerate(axes.flat):
        if number >= len(panels):
            panel.set_visible(False)
            continue
        _panel(panel, scenario, panels[number], systems, labels=number % columns == 0)
    return figure


def _panel(axes: Any, scenario: Scenario, figure: Figure, systems: list[str], labels: bool) -> None:
    for place, system in enumerate(reversed(systems)):
        ratios = [max(ratio, _FLOOR) for ratio in ratios_of(scenario, figure, system)]
        if not ratios:
            axes.text(_FLOOR * 1.1, place, "not measured", va="center", fontsize=7, color=_PEER)
            continue
        middle = median(ratios)
        axes.barh(place, middle - _FLOOR, left=_FLOOR, color=_OURS if system in OURS else _PEER, height=0.7)
        axes.plot([min(ratios), max(ratios)], [place, place], color="black", linewidth=1.2)
        axes.text(max(ratios) * 1.08, place, f"{middle:.2f}", va="center", fontsize=8)
    if figure.target is not None:
        axes.axvline(figure.target, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(left=_FLOOR)
    axes.margins(x=0.18)
    axes.set_yticks(range(len(systems)), [SYSTEMS[s].title for s in reversed(systems)] if labels else [])
    axes.set_title(figure.title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _targets(pyplot: Any, found: list[Verdict]) -> Any:
    """A field for each target, a line for each job and system: how far it is from the target, and on which side."""
    of = {(verdict.where, verdict.title): verdict for verdict in found}
    lines = list(dict.fromkeys(verdict.where for verdict in found))
    columns = list(dict.fromkeys(verdict.title for verdict in found))
    size = (3.2 + 0.75 * len(columns), 2.2 + 0.27 * len(lines))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    for y, where in enumerate(lines):
        for x, title in enumerate(columns):
            verdict = of.get((where, title))
            if verdict is None or verdict.target is None:
                continue
            ratio = verdict.median / verdict.target
            strength = min(1.0, 0.25 + abs(math.log2(max(ratio, _FLOOR))) / 2)
            color = _MET if verdict.met else _MISSED
            axes.add_patch(pyplot.Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color, alpha=strength))
            axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns, rotation=40, ha="left", fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(lines)), lines, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("median / target: 1 or less is met, the darker the farther")
    return figure
