"""`ls`: list the steps and saves of a checkpoint root, and what a restart would do with them."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, FormatVersionError
from ckpt.saving.retention import is_number
from ckpt.storage.interface import MovedStep, Root
from ckpt.storage.root import CheckpointRoot
from ckpt.validation import Report
from ckpt.validation import validate as validate_step

from .output import Exit, Output, count, duration, one_line, size
from .root import (
    UnpublishedSave,
    abandoned_saves,
    any_root,
    origin_of,
    pending_saves,
    steps_of,
)
from .step import overview_of, part_times
from .validate import problem_line

HELP = "list the steps of a root with their metrics, and which one a restart would choose"

_METRICS = 4  # of each step that are shown
_LARGEST = 1e300  # of integers, a damaged or hostile step may have any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("--all", action="store_true", help="also list the steps of other branches")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = any_root(arguments.root)
    published = [_row(root, step) for step in steps_of(root)]
    pinned = root.pinned_steps()
    for row in published:
        row.pinned = row.step in pinned
    pending = pending_saves(root)
    unpublished = [_unpublished_row(save) for save in (*pending, *abandoned_saves(root))]
    choice = _choose(root, published, pending)
    moved = [_moved_row(step) for step in root.moved_aside() if arguments.all or step.why == "damaged"]
    rows = sorted([*published, *unpublished, *moved], key=lambda row: (row.step, row.state))
    return _show(root.path, rows, choice, output)


def _show(path: str, rows: list[_Row], choice: _Choice, output: Output) -> Exit:
    best = _best(rows)
    cells = [
        (
            str(row.step),
            row.state,
            duration(row.age_s),
            size(row.bytes),
            "" if row.tensors is None else count(row.tensors),
            "" if row.ranks is None else str(row.ranks),
            "" if row.write_s is None else duration(row.write_s),
            *([_metrics(row, best)] if best else []),
            ", ".join(filter(None, (_restart_mark(row, choice), "pinned" if row.pinned else "", row.note))),
        )
        for row in rows
    ]
    if rows:
        columns = [">step", "state", ">age", ">size", ">tensors", ">ranks", ">write", *(["metrics"] if best else [])]
        output.table((*columns, "note"), cells)
    output.line(f"restart: {choice.text}", "bold")
    for name, ends in best.items():
        output.line(f"{one_line(name)}: lowest in step {ends['min']}, highest in step {ends['max']}")
    document = {"root": path, "saves": [asdict(row) for row in rows], "best": best}
    output.json({**document, "restart": {"step": choice.step, "why": choice.text}})
    states = {row.state for row in rows}
    return Exit.DAMAGED if "DAMAGED" in states else Exit.CANNOT_READ if "unreadable" in states else Exit.WHOLE


@dataclass
class _Row:
    step: int
    state: str  # published, DAMAGED, unreadable; pending, abandoned; superseded, set aside (because it was damaged)
    age_s: float
    bytes: int
    tensors: int | None = None
    ranks: int | None = None
    write_s: float | None = None
    note: str = ""
    pinned: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Choice:
    step: int | None
    text: str


def _metrics(row: _Row, best: dict[str, dict[str, int]]) -> str:
    """Return the numbers among the metrics of a step, in one line, with marks at the lowest and highest."""
    shown = [(name, value) for name, value in row.metrics.items() if _is_shown(value)]
    found = [f"{name}={value:.6g}{_mark(row, best.get(name))}" for name, value in shown]
    return one_line(", ".join(found[:_METRICS]) + (", ..." if len(found) > _METRICS else ""))


def _mark(row: _Row, ends: dict[str, int] | None) -> str:
    if ends is None or row.state != "published" or ends["min"] == ends["max"]:
        return ""
    return " (lowest)" if row.step == ends["min"] else " (highest)" if row.step == ends["max"] else ""


def _is_shown(value: Any) -> bool:
    return is_number(value) and abs(value) < _LARGEST


def _best(rows: list[_Row]) -> dict[str, dict[str, int]]:
    """Return the published steps with the lowest and the highest value of each metric; of equal ones the older."""
    found: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            if row.state == "published" and _is_shown(value):
                found.setdefault(name, []).append((value, row.step))
    lowest = {name: min(values)[1] for name, values in found.items()}
    highest = {name: min((-value, step) for value, step in values)[1] for name, values in found.items()}
    return {name: {"min": lowest[name], "max": highest[name]} for name in found}


def _restart_mark(row: _Row, choice: _Choice) -> str:
    return "<- restart" if row.state == "published" and row.step == choice.step else ""


def _row(root: Root, step: int) -> _Row:
    age_s = 0.0
    try:
        source = root.source_of(step)
        with contextlib.suppress(CheckpointError):
            age_s = max(0.0, time.time() - root.published_s(step))
        summary, tensors = overview_of(source)
        row = _Row(step, "published", age_s, summary["bytes"], tensors, summary["world_size"])
        if isinstance(summary.get("metrics"), dict):
            row.metrics = summary["metrics"]
        if isinstance(root, CheckpointRoot) and os.path.islink(root.step_path(step)):
            row.note = f"a link to {os.readlink(root.step_path(step))}"
        row.write_s = max((times.write_s + times.sync_s for times in part_times(source, summary)), default=None)
    except CheckpointCorruptError as error:
        return _Row(step, "DAMAGED", age_s, 0, note=str(error))
    except (CheckpointError, OSError) as error:
        return _Row(step, "unreadable", age_s, 0, note=str(error))
    return row


def _unpublished_row(save: UnpublishedSave) -> _Row:
    return _Row(save.id.step, save.state, save.age_s, save.bytes, None, save.world_size, None, save.note)


def _moved_row(moved: MovedStep) -> _Row:
    total, newest = moved.source.usage()
    age_s = max(0.0, time.time() - newest)
    if moved.why == "superseded":
        continued = origin_of(moved)[1]
        before = f"continues step {continued.get('step')}, " if continued else ""
        return _Row(moved.step, "superseded", age_s, total, note=f"{before}restore-branch {moved.name}")
    return _Row(moved.step, "set aside", age_s, total, note=f"was damaged: {moved.source.path}; rm {moved.name}")


def _choose(root: Root, published: list[_Row], pending: list[UnpublishedSave]) -> _Choice:
    """Tell which step a restart restores: the newest it can read, once complete pending saves are published."""
    newest = max((row.step for row in published), default=-1)
    for save in reversed(pending):
        if save.complete and save.id.step > newest:
            doing = "is being published" if save.in_use else "is complete, so a restart publishes it first"
            return _Choice(save.id.step, f"step {save.id.step}: its pending save {doing}")
    skipped: list[str] = []
    for row in reversed(published):
        why_not = _why_not(root, row)
        if why_not is None:
            why = "the newest published step" if not skipped else f"the newest one that can be read; {skipped[0]}"
            more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
            return _Choice(row.step, f"step {row.step}: {why}{more}. Metadata and sizes agree; `validate` reads all.")
        if row.state == "unreadable":  # a restart goes back one step for damage only
            return _Choice(None, f"fails, because step {row.step} cannot be read: {why_not}")
        skipped.append(f"step {row.step} is skipped: {why_not}")
    if skipped:
        return _Choice(None, f"fails, because no step can be read: {skipped[0]}")
    return _Choice(None, "from the beginning: there is no published step")


def _why_not(root: Root, row: _Row) -> str | None:
    """Why a restart skips a step, as far as metadata and sizes tell; None if it does not. Updates `row`."""
    if row.state == "published":
        try:
            report: Report = validate_step(root.source_of(row.step), quick=True)
        except (FormatVersionError, CheckpointError) as error:
            row.state, row.note = "unreadable", str(error)
            return row.note
        if report.whole:
            return None
        row.state = "DAMAGED"
        row.note = problem_line(next((p for p in report.problems if p.fatal), report.problems[0]))
        if report.restorable:
            return None
    return row.note
