"""Tables of the systems, as Markdown between two markers of a document, and plots."""

import math
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench.harness import environment
from tools.bench.systems import SYSTEMS, version_of
from tools.bench.systems.figures import (
    FIGURES,
    OURS,
    Figure,
    Measured,
    Scenario,
    Verdict,
    ratios_of,
    values_of,
    verdicts,
)

BEGIN = "<!-- begin: written by python -m tools.bench -->"
END = "<!-- end: written by python -m tools.bench -->"
SHORT = "In short"
_SHOWN = ("stall", "extra", "durable", "cold", "warm", "memory")
_IN_SHORT = ("stall", "extra", "durable", "cold", "warm", "files")
_OURS, _PEER, _MET, _MISSED = "#d1495b", "#8d99ae", "#2a9d8f", "#d1495b"
_FLOOR = 0.05  # of a logarithmic axis: training may by chance be faster beside a save


# -- tables ------------------------------------------------------------------------------------------------------------


def markdown(measured: Measured, note: str = "") -> str:
    """Return all tables. `note` says what else ran on the machine."""
    parts = [_environment(), note, f"### {SHORT}", _short(measured), "### Targets", _targets(verdicts(measured))]
    for scenario in measured.scenarios:
        parts += [f"### {scenario.title}", _table(scenario), _limits(scenario), _failures(scenario)]
    return "\n\n".join(part for part in parts if part)


def _shown(value: float, unit: str) -> str:
    """Return a value with its unit: 59 ms, 1.24 s, 2.1 GB, 1.14x."""
    size = abs(value)
    if unit == "s":
        return f"{1e3 * value:.0f} ms" if size < 1 else f"{value:.2f} s" if size < 100 else f"{value:.0f} s"
    if unit == "B":
        return f"{value / 1e6:.0f} MB" if size < 1e9 else f"{value / 1e9:.2f} GB"
    return f"{value:.2f}x" if unit == "x" else f"{value:.0f}"


def _environment() -> str:
    versions = [f"{entry.package} {version}" for name, entry in SYSTEMS.items() if (version := version_of(name))]
    facts = [f"{name} {value}" for name, value in environment().items() if name != "torch"]
    return ", ".join([*facts, *dict.fromkeys(versions)]) + "."


