"""Plots of histograms and of the times of saves. Matplotlib is optional, and imported only here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .output import CannotReadError, count, duration, one_line, size

if TYPE_CHECKING:
    from .numbers import TensorStats
    from .step import SaveTimes


_MOST_SAVES = 40
_MOST_HISTOGRAMS = 12
_PHASES = (
    ("plan, wait for a slot", "wait_s", "#b2182b"),
    ("stage", "stage_s", "#ef8a62"),
    ("queue", "queue_s", "#d9d9d9"),
    ("write", "write_s", "#67a9cf"),
    ("sync", "sync_s", "#2166ac"),
    ("commit", "commit_s", "#542788"),
)


def plot_timeline(saves: Sequence[SaveTimes], file: str) -> None:
    """Draw each save as a bar of its phases, with its rate; only the newest saves, if there are many."""
    shown = list(saves)[-_MOST_SAVES:]
    figure = _figure(11, 2.2 + 0.32 * len(shown))
    bars, rates = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    rows = range(len(shown))
    ends = [0.0] * len(shown)
    for label, attribute, colour in _PHASES:
        widths = [getattr(save, attribute) or 0.0 for save in shown]
        bars.barh(rows, widths, left=ends, label=label, color=colour, height=0.7)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, save, end in zip(rows, shown, ends, strict=True):
        bars.text(end, row, f" stall {duration(save.stall_s)}", va="center", fontsize=8)
    bars.set_yticks(rows, [f"step {save.step}" for save in shown])
    bars.set_ylim(len(shown) - 0.4, -0.6)
    bars.set_xlim(0, 1.18 * max(max(ends), 1e-3))
    bars.set_xlabel("seconds since the call (training waits during red and orange only)")
    bars.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=9)
    rates.barh(rows, [save.rate / 1e6 for save in shown], color="#67a9cf", height=0.7)
    for row, save in zip(rows, shown, strict=True):
        rates.text(save.rate / 1e6, row, f" {size(save.bytes)}", va="center", fontsize=8)
    rates.set_xlim(0, 1.35 * max(save.rate / 1e6 for save in shown))
    rates.set_xlabel("MB/s of write and sync")
    begin = time.strftime("%Y-%m-%d %H:%M", time.localtime(shown[0].begin))
    more = f", the newest {len(shown)} of {len(saves)}" if len(shown) < len(saves) else ""
    figure.suptitle(f"Saves since {begin}, slowest rank of each{more}", x=0.01, ha="left", fontsize=11)
    for axes in (bars, rates):
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, file)


def plot_histograms(found: Sequence[TensorStats], title: str, file: str) -> None:
    """Draw a histogram for each tensor, with a logarithmic scale of counts; only the first, if there are many."""
    shown = [stats for stats in found if stats.histogram is not None][:_MOST_HISTOGRAMS]
    if not shown:
        raise CannotReadError("there are no finite elements to draw")
    columns = 1 if len(shown) == 1 else 2 if len(shown) <= 4 else 3
    lines = -(-len(shown) // columns)
    figure = _figure(4.6 * columns if columns > 1 else 8, 0.6 + 3.0 * lines)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, stats in zip(grid.flat, shown, strict=False):
        histogram, numbers = stats.histogram, stats.numbers
        assert histogram is not None
        axes.stairs(histogram.counts, histogram.edges, fill=True, color="#67a9cf")
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
        axes.axvline(numbers.mean, color="#b2182b", linewidth=1)
        about = f"mean {numbers.mean:.3g}, std {numbers.std:.3g}, zeros {count(numbers.zeros)}"
        if numbers.nan or numbers.inf:
            about += f", NaN {count(numbers.nan)}, Inf {count(numbers.inf)}"
        axes.set_title(_tail(stats.name), fontsize=9, loc="left", parse_math=False)
        axes.set_xlabel(about, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    more = f"; the first {len(shown)} of {len(found)}" if len(shown) < len(found) else ""
    text = f"Elements per bin (logarithmic) and mean (red); {one_line(_tail(title, 70))}{more}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=9, parse_math=False)
    _save(figure, file)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CannotReadError("plots need matplotlib: pip install 'ckpt-inprocess[plot]'") from None
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, file: str) -> None:
    try:
        figure.savefig(file)
    except ValueError as error:  # an unknown extension
        raise CannotReadError(f"cannot draw {file}: {error}") from None
    except OSError as error:
        raise CannotReadError(f"cannot write {os.path.abspath(file)}: {error.strerror}") from None


def _tail(text: str, length: int = 52) -> str:
    text = one_line(text)
    return text if len(text) <= length else "…" + text[1 - length :]
