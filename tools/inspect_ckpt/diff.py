"""`diff`: compare two steps, read in blocks of bounded memory."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ckpt.exporting.selection import same_value
from ckpt.loading.fetch import Fetch

from .numbers import as_numbers
from .output import Exit, Output, count, plural, short_repr
from .step import Step, at_step, block_boxes, open_step

HELP = "compare two steps, bit by bit or with a tolerance"

Array = np.ndarray[Any, np.dtype[Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a step, or a checkpoint root: then its newest step")
    parser.add_argument(
        "b", metavar="B", help="the step or root to compare it with; or A is a root and B the number of a step"
    )
    parser.add_argument(
        "c", metavar="STEP", nargs="?", help="the number of the step to compare with step B of the root A"
    )
    tolerance = "elements are equal if |a - b| <= atol + rtol * |a|; without --atol and --rtol, if all bits are equal"
    parser.add_argument("--atol", type=_tolerance, metavar="X", help=tolerance)
    parser.add_argument("--rtol", type=_tolerance, metavar="X", help="see --atol")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    paths = arguments.a, arguments.b
    if arguments.c is not None:  # ROOT 40 50
        paths = at_step(arguments.a, arguments.b), at_step(arguments.a, arguments.c)
    with open_step(paths[0]) as a, open_step(paths[1]) as b:
        return _run(a, b, arguments, output)


def _run(a: Step, b: Step, arguments: argparse.Namespace, output: Output) -> Exit:
    tolerance = None
    if arguments.atol is not None or arguments.rtol is not None:
        tolerance = Tolerance(arguments.atol or 0.0, arguments.rtol or 0.0)
    removed = [name for name in a.tensors if name not in b.tensors]
    added = [name for name in b.tensors if name not in a.tensors]
    common = [name for name in a.tensors if name in b.tensors]
    changes = changed_tensors(a, b, tolerance)
    values = _compare_values(a, b)
    rows = [("changed", change.name, *change.cells()) for change in changes]
    rows += [("removed", name, *_whole(a, name)) for name in removed]
    rows += [("added", name, *_whole(b, name)) for name in added]
    rows += [(value["change"], value["name"], "", "", "", value["text"]) for value in values]
    if rows:
        output.table(("", "name", ">relative", ">largest", ">elements", "what"), rows)
        output.line("relative: norm of the difference / norm in A; largest: of |a - b|", "dim")
    what = "all bits" if tolerance is None else f"within atol {tolerance.atol:g} and rtol {tolerance.rtol:g}"
    different = f"{len(changes)} changed, {len(removed)} removed, {len(added)} added" if rows else ""
    if values:
        different += f", {plural(len(values), 'value')} different"
    equal = len(common) - len(changes)
    output.line(f"{plural(equal, 'tensor')} equal ({what})" + (f"; {different}" if different else ""), "bold")
    output.json(
        {
            "a": a.path,
            "b": b.path,
            "equal": not rows,
            "added": added,
            "removed": removed,
            "changed": [asdict(change) for change in changes],
            "values": values,
        }
    )
    return Exit.DIFFERENT if rows else Exit.WHOLE


def changed_tensors(
    a: Step, b: Step, tolerance: Tolerance | None = None, progress: Callable[[int], None] = lambda nbytes: None
) -> list[Change]:
    """Return the tensors that are in both steps and differ, the largest change first.

    `progress` is called with the bytes of each block of `a` that was compared. CheckpointCorruptError, StorageError.
    """
    common = (name for name in a.tensors if name in b.tensors)
    changes = [change for name in common if (change := _compare(a, b, name, tolerance, progress)) is not None]
    return sorted(changes, key=lambda change: (-change.order, change.name))


@dataclass(frozen=True)
class Tolerance:
    """Elements a and b are equal if ``|a - b| <= atol + rtol * |a|``."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class Change:
    """A tensor that changed: `elements` of `of` differ, finite ones by `largest` at most.

    `relative` and `largest` are None where there are no numbers to compare.
    """

    name: str
    what: str
    elements: int = 0
    of: int = 0
    relative: float | None = None
    largest: float | None = None

    @property
    def order(self) -> float:
        return math.inf if self.relative is None or math.isnan(self.relative) else self.relative

    def cells(self) -> tuple[str, ...]:
        numbers = ("" if number is None else f"{number:.3g}" for number in (self.relative, self.largest))
        return *numbers, f"{count(self.elements)} of {count(self.of)}" if self.of else "", self.what


