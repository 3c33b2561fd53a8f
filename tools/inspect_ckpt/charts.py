"""Drawings as inline SVG: when saves were made, how long each rank wrote, which step continues which, goodput.

Colours are those of `page`, so a drawing follows the reader's light or dark setting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from .output import duration
from .page import Markup, text

_WIDTH, _LEFT, _RIGHT = 1000, 96, 16
_MOST_BARS = 256
_MANY = 500
_NICE_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


@dataclass(frozen=True)
class Mark:
    """Something from `begin` to `end` (seconds since 1970): a bar, or a tick if both are the same."""

    begin: float
    end: float
    tone: str
    title: str


@dataclass(frozen=True)
class Lane:
    """A row of marks."""

    name: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Node:
    """A step: `key` identifies its save, `before` that of the step it continues. `ring`: the first of its owner."""

    key: str
    before: str | None
    step: int
    tone: str
    title: str
    ring: bool = False


def over_time(lanes: Sequence[Lane]) -> Markup:
    """Draw rows of marks above a common axis of time."""
    marks = [mark for lane in lanes for mark in lane.marks]
    first, last = min(mark.begin for mark in marks), max(mark.end for mark in marks)
    span = max(last - first, 1e-3)
    row, top = 30, 8
    bottom = top + row * len(lanes)

    def x(at: float) -> float:
        return _LEFT + (at - first) / span * (_WIDTH - _LEFT - _RIGHT)

    parts = []
    for at in _times(first, last):
        parts.append(_line(x(at), top, x(at), bottom, "grid"))
        parts.append(_text(x(at), bottom + 16, _clock(at, span), "middle"))
    for number, lane in enumerate(lanes):
        y = top + row * number
        parts.append(_text(_LEFT - 10, y + row / 2 + 4, lane.name, "end", strong=True))
        parts.append(_line(_LEFT, y + row, _WIDTH - _RIGHT, y + row, "grid"))
        drawn: set[tuple[str, int]] = set()
        for mark in lane.marks:
            width = max(x(mark.end) - x(mark.begin), 3.0)
            at = min(x(mark.begin), _WIDTH - _RIGHT - width)
            if width == 3.0 and len(lane.marks) > _MANY:
                if (mark.tone, int(at)) in drawn:
                    continue  # drawn over the one before
                drawn.add((mark.tone, int(at)))
            parts.append(_rect(at, y + 6, width, row - 12, mark.tone, mark.title))
    return _svg(bottom + 24, parts, "saves and restarts over time")


def ranks(seconds: Sequence[float], unit: str) -> Markup:
    """Draw a bar for the seconds of each rank; of several neighbours the slowest, if there are many."""
    group = -(-len(seconds) // _MOST_BARS)
    bars = [(first, max(seconds[first : first + group])) for first in range(0, len(seconds), group)]
    top, height = 24, 150
    most = max(max(seconds), 1e-6)
    step = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    typical = median(seconds)
    y = {fraction: top + height * (1 - fraction) for fraction in (0.0, 0.5, 1.0)}
    parts = [_line(_LEFT, at, _WIDTH - _RIGHT, at, "grid") for at in y.values()]
    parts += [_text(_LEFT - 10, at + 4, duration(most * fraction), "end") for fraction, at in y.items()]
    for number, (first, value) in enumerate(bars):
        slow = value > 1.5 * typical and value > 0.9 * most and len(seconds) > 2
        last = min(first + group, len(seconds)) - 1
        who = f"rank {first}" if first == last else f"the slowest of ranks {first} to {last}"
        tall = height * value / most
        width = min(max(0.7 * step, 1.0), 48.0)
        left = _LEFT + step * number + (step - width) / 2
        parts.append(_rect(left, top + height - tall, width, tall, "f" if slow else "a", f"{who}: {duration(value)}"))
    at = top + height * (1 - typical / most)
    parts.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="var(--soft)" stroke-dasharray="4 4"/>')
    parts.append(_text(_WIDTH - _RIGHT, at - 5, f"median {duration(typical)}", "end", strong=True))
    for number in sorted({round(share * (len(bars) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)}):
        parts.append(_text(_LEFT + step * (number + 0.5), top + height + 16, f"{unit} {bars[number][0]}", "middle"))
    return _svg(top + height + 24, parts, "seconds of each rank")


def lineage(nodes: Sequence[Node]) -> Markup:
    """Draw steps as dots, with a line from each to the one that continues it. The first lane is what is published."""
    lanes = _lanes(nodes)
    steps = {step: number for number, step in enumerate(sorted({node.step for node in nodes}))}
    apart = (_WIDTH - _LEFT - _RIGHT) / max(len(steps), 1)
    top, row = 34, 34
    place = {node.key: (_LEFT + apart * (steps[node.step] + 0.5), top + row * lanes[node.key]) for node in nodes}
    parts = [_text(_LEFT - 10, top + 4, "published", "end", strong=True)]
    if max(lanes.values(), default=0):
        parts.append(_text(_LEFT - 10, top + row + 4, "moved aside", "end", strong=True))
    for node in nodes:
        if node.before in place:
            (x, y), (to_x, to_y) = place[node.before], place[node.key]
            bend = (x + to_x) / 2 if y != to_y else to_x
            path = f"M{x:.1f} {y:.1f}C{bend:.1f} {y:.1f} {bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
            parts.append(f'<path d="{path}" fill="none" stroke="var(--e)" stroke-width="2"/>')
    labelled = max(1, math.ceil(64 / apart))
    for step, number in steps.items():
        if number % labelled == 0 or number == len(steps) - 1:
            parts.append(_text(_LEFT + apart * (number + 0.5), top - 18, str(step), "middle"))
    for node in nodes:
        x, y = place[node.key]
        if node.ring:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="var(--d)" stroke-width="2"/>')
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="var(--{node.tone})">'
        parts.append(f"{dot}<title>{text(node.title)}</title></circle>")
    return _svg(top + row * max(lanes.values(), default=0) + 18, parts, "which step continues which")


def _lanes(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the row of each node: the first for what is published, one more for each branch."""
    lanes: dict[str, int] = {}
    ends: set[str] = set()
    used = 0
    for node in nodes:
        if node.tone == "a":
            lanes[node.key] = 0
        elif node.before in ends:
            ends.discard(node.before)
            lanes[node.key] = lanes[node.before]
        else:
            used += 1
            lanes[node.key] = used
        if lanes[node.key]:
            ends.add(node.key)
    return lanes


