"""Steps that were moved aside: those of another branch, and those that were found damaged."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from ckpt.storage.root import CheckpointRoot, intent_of_step

from .opening import CannotReadError

__all__ = ["Aside", "aside", "find_aside", "way_back"]

_STEP = re.compile(r"step_(\d{8,18})(?:-.*)?")


@dataclass(frozen=True)
class Aside:
    """A step that was moved aside. `continues` is the step and save that it was continued from, if that is known."""

    step: int
    name: str
    path: str
    state: str  # superseded or damaged
    save: str | None
    continues: dict[str, Any] | None


def aside(root: CheckpointRoot) -> list[Aside]:
    """All steps that were moved aside, by step and name; links are not followed."""
    found = []
    for state, folder in (("superseded", root.superseded_path), ("damaged", root.damaged_path)):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            match = _STEP.fullmatch(name)
            if match is None or os.path.islink(path) or not os.path.isdir(path):
                continue
            intent = intent_of_step(path) or {}
            found.append(Aside(int(match[1]), name, path, state, intent.get("save"), intent.get("continues")))
    return sorted(found, key=lambda step: (step.step, step.name))


def find_aside(root: CheckpointRoot, name: str, states: tuple[str, ...] = ("superseded", "damaged")) -> Aside | None:
    """The step that a person names by its directory or its number; None if there is none.

    CannotReadError if a number means more than one.
    """
    there = [step for step in aside(root) if step.state in states]
    exact = [step for step in there if step.name == name]
    found = exact or [step for step in there if name.isascii() and name.isdigit() and step.step == int(name)]
    if len(found) > 1:
        names = ", ".join(step.name for step in found)
        raise CannotReadError(f"{root.path} has several steps {name} that were moved aside; name one of them: {names}")
    return found[0] if found else None


def way_back(root: CheckpointRoot, tip: Aside) -> tuple[list[Aside], int]:
    """What must come back so that `tip` is the newest step: it and those it continues, oldest first; and the step of
    the root that the first of them continues (-1: none)."""
    superseded = {step.save: step for step in aside(root) if step.state == "superseded"}
    chain = [tip]
    while (before := chain[-1].continues) is not None:
        step, save = before.get("step"), before.get("save")
        published = intent_of_step(root.step_path(step)) if type(step) is int else None
        if published is not None and published.get("save") == save:
            return chain[::-1], int(before["step"])
        if save not in superseded or superseded[save] in chain:
            break  # it was removed
        chain.append(superseded[save])
    older = [step for step in root.steps() if step < chain[-1].step]
    return chain[::-1], max(older, default=-1)
