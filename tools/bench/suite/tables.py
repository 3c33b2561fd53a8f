"""The tables, as Markdown between two markers of a document."""

from pathlib import Path
from statistics import median

from tools.bench.report import environment
from tools.bench.suite.figures import FIGURES, Figure, Verdict, ratios_of, values_of, verdicts
from tools.bench.suite.plan import Measured, Scenario
from tools.bench.systems import SYSTEMS, version_of

__all__ = ["BEGIN", "END", "markdown", "replace_between_markers", "shown"]

BEGIN = "<!-- begin: written by python -m tools.bench -->"
END = "<!-- end: written by python -m tools.bench -->"


def markdown(measured: Measured, note: str = "") -> str:
    """All tables. `note` says under what load they were taken."""
    parts = [_environment(), note, "### Targets", _targets(verdicts(measured))]
    for scenario in measured.scenarios:
        parts += [f"### {scenario.title}", _table(scenario), _limits(scenario), _failures(scenario)]
    return "\n\n".join(part for part in parts if part)


def replace_between_markers(path: Path, text: str) -> None:
    """`ValueError` if the document does not have both markers once."""
    document = path.read_text()
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"{path} needs the lines {BEGIN!r} and {END!r}, once each")
    head, rest = document.split(BEGIN)
    _, tail = rest.split(END)
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")


def shown(value: float, unit: str) -> str:
    """For people: 59 ms, 1.24 s, 2.1 GB, 1.14x."""
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


def _targets(found: list[Verdict]) -> str:
    """A table for all jobs that measure systems: a column for each of ours, and who is ahead of the first of them that
    was measured. One for what has no system."""
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
    return "" if verdict.target is None else f"≤ {shown(verdict.target, verdict.unit)}"


def _measured(verdict: Verdict) -> str:
    low, high = (shown(value, verdict.unit) for value in verdict.spread)
    met = {True: " met", False: " **missed**", None: ""}[verdict.met]
    spread = "" if low == high else f" ({low}-{high})"
    return f"{shown(verdict.median, verdict.unit)}{spread}{met}"


def _ahead(verdict: Verdict) -> str:
    return ", ".join(verdict.ahead) or "nobody" if verdict.compared else ""


def _table(scenario: Scenario) -> str:
    """A line for each system, a column for each figure that any of them has."""
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
        return shown(median(values), "")
    text = f"{shown(median(values), figure.unit)} ({shown(min(values), figure.unit)}-{shown(max(values), figure.unit)})"
    return f"{text}, {median(ratios):.2f}x" if ratios else text


def _limits(scenario: Scenario) -> str:
    """Of all turns: they are measured before each."""
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
            parts.append(f"{name} {shown(median(values), 's')} ({shown(min(values), 's')}-{shown(max(values), 's')})")
    cached = max((max(t.get("cached_share", 0.0), t.get("limit_cached_share", 0.0)) for t in turns), default=0.0)
    parts += [f"still in the page cache before a cold load: at most {cached:.1%}"] if scenario.kind == "saving" else []
    return ("Limits: " + "; ".join(parts) + ".") if parts else ""


def _failures(scenario: Scenario) -> str:
    return "\n".join(f"* {SYSTEMS[name].title} has no line: {why[:160]}" for name, why in scenario.failures.items())