def _short(measured: Measured) -> str:
    """Return medians: for each job what the machine can do, and a line for each system."""
    columns = [figure for figure in FIGURES if figure.key in _IN_SHORT]
    lines = ["| | " + " | ".join(figure.title for figure in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for scenario in (scenario for scenario in measured.scenarios if scenario.kind == "saving"):
        turns = [turn for of_system in scenario.turns.values() for turn in of_system]
        limits = [_median([figure.limit(turn) for turn in turns] if figure.limit else [], figure) for figure in columns]
        lines.append(f"| **{scenario.title}**: limit | " + " | ".join(limits) + " |")
        for system in scenario.turns:
            cells = [_median(values_of(scenario, figure, system), figure) for figure in columns]
            lines.append(f"| {SYSTEMS[system].title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _median(values: list[float], figure: Figure) -> str:
    return _shown(median(values), figure.unit) if values else ""


def _targets(found: list[Verdict]) -> str:
    """Return a table for the jobs that measure systems, and one for those that have none.

    The first has a column for each of our systems, and names those ahead of the first of them that was measured.
    """
    systems = list(dict.fromkeys(verdict.system for verdict in found if verdict.system))
    of = {(verdict.job, verdict.title, verdict.system): verdict for verdict in found}
    lines = []
    if systems:
        lines = [f"| | target | {' | '.join(systems)} | ahead of the first |", "|---" * (len(systems) + 3) + "|"]
    for job in dict.fromkeys(verdict.job for verdict in found if verdict.system):
        lines.append(f"| **{job}** |" + " |" * (len(systems) + 2))
        for title in dict.fromkeys(verdict.title for verdict in found if verdict.job == job):
            row = [of.get((job, title, system)) for system in systems]
            known = next(verdict for verdict in row if verdict is not None)
            cells = ["" if verdict is None else _measured(verdict) for verdict in row]
            lines.append(f"| {title} | {_asked(known)} | {' | '.join(cells)} | {_ahead(known)} |")
    others = [verdict for verdict in found if not verdict.system]
    if others:
        lines += [*([""] if lines else []), "| | | target | |", "|---|---|---|---|"]
        lines += [f"| {v.job} | {v.title} | {_asked(v)} | {_measured(v)} |" for v in others]
    return "\n".join(lines)


def _asked(verdict: Verdict) -> str:
    return "" if verdict.target is None else f"≤ {_shown(verdict.target, verdict.unit)}"


def _measured(verdict: Verdict) -> str:
    low, high = (_shown(value, verdict.unit) for value in verdict.spread)
    met = {True: " met", False: " **missed**", None: ""}[verdict.met]
    spread = "" if low == high else f" ({low}-{high})"
    return f"{_shown(verdict.median, verdict.unit)}{spread}{met}"


def _ahead(verdict: Verdict) -> str:
    return ", ".join(verdict.ahead) or "none" if verdict.compared else ""


def _table(scenario: Scenario) -> str:
    """Return a line for each system, with a column for each figure that any of them has."""
    columns = [f for f in FIGURES if f.kind == scenario.kind and any(values_of(scenario, f, s) for s in scenario.turns)]
    header = "| | " + " | ".join(figure.title for figure in columns) + " |"
    lines = [header, "|---" * (len(columns) + 1) + "|"]
    for system in scenario.turns:
        cells = [_cell(scenario, figure, system) for figure in columns]
        lines.append(f"| {SYSTEMS[system].title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(scenario: Scenario, figure: Figure, system: str) -> str:
    values, ratios = values_of(scenario, figure, system), ratios_of(scenario, figure, system)
    if not values:
        return ""
    if figure.unit == "":
        return _shown(median(values), "")
    text = (
        f"{_shown(median(values), figure.unit)} ({_shown(min(values), figure.unit)}-{_shown(max(values), figure.unit)})"
    )
    return f"{text}, {median(ratios):.2f}x" if ratios else text


def _limits(scenario: Scenario) -> str:
    """Return a sentence on the limits of all turns."""
    names = {
        "limit_copy_s": "copy of what is staged",
        "limit_write_s": "O_DIRECT write and fsync",
        "limit_over_s": "the same over the file that is there",
        "limit_read_cold_s": "read, cold",
        "limit_read_direct_s": "read with O_DIRECT",
        "limit_read_warm_s": "read, warm",
        "limit_copy_needed_s": "copy of what is loaded",
        "limit_crc_s": "CRC-32C in one thread",
    }
    turns = [turn for of_system in scenario.turns.values() for turn in of_system]
    parts = []
    for key, name in names.items():
        values = [turn[key] for turn in turns if key in turn]
        if values:
            parts.append(
                f"{name} {_shown(median(values), 's')} ({_shown(min(values), 's')}-{_shown(max(values), 's')})"
            )
    cached = max((max(t.get("cached_share", 0.0), t.get("limit_cached_share", 0.0)) for t in turns), default=0.0)
    parts += [f"still in the page cache before a cold load: at most {cached:.1%}"] if scenario.kind == "saving" else []
    return ("Limits: " + "; ".join(parts) + ".") if parts else ""


def _failures(scenario: Scenario) -> str:
    return "\n".join(f"* {SYSTEMS[name].title} has no line: {why[:160]}" for name, why in scenario.failures.items())


# -- plots -------------------------------------------------------------------------------------------------------------


def plot(measured: Measured, folder: Path) -> list[Path]:
    """Draw each transformer job, and all targets; return the files. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, scenario in enumerate(s for s in measured.scenarios if s.kind == "saving"):
        paths.append(folder / f"systems-{number + 1}.png")
        figure = _draw_systems(pyplot, scenario)
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    found = [verdict for verdict in verdicts(measured) if verdict.target]
    if found:
        paths.append(folder / "targets.png")
        figure = _draw_targets(pyplot, found)
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def _draw_systems(pyplot: Any, scenario: Scenario) -> Any:
    """Draw a panel for each figure, a bar for each system: the median of the ratios, with the least and the most."""
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
        _draw_panel(panel, scenario, panels[number], systems, labels=number % columns == 0)
    return figure


def _draw_panel(axes: Any, scenario: Scenario, figure: Figure, systems: list[str], labels: bool) -> None:
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


def _draw_targets(pyplot: Any, found: list[Verdict]) -> Any:
    """Draw a field for each target, a line for each job and system: how far the figure is from the target."""
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