def _times(first: float, last: float) -> Iterable[float]:
    """Return round times for an axis."""
    step = next((step for step in _NICE_S if (last - first) / step <= 8), None)
    if step is None:
        step = 86400 * math.ceil((last - first) / 86400 / 8)
    offset = time.localtime(first).tm_gmtoff
    at = math.ceil((first + offset) / step) * step - offset
    while at <= last:
        yield at
        at += step


def _clock(at: float, span: float) -> str:
    form = "%b %d" if span > 8 * 86400 else "%b %d %H:%M" if span > 86400 else "%H:%M" if span > 600 else "%H:%M:%S"
    return time.strftime(form, time.localtime(at)) + (f".{int(at % 1 * 10)}" if span < 5 else "")


def _svg(height: float, parts: Iterable[str], label: str) -> Markup:
    begin = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{text(label)}">'
    inner = "\n".join(parts)
    return Markup(f'<div class="scroll">{begin}\n{inner}\n</svg></div>')


def _line(x: float, y: float, to_x: float, to_y: float, tone: str) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="var(--{tone})"/>'


def _rect(x: float, y: float, width: float, height: float, tone: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="var(--{tone})">'
        f"<title>{text(title)}</title></rect>"
    )


def _text(x: float, y: float, words: str, anchor: str, *, strong: bool = False) -> str:
    kind = ' class="strong"' if strong else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{text(words)}</text>'
