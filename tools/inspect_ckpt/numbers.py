"""Stored elements as numbers, and statistics of them that are computed block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_RAW_AS = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "qint8": np.dtype(np.int8),
    "quint8": np.dtype(np.uint8),
    "qint32": np.dtype(np.int32),
    "complex32": np.dtype(np.float16),
}


def as_numbers(array: Array, dtype: str) -> Array | None:
    """Return elements of torch's `dtype` as float64, complex128, or integers of their own width.

    None if they are not numbers. Quantized elements are the integers that are stored.
    """
    if dtype in _RAW_AS:
        array = np.ascontiguousarray(array).view(_RAW_AS[dtype])
        if dtype == "complex32":
            wide = array.astype(np.float64)
            return np.asarray(wide[..., 0] + 1j * wide[..., 1])
    elif array.dtype == np.uint8 and dtype != "uint8":
        return None
    if array.dtype.kind in "biu":
        return array.astype(np.uint8) if array.dtype.kind == "b" else array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


@dataclass
class Statistics:
    """Counts of all elements added so far, and statistics of the finite ones.

    Sums are in float64. Mean and variance of blocks are merged as in Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances" (1979). Complex numbers count by their magnitudes.
    """

    elements: int = 0
    finite: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float = 0.0
    _scale: float = field(default=0.0, repr=False)  # the largest magnitude so far; its square is the unit of sums
    _squared_deviations: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return self._scale * math.sqrt(self._squared_deviations / self.finite) if self.finite else 0.0

    @property
    def norm(self) -> float:
        """Square root of the sum of squares."""
        return self._scale * math.sqrt(self._squares)

    def add(self, numbers: Array) -> None:
        """Add a block of elements."""
        numbers = np.abs(numbers) if numbers.dtype.kind == "c" else numbers
        self.elements += numbers.size
        self.zeros += numbers.size - int(np.count_nonzero(numbers))
        if numbers.dtype.kind == "f":
            finite = np.isfinite(numbers)
            if not finite.all():
                nan = int(np.count_nonzero(np.isnan(numbers)))
                self.nan += nan
                self.inf += numbers.size - int(np.count_nonzero(finite)) - nan
                numbers = numbers[finite]
        if numbers.size:
            self._add_finite(numbers)

    def _add_finite(self, numbers: Array) -> None:
        low, high = numbers.min().item(), numbers.max().item()
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        wide = numbers.astype(np.float64, copy=False).reshape(-1)
        self._rescale(max(abs(float(low)), abs(float(high))))
        scaled = wide / self._scale
        self._squares += float(np.dot(scaled, scaled))
        mean = float(scaled.mean())
        scaled -= mean
        total = self.finite + wide.size
        difference = mean - self.mean / self._scale
        self._squared_deviations += float(np.dot(scaled, scaled))
        self._squared_deviations += difference * difference * (self.finite / total) * wide.size
        self.mean += difference * (wide.size / total) * self._scale
        self.finite = total

    def _rescale(self, largest: float) -> None:
        """Adapt the scale: squares of unscaled elements could overflow or underflow."""
        if largest > self._scale or not self.finite:
            ratio = self._scale / largest if largest else 0.0
            self._squares *= ratio * ratio
            self._squared_deviations *= ratio * ratio
            self._scale = largest or 1.0


@dataclass
class Histogram:
    """Counts of finite elements in bins of equal width from `low` to `high`."""

    low: float
    high: float
    counts: Array

    @classmethod
    def empty(cls, low: float, high: float, bins: int) -> Histogram:
        """Return a histogram without elements. A range too narrow to be divided into bins is widened."""
        if math.isinf(high - low):
            low, high = max(low, -8.9e307), min(high, 8.9e307)
        middle = low / 2 + high / 2
        for margin in (0.0, 1e-6 * abs(middle), 0.5):
            edges = np.linspace(low - margin, high + margin, bins + 1)
            if (low != high or margin >= 0.5 or abs(middle) > 5e5) and (np.diff(edges) > 0).all():
                break
        low, high = edges[0].item(), edges[-1].item()
        return cls(low, high, np.zeros(bins, np.int64))

    def add(self, numbers: Array) -> None:
        """Add a block of elements."""
        wide = np.abs(numbers) if numbers.dtype.kind == "c" else numbers
        wide = wide[np.isfinite(wide)].astype(np.float64, copy=False)
        self.counts += np.histogram(wide, len(self.counts), (self.low, self.high))[0]

    @property
    def edges(self) -> Array:
        """Edges of the bins: one more than there are bins."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one tensor. No histogram where there are no finite elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    numbers: Statistics
    histogram: Histogram | None
