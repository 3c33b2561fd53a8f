"""`stats`: figures about the elements of tensors, read in blocks of bounded memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .blocks import Reader, boxes_of
from .figures import Figures, Histogram, as_numbers
from .opening import CannotReadError, Step, open_step
from .output import Exit, Output, count

__all__ = ["HELP", "TensorStats", "add_arguments", "run"]

HELP = "min, max, mean, std, norm, zeros, NaN and Inf of tensors, and a histogram"

_BINS = 60
_BARS = 20
_BAR_WIDTH = 40
_ELEMENTS_AT_ONCE = 2 << 20  # in float64, and some copies of that


@dataclass(frozen=True)
class TensorStats:
    """What was found out about a tensor; no histogram where there are no finite elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    figures: Figures
    histogram: Histogram | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a step, or a checkpoint root: then its newest step")
    parser.add_argument("names", metavar="NAME", nargs="+", help="the name of a tensor; *, ? and [...] match many")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the histograms (needs matplotlib)")
    parser.add_argument("--no-histogram", action="store_true", help="read each tensor only once")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    with open_step(arguments.path) as step:
        return _run(step, arguments, output)


def _run(step: Step, arguments: argparse.Namespace, output: Output) -> Exit:
    names = step.select(arguments.names)
    with_histogram = bool(arguments.plot) or not arguments.no_histogram
    found = [_stats(step, name, with_histogram) for name in names]
    rows = [_cells(stats) for stats in found]
    columns = ("min", "max", "mean", "std", "norm", "elements", "zeros", "NaN", "Inf")
    output.table(("<name", "dtype", "<shape", *(f">{column}" for column in columns)), rows)
    if any(stats.figures.nan or stats.figures.inf for stats in found):
        output.line("min to norm are those of the finite elements")
    if any(stats.dtype.startswith("complex") for stats in found):
        output.line("figures of complex tensors are those of the magnitudes")
    if arguments.plot:
        from .pictures import plot_histograms

        plot_histograms(found, f"{step.path}, step {step.index.step}", arguments.plot)
        output.line(f"drew {arguments.plot}")
    else:
        for stats in found:
            _draw(stats, output)
    output.json({"path": step.path, "step": step.index.step, "tensors": [_document(stats) for stats in found]})
    return Exit.WHOLE


def _stats(step: Step, name: str, with_histogram: bool) -> TensorStats:
    tensor = step.tensors[name]
    figures = Figures()
    for numbers in _numbers(step, name):
        figures.add(numbers)
    histogram = None
    if with_histogram and figures.min is not None and figures.max is not None:
        histogram = Histogram.empty(float(figures.min), float(figures.max), _BINS)
        for numbers in _numbers(step, name):
            histogram.add(numbers)
    return TensorStats(name, tensor.dtype, tensor.shape, figures, histogram)


def _numbers(step: Step, name: str) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    """All elements as numbers, some at a time."""
    tensor, reader = step.tensors[name], Reader(step)
    for box in boxes_of(tensor):
        block = reader.read(name, box)
        flat = block.reshape(box.elements, *block.shape[len(box.shape) :])
        for start in range(0, box.elements, _ELEMENTS_AT_ONCE):
            numbers = as_numbers(flat[start : start + _ELEMENTS_AT_ONCE], tensor.dtype)
            if numbers is None:
                raise CannotReadError(f"{name}: elements of dtype {tensor.dtype} are no numbers")
            yield numbers


def _cells(stats: TensorStats) -> tuple[str, ...]:
    figures = stats.figures
    numbers: list[float | int | None] = [figures.min, figures.max]
    numbers += [figures.mean, figures.std, figures.norm] if figures.finite else [None] * 3
    counts = (figures.elements, figures.zeros, figures.nan, figures.inf)
    return stats.name, stats.dtype, str(list(stats.shape)), *map(_number, numbers), *map(count, counts)


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _draw(stats: TensorStats, output: Output) -> None:
    if stats.histogram is None:
        return
    counts = stats.histogram.counts.reshape(_BARS, -1).sum(1)
    edges = stats.histogram.edges[:: _BINS // _BARS]
    labels = [f"{edge:.4g}" for edge in edges]
    width, most = max(map(len, labels)), max(1, int(counts.max()))
    bar = "█" if output.on_terminal else "#"
    output.line()
    output.line(f"{stats.name}: {_BARS} bins from {labels[0]} to {labels[-1]}", "bold")
    for label, number in zip(labels, counts.tolist(), strict=False):
        drawn = bar * max(1, round(_BAR_WIDTH * number / most)) if number else ""
        output.line(f"{label:>{width}} | {drawn} {count(number) if number else ''}".rstrip())


def _document(stats: TensorStats) -> dict[str, Any]:
    figures = stats.figures
    document = {"name": stats.name, "dtype": stats.dtype, "shape": stats.shape, "elements": figures.elements}
    document |= {"zeros": figures.zeros, "nan": figures.nan, "inf": figures.inf}
    document |= {"min": figures.min, "max": figures.max}
    keys = ("mean", "std", "norm")
    document |= {key: getattr(figures, key) if figures.finite else None for key in keys}
    histogram = stats.histogram
    document["histogram"] = None
    if histogram is not None:
        document["histogram"] = {"low": histogram.low, "high": histogram.high, "counts": histogram.counts.tolist()}
    return document