def _compare(
    a: Step, b: Step, name: str, tolerance: Tolerance | None, progress: Callable[[int], None]
) -> Change | None:
    left, right = a.tensors[name], b.tensors[name]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return Change(name, f"{left.dtype} {list(left.shape)} -> {right.dtype} {list(right.shape)}")
    fetch_left, fetch_right = Fetch(a.index), Fetch(b.index)
    sums = _Sums()
    for box in block_boxes(left):
        blocks = fetch_left.array(name, left, box), fetch_right.array(name, right, box)
        flat = [block.reshape(box.elements, *block.shape[len(box.shape) :]) for block in blocks]
        sums.add(flat[0], flat[1], left.dtype, tolerance)
        progress(blocks[0].nbytes)
    if not sums.different:
        return None
    relative, largest = (None, None) if not sums.numbers else (sums.relative, sums.largest)
    what = f"{left.dtype} {list(left.shape)}" + (f", {count(sums.nan)} became or were NaN or Inf" if sums.nan else "")
    return Change(name, what, sums.different, math.prod(left.shape), relative, largest)


@dataclass
class _Sums:
    """Sums over the blocks of a tensor. `nan` counts different elements that are not finite on one of both sides."""

    different: int = 0
    nan: int = 0
    largest: float = 0.0
    numbers: bool = True
    squares: float = 0.0
    squared_differences: float = 0.0

    @property
    def relative(self) -> float:
        if self.squared_differences == 0:
            return 0.0
        return math.sqrt(self.squared_differences / self.squares) if self.squares else math.inf

    def add(self, a: Array, b: Array, dtype: str, tolerance: Tolerance | None) -> None:
        bits_differ = _bits(a) != _bits(b)
        if not bits_differ.any():
            self._add_squares(as_numbers(a, dtype))
            return
        different = bits_differ.any(axis=1)
        left, right = as_numbers(a, dtype), as_numbers(b, dtype)
        if left is None or right is None:
            self.numbers = False
            self.different += int(np.count_nonzero(different))
            return
        self._add_squares(left)
        wide = np.complex128 if left.dtype.kind == "c" else np.float64
        left, right = left[different].astype(wide), right[different].astype(wide)
        with np.errstate(all="ignore"):
            distance = np.abs(left - right)
            if tolerance is not None:
                close = (left == right) | (np.isnan(left) & np.isnan(right))
                close |= np.isfinite(left) & (distance <= tolerance.atol + tolerance.rtol * np.abs(left))
                distance = distance[~close]
            self.different += distance.size
            finite = distance[np.isfinite(distance)]
            self.nan += distance.size - finite.size
            self.largest = max(self.largest, float(finite.max(initial=0.0)))
            self.squared_differences += float(np.dot(finite, finite))

    def _add_squares(self, numbers: Array | None) -> None:
        if numbers is None:
            return
        with np.errstate(all="ignore"):
            magnitudes = np.abs(numbers).astype(np.float64, copy=False).reshape(-1)
            self.squares += float(np.dot(magnitudes, magnitudes * np.isfinite(magnitudes)))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)


def _compare_values(a: Step, b: Step) -> list[dict[str, str]]:
    """Compare the leaves that are not tensors. They are equal if type and all bits are."""
    found = []
    for name in sorted({*a.values, *b.values}):
        if name not in b.values:
            found.append({"change": "removed", "name": name, "text": short_repr(a.values[name], 60)})
        elif name not in a.values:
            found.append({"change": "added", "name": name, "text": short_repr(b.values[name], 60)})
        elif not same_value(a.values[name], b.values[name]):
            text = f"{short_repr(a.values[name], 60)} -> {short_repr(b.values[name], 60)}"
            found.append({"change": "changed", "name": name, "text": text})
    return found


def _whole(step: Step, name: str) -> tuple[str, ...]:
    tensor = step.tensors[name]
    return "", "", count(math.prod(tensor.shape)), f"{tensor.dtype} {list(tensor.shape)}"


def _tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number of at least 0")
    return number
