"""`stats`: statistics and histograms of the elements of tensors, read in blocks of bounded memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt.loading.fetch import Fetch

from .numbers import Histogram, Statistics, TensorStats, as_numbers
from .output import CannotReadError, Exit, Output, count
from .step import Step, add_step, at_step, block_boxes, open_step

__all__ = ["HELP", "TensorStats", "add_arguments", "run"]

HELP = "print min, max, mean, std, norm, zeros, NaN and Inf of tensors, and a histogram"

_BINS = 60
_BARS = 20
_BAR_WIDTH = 40
_ELEMENTS_AT_ONCE = 2 << 20  # each takes 8 bytes in float64, and some copies are made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a step, or a checkpoint root: then its newest step")
    parser.add_argument("names", metavar="NAME", nargs="+", help="the name of a tensor; may contain *, ? and [...]")
    add_step(parser, option=True)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the histograms to this file (needs matplotlib)")
    parser.add_argument(
        "--no-histogram", action="store_true", help="print no histogram; each tensor is read only once then"
    )


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    with open_step(at_step(arguments.path, arguments.step)) as step:
        return _run(step, arguments, output)


def _run(step: Step, arguments: argparse.Namespace, output: Output) -> Exit:
    names = step.select(arguments.names)
    with_histogram = bool(arguments.plot) or not arguments.no_histogram
    found = [_stats(step, name, with_histogram) for name in names]
    rows = [_cells(stats) for stats in found]
    columns = ("min", "max", "mean", "std", "norm", "elements", "zeros", "NaN", "Inf")
    output.table(("name", "dtype", "shape", *(f">{column}" for column in columns)), rows)
    if any(stats.numbers.nan or stats.numbers.inf for stats in found):
        output.line("min to norm are those of the finite elements only")
    if any(stats.dtype.startswith("complex") for stats in found):
        output.line("statistics of complex tensors are those of the magnitudes")
    if arguments.plot:
        from .plots import plot_histograms

        plot_histograms(found, f"{step.path}, step {step.index.step}", arguments.plot)
        output.line(f"drew {arguments.plot}")
    else:
        for stats in found:
            _draw(stats, output)
    output.json({"path": step.path, "step": step.index.step, "tensors": [_document(stats) for stats in found]})
    return Exit.WHOLE


def _stats(step: Step, name: str, with_histogram: bool) -> TensorStats:
    tensor = step.tensors[name]
    statistics = Statistics()
    for block in _blocks(step, name):
        statistics.add(block)
    histogram = None
    if with_histogram and statistics.min is not None and statistics.max is not None:
        histogram = Histogram.empty(float(statistics.min), float(statistics.max), _BINS)
        for block in _blocks(step, name):
            histogram.add(block)
    return TensorStats(name, tensor.dtype, tensor.shape, statistics, histogram)


def _blocks(step: Step, name: str) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    """Read all elements as numbers, a bounded number at a time."""
    tensor, fetch = step.tensors[name], Fetch(step.index)
    for box in block_boxes(tensor):
        block = fetch.array(name, tensor, box)
        flat = block.reshape(box.elements, *block.shape[len(box.shape) :])
        for start in range(0, box.elements, _ELEMENTS_AT_ONCE):
            numbers = as_numbers(flat[start : start + _ELEMENTS_AT_ONCE], tensor.dtype)
            if numbers is None:
                raise CannotReadError(f"{name}: elements of dtype {tensor.dtype} are not numbers")
            yield numbers


def _cells(stats: TensorStats) -> tuple[str, ...]:
    numbers = stats.numbers
    cells: list[float | int | None] = [numbers.min, numbers.max]
    cells += [numbers.mean, numbers.std, numbers.norm] if numbers.finite else [None] * 3
    counts = (numbers.elements, numbers.zeros, numbers.nan, numbers.inf)
    return stats.name, stats.dtype, str(list(stats.shape)), *map(_number, cells), *map(count, counts)


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
    numbers = stats.numbers
    document = {"name": stats.name, "dtype": stats.dtype, "shape": stats.shape, "elements": numbers.elements}
    document |= {"zeros": numbers.zeros, "nan": numbers.nan, "inf": numbers.inf}
    document |= {"min": numbers.min, "max": numbers.max}
    keys = ("mean", "std", "norm")
    document |= {key: getattr(numbers, key) if numbers.finite else None for key in keys}
    histogram = stats.histogram
    document["histogram"] = None
    if histogram is not None:
        document["histogram"] = {"low": histogram.low, "high": histogram.high, "counts": histogram.counts.tolist()}
    return document
