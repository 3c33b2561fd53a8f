"""Is a step bit by bit what it was converted from, or into? Reads both sides again, in blocks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ckpt.paths import display
from ckpt.storage.documents import canonical_json
from ckpt.values.codec import encode_value

from ..blocks import boxes_of
from ..output import Exit, Output
from .ours import Leaf, LeafReader
from .state import ForeignTensor

__all__ = ["different_tensors", "names_differ", "report", "same_value"]

_SHOWN = 20


def different_tensors(
    reader: LeafReader, pairs: Iterable[tuple[Leaf, ForeignTensor]], progress: Callable[[int], None]
) -> list[str]:
    """What is different, a line for each tensor. `progress` is called with the bytes compared since."""
    problems = []
    for leaf, other in pairs:
        tensor = leaf.tensor
        assert tensor is not None
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            problems.append(
                f"{leaf.label} is {tensor.dtype} {list(tensor.shape)} here, {other.dtype} {list(other.shape)} there"
            )
            continue
        for box in boxes_of(tensor):
            ours = np.ascontiguousarray(reader.read(leaf, box)).reshape(-1).view(np.uint8)
            theirs = np.empty((*box.shape, other.itemsize), np.uint8)
            other.read(box, theirs)
            progress(ours.nbytes)
            if not np.array_equal(ours, theirs.reshape(-1)):
                problems.append(f"{leaf.label} differs in the box at {list(box.offset)} of {list(box.shape)}")
                break
    return problems


def same_value(one: Any, other: Any) -> bool:
    """Equal, to the bit and in type."""
    try:
        return canonical_json(encode_value(one)) == canonical_json(encode_value(other))
    except TypeError:
        return False


def names_differ(here: set[Any], there: set[Any]) -> list[str]:
    """A line for each name (or path) that only one side has."""

    def shown(name: Any) -> str:
        return name if isinstance(name, str) else display(name)

    only = [f"{shown(name)} is missing there" for name in sorted(here - there, key=str)]
    return only + [f"{shown(name)} is missing here" for name in sorted(there - here, key=str)]


def report(
    arguments: argparse.Namespace, path: str, problems: list[str] | None, notes: list[str], output: Output
) -> Exit:
    """Say whether both sides are equal (`problems`; None: not verified), and return the exit code."""
    if problems is None:
        output.line("not verified")
    elif not problems:
        output.line("verified: both sides were read again, all bits are equal", "green")
    else:
        output.line(f"{path} is NOT equal to {arguments.source}:", "bold red")
        for problem in problems[:_SHOWN]:
            output.line(f"  {problem}")
    document = {"from": arguments.source, "to": path, "notes": notes, "problems": problems}
    output.json({**document, "verified": None if problems is None else not problems})
    return Exit.DIFFERENT if problems else Exit.WHOLE
