"""What `report` shows of a root: its steps and their times, their health, and what changed between the newest two.

What cannot be read becomes a note of the step. Nothing is read that is not needed: of old steps some ranks stand for
all, and data only where it was asked for, or is little.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.storage.interface import MovedStep, Root
from ckpt.storage.names import step_name
from ckpt.validation import validate

from .diff import Change, changed_tensors
from .output import CannotReadError, Output, byte_counter, duration, plural, size
from .root import UnpublishedSave, abandoned_saves, pending_saves, steps_of
from .step import PartTimes, SaveTimes, held, open_step, part_times, summary_of
from .timeline import save_times
from .validate import problem_line

_MOST_RANKS, _MOST_RANKS_OF_OLD = 8192, 64
_READ_UNASKED = 4 << 30  # bytes
_CHECKED = 3  # newest steps, at least by their metadata


@dataclass(frozen=True)
class Limits:
    """How much to look at: the newest `steps`; how many of these to `validate` in full, and whether to `compare`.

    None: as much as is read in some seconds.
    """

    steps: int
    validate: int | None
    compare: bool | None


@dataclass(frozen=True)
class SavedStep:
    """A published step. `summary`, `times` and `parts` (of all ranks of the newest, else of some) may be missing."""

    step: int
    published_at: float
    pinned: bool
    problem: str = ""
    summary: dict[str, Any] | None = None
    times: SaveTimes | None = None
    parts: tuple[PartTimes, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of its tensors; 0 if it cannot be read."""
        return 0 if self.summary is None else int(self.summary["bytes"])


@dataclass(frozen=True)
class Health:
    """The state of a step: whole, damaged or unreadable; `how` that was checked, and a note."""

    step: int
    state: str
    how: str
    note: str


@dataclass(frozen=True)
class Findings:
    """What was found at `time`. `steps` are the newest, oldest first; `older` steps are not among them.

    `changes` is None if tensors were not compared; `compared` says which steps were, or why not.
    """

    time: float
    root: str
    steps: tuple[SavedStep, ...]
    older: int
    pending: tuple[UnpublishedSave, ...]
    abandoned: tuple[UnpublishedSave, ...]
    moved: tuple[MovedStep, ...]
    health: tuple[Health, ...]
    changes: tuple[Change, ...] | None
    compared: str

    @property
    def readable(self) -> list[SavedStep]:
        """The steps with a summary."""
        return [step for step in self.steps if step.summary is not None]


def find(root: Root, limits: Limits, output: Output) -> Findings:
    """Look at a root. Shows progress where much is read."""
    numbers = steps_of(root)
    pinned = root.pinned_steps()
    chosen = numbers[-limits.steps :]
    steps = tuple(_saved_step(root, step, step in pinned, step == chosen[-1]) for step in chosen)
    found = [step for step in steps if step.published_at]
    changes, compared = _changes(root, found, limits.compare, output)
    return Findings(
        time.time(),
        root.path,
        tuple(found),
        len(numbers) - len(chosen),
        tuple(pending_saves(root)),
        tuple(abandoned_saves(root)),
        tuple(root.moved_aside()),
        tuple(_health(root, found, limits.validate, output)),
        changes,
        compared,
    )


def _saved_step(root: Root, step: int, pinned: bool, newest: bool) -> SavedStep:
    published_at = 0.0  # removed meanwhile
    try:
        source = root.source_of(step)
        with contextlib.suppress(CheckpointError):
            published_at = root.published_s(step)
        if not published_at and (changed := source.usage()[1]):
            return SavedStep(step, changed, pinned, "its zarr.json is missing")
        summary = summary_of(source)
        parts = part_times(source, summary, _MOST_RANKS if newest else _MOST_RANKS_OF_OLD)
        times = save_times(source, published_at, parts)
        return SavedStep(step, published_at, pinned, "", summary, times, tuple(parts))
    except (CheckpointError, OSError) as error:
        return SavedStep(step, published_at, pinned, str(error))


def _health(root: Root, steps: Sequence[SavedStep], full: int | None, output: Output) -> list[Health]:
    """Check the newest steps: `full` of them by all of their bytes, the others by metadata and sizes."""
    found, left = [], _READ_UNASKED
    for number, step in enumerate(reversed(steps[-max(_CHECKED, full or 0) :])):
        left -= step.bytes
        quick = left < 0 if full is None else number >= full
        how = "metadata and sizes" if quick else "all bytes"
        begin = time.perf_counter()
        try:
            with held(root, step.step) as source, output.meter(step_name(step.step)) as meter:
                report = validate(source, quick=quick, progress=meter)
        except (CheckpointError, CannotReadError, OSError) as error:
            found.append(Health(step.step, "unreadable", how, str(error)))
            continue
        seconds = time.perf_counter() - begin
        if report.whole:
            note = plural(report.files, "file")
            if not quick:
                note += f", {size(report.bytes_read)} in {duration(seconds)}"
            found.append(Health(step.step, "whole", how, note))
        else:
            more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
            found.append(Health(step.step, "damaged", how, problem_line(report.problems[0]) + more))
    return found


def _changes(
    root: Root, steps: Sequence[SavedStep], wanted: bool | None, output: Output
) -> tuple[tuple[Change, ...] | None, str]:
    """Compare the two newest steps; return None and the reason if that is not possible, or too much."""
    if len(steps) < 2:
        return None, "There are no two steps to compare."
    before, after = steps[-2:]
    total = before.bytes + after.bytes
    if wanted is False:
        return None, "Steps were not compared (--no-compare)."
    if wanted is None and total > _READ_UNASKED:
        return None, f"Steps were not compared, because that reads {size(total)}; --compare does it."
    try:
        paths = [root.source_of(step.step).path for step in (before, after)]
        with open_step(paths[0]) as a, open_step(paths[1]) as b, output.meter("compare") as meter:
            changes = changed_tensors(a, b, progress=byte_counter(meter, before.bytes))
    except (CheckpointError, CannotReadError, OSError) as error:
        return None, f"Steps {before.step} and {after.step} could not be compared: {error}"
    return tuple(changes), f"Step {before.step} and step {after.step}: {plural(len(changes), 'tensor')} changed."
