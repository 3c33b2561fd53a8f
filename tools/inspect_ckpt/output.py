"""What people and machines see: rich tables on a terminal, aligned plain text elsewhere, or one JSON document."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Protocol

__all__ = ["Exit", "Meter", "Output", "count", "duration", "one_line", "plural", "size"]


class Exit(IntEnum):
    """What the exit code of the process says."""

    WHOLE = 0
    DAMAGED = 1
    DIFFERENT = 1
    CANNOT_READ = 2
    NOT_PUBLISHED = 3
    INTERRUPTED = 130


class Meter(Protocol):
    """Shows how far something is: called with (bytes done, bytes in all)."""

    def __call__(self, done: int, total: int) -> None: ...


class Output:
    """Where a command writes. With `as_json`, `json` writes and all else is silent; otherwise it is the other way
    round."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._rich = _console() if not as_json and sys.stdout.isatty() else None

    @property
    def on_terminal(self) -> bool:
        """Whether rich output goes to a terminal."""
        return self._rich is not None

    def json(self, document: Any) -> None:
        """Print `document` if JSON is wanted; numbers that JSON has no form of become strings."""
        if self.as_json:
            print(json.dumps(_plain(document), indent=1, ensure_ascii=True, allow_nan=False))

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line; `style` is rich's, for terminals."""
        if self.as_json:
            return
        if self._rich is not None:
            from rich.text import Text

            self._rich.print(Text(one_line(text), style=style), soft_wrap=True)
        else:
            print(_printable(one_line(text)))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
        """Print a table. A column whose title begins with ">" is aligned to the right, with "<" it may be folded."""
        if self.as_json:
            return
        cells = [[one_line(cell) for cell in row] for row in rows]
        if self._rich is not None:
            self._rich.print(_rich_table(columns, cells, title))
            return
        if title:
            print(_printable(one_line(title)))
        for line in _aligned(columns, cells):
            print(_printable(line))

    def renderable(self, rendered: Any) -> None:
        """Print something of rich. For terminals only."""
        assert self._rich is not None
        self._rich.print(rendered)

    @contextmanager
    def meter(self, title: str) -> Iterator[Meter | None]:
        """A bar with MB/s and the time left, on stderr if that is a terminal; else None."""
        console = _console(stderr=True) if not self.as_json and sys.stderr.isatty() else None
        if console is None:
            yield None
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(one_line(title).replace("[", r"\["), total=None)
            shown = 0.0

            def show(done: int, total: int) -> None:
                nonlocal shown
                if done == total or time.monotonic() - shown > 0.1:
                    shown = time.monotonic()
                    progress.update(task, completed=done, total=total)

            yield show


def one_line(text: str) -> str:
    """`text` with everything that is not printable escaped: names and paths can hold line breaks and escape codes."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5 or (unit == "B" and count < 1000):
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def count(number: int) -> str:
    """A number with separators."""
    return f"{number:,}"


def plural(number: int, what: str) -> str:
    """A number and what it counts."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration for people."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 99.5:
        return f"{seconds:.2f} s" if seconds < 9.95 else f"{seconds:.1f} s"
    for unit, length in (("min", 60), ("h", 3600)):
        if seconds < 100 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def _console(stderr: bool = False) -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=stderr, highlight=False)  # honours NO_COLOR


def _rich_table(columns: Sequence[str], rows: list[list[str]], title: str) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold") if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        overflow: Any = "fold" if column.startswith("<") or not column.startswith(">") else "ellipsis"
        table.add_column(
            Text(column.lstrip("<>")),
            justify="right" if column.startswith(">") else "left",
            overflow=overflow,
            no_wrap=column.startswith(">"),
        )
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table


_STYLES = {
    "published": "green",
    "whole": "bold green",
    "DAMAGED": "bold red",
    "pending": "yellow",
    "abandoned": "dim",
    "added": "green",
    "removed": "red",
    "changed": "yellow",
}


def _aligned(columns: Sequence[str], rows: list[list[str]]) -> Iterator[str]:
    titles = [column.lstrip("<>") for column in columns]
    widths = [max(map(len, cells)) for cells in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        padded = [
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        yield "  ".join(padded).rstrip()


def _printable(text: str) -> str:
    """What the encoding of stdout has no form of is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
