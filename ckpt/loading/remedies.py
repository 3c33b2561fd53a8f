"""The remedy for each kind of name that does not fit; and the objects of which nothing fits.

`strict=False` is advised for names that one side lacks, where the rest of their object fits. A module of which nothing
is restored would train from random weights, with restored state of its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.loading.match import Match, Mismatch, lacking
from ckpt.loading.options import RestoreOptions, hints
from ckpt.paths import Path, display
from ckpt.planning.optimizer_classes import is_optimizer
from ckpt.planning.state_dict import FlatState

_SHOWN = 20

_LEAVE_OUT = "leave them out: restore(..., only=[...])"
_REMEDIES = {
    "dtype": f"dtype: only floating-point tensors are converted: give the state the dtype of the checkpoint, or "
    f"{_LEAVE_OUT}",
    "cast": "dtype: restore(..., cast=True) converts floating-point tensors",
    "shape": f"shape: these shapes have nothing in common: make the state in those of the checkpoint, or {_LEAVE_OUT}",
    "resize": "shape: restore(..., resize=True) restores what both shapes have in common",
    "read-only": f"read-only: put tensors that can be written to, such as a clone(), and dicts into the state, or "
    f"{_LEAVE_OUT}",
    "form": "form: put into the state what was saved (wrapped by PerRank, or an object, as it was), or " + _LEAVE_OUT,
    "class": f"class: make the tensors of the state as they were saved (quantize the model first), or {_LEAVE_OUT}",
    "missing": "missing: restore(..., strict=False) keeps what the state has, where the checkpoint has nothing",
    "unexpected": "unexpected: restore(..., strict=False) ignores what the state does not have",
}


@dataclass(frozen=True, slots=True)
class Misfit:
    """The names that do not fit, for a message; `too_little` says why the rest cannot be restored either, if so."""

    text: str
    too_little: str


def misfit(
    match: Match, unexpected: list[Path], flat: FlatState, state: Any, options: RestoreOptions, step: int
) -> Misfit | None:
    """Return the names that do not fit, with a remedy for each kind; None if all fit."""
    problems = [problem.text for problem in match.mismatches]
    problems += [f"unexpected: {display(path)}" for path in unexpected]
    if not problems:
        return None
    problems.sort(key=lambda problem: (problem.split(":")[0], problem))
    text = f"{len(problems)} name(s) of the state do not fit step {step}:{listed(problems)}"
    lost = _lost_objects(flat, match)
    too_little = f"Nothing of {', '.join(map(display, lost))} fits" if lost else ""
    lacks: Any = lacking(match, unexpected, options)
    has_tensors = any(map(options.selects, flat.tensors))
    if lacks:
        too_little = f"Nothing of only={lacks!r} fits"
    elif match.mismatches and not (match.reads if has_tensors else match.assignments or match.same):
        too_little = f"No {'tensor' if has_tensors else 'value'} of the state fits"
    remedies = _remedies(match.mismatches, unexpected, lost)
    kinds = {problem.kind for problem in match.mismatches if _above([problem.path]).intersection(lost)}
    if lost and kinds <= {"missing"} and not remedies:
        remedies = [_leave_out(lost, state)]
    return Misfit("\n".join((text, *remedies)), too_little)


def listed(lines: list[str]) -> str:
    """Return lines of a message, the first of them if there are many."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"\n  {line}" for line in (*lines[:_SHOWN], *more))


def _remedies(problems: list[Mismatch], unexpected: list[Path], lost: list[Path]) -> list[str]:
    """Return a line for each kind of mismatch that says what to write. Some say so in their own text."""
    found = hints([problem.path for problem in problems if problem.kind == "missing"], unexpected)
    kinds = dict.fromkeys(problem.remedy or problem.kind for problem in problems)
    kinds |= {"unexpected": None} if unexpected else {}
    for kind in ("missing", "unexpected"):
        # With another prefix the names fit; and of an object of which nothing fits, nothing would be restored.
        if kind in kinds and (found or lost):
            del kinds[kind]
    return found + [_REMEDIES[kind] for kind in kinds if kind in _REMEDIES]


def _lost_objects(flat: FlatState, match: Match) -> list[Path]:
    """Return the paths of modules and optimizers of which nothing fits, and of state dicts of modules.

    Of an optimizer, its groups do not count if there is state for it in the step, or in the state.
    """
    optimizers = {owner.path for owner in flat.owners if is_optimizer(owner.stateful)}
    objects = optimizers | {owner.path for owner in flat.owners if isinstance(owner.stateful, torch.nn.Module)}
    objects |= {path[:1] for path in flat.tensors if len(path) == 2 and "." in str(path[1])}
    read = _above(path for path, _, _ in match.reads)
    kept = _above([*(each.path for each in match.assignments), *match.same])
    lost = {path for problem in match.mismatches for path in _above([problem.path]) & objects} - read
    of_state = {problem.path[:at] for problem in match.mismatches for at in _places_of_state(problem.path)}
    return sorted((path for path in lost if path not in kept or path in of_state & optimizers), key=display)


def _leave_out(lost: list[Path], state: Any) -> str:
    """Return how to leave out objects of which the step has nothing."""
    others = [str(key) for key in state if (key,) not in lost] if isinstance(state, dict) else []
    only = repr(others) if others and all(len(path) == 1 for path in lost) else "[...]"
    names = ", ".join(map(display, lost))
    return f"missing: the checkpoint has none of the names in {names}; without it: restore(..., only={only})"


def _above(paths: Iterable[Path]) -> set[Path]:
    """Return the paths, and all that they are below."""
    return {path[:at] for path in paths for at in range(1, len(path) + 1)}


def _places_of_state(path: Path) -> Iterator[int]:
    return (at for at, key in enumerate(path) if str(key).partition(".")[0] == "state")
