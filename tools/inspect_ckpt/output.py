"""Results of a command: text, tables or JSON on stdout, and an exit code or the error that leads to one.

A terminal gets tables and colours of rich; anything else gets aligned plain text. With ``--json`` a command prints one
JSON document and nothing else.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from ckpt import progress

_MAX_PRINTED_BITS = 14_000  # of an integer in decimal; Python refuses somewhat more


class Exit(IntEnum):
    """Exit codes of the process."""

    WHOLE = 0
    DAMAGED = 1
    DIFFERENT = 1
    CANNOT_READ = 2
    NOT_PUBLISHED = 3
    INTERRUPTED = 130


class CannotReadError(Exception):
    """The path, or a name in it, is not what the command needs."""


class NotPublishedError(Exception):
    """The path is a save that is not published."""


Meter = Callable[[int, int], None]
"""Shows progress: called with the bytes done and the bytes in all."""


class Output:
    """The output of a command. With `as_json` only `json` prints; otherwise everything but `json` does."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._rich = _console() if not as_json and sys.stdout.isatty() else None

    @property
    def on_terminal(self) -> bool:
        """Whether rich output goes to a terminal."""
        return self._rich is not None

    def json(self, document: Any) -> None:
        """Print `document`. Numbers that JSON cannot represent become strings."""
        if self.as_json:
            print(json.dumps(_plain(document), indent=1, ensure_ascii=True, allow_nan=False))

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line. `style` is a style of rich, for terminals."""
        if self.as_json:
            return
        if self._rich is not None:
            from rich.text import Text

            self._show(Text(one_line(text), style=style), soft_wrap=True)
        else:
            print(_printable(one_line(text)))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table. A column whose title begins with ">" is aligned to the right; the cells of others may wrap."""
        if self.as_json:
            return
        cells = [[one_line(cell) for cell in row] for row in rows]
        if self._rich is not None:
            self._show(_rich_table(columns, cells))
            return
        for line in _aligned(columns, cells):
            print(_printable(line))

    @contextmanager
    def meter(self, title: str) -> Iterator[Meter | None]:
        """Show a progress bar with speed and remaining time if stderr is a terminal; else give None.

        One line of text without rich; nothing if CKPT_PROGRESS is 0.
        """
        if self.as_json or not progress.wanted():
            yield None
            return
        console = _console(stderr=True)
        if console is None:
            with progress.line(one_line(title)) as show:
                yield show
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(one_line(title).replace("[", r"\["), total=None)
            shown = 0.0

            def update(done: int, total: int) -> None:
                nonlocal shown
                if done == total or time.monotonic() - shown > 0.1:
                    shown = time.monotonic()
                    bar.update(task, completed=done, total=total)

            yield update

    def _show(self, renderable: Any, *, soft_wrap: bool = False) -> None:
        assert self._rich is not None
        self._rich.print(renderable, soft_wrap=soft_wrap)


class Frame(Output):
    """What a terminal shows at one moment: collects what is printed, for `rich.live`. Needs rich."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Any] = []

    def _show(self, renderable: Any, *, soft_wrap: bool = False) -> None:
        self.parts.append(renderable)


def byte_counter(meter: Meter | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the bytes it is called with and shows the sum on `meter`."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        if meter is not None:
            meter(min(done, total), total)

    return add


def one_line(text: str) -> str:
    """Escape everything in `text` that is not printable: names and paths can hold line breaks and escape codes."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5 or (unit == "B" and count < 1000):
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def count(number: int) -> str:
    """Format a number with thousands separators."""
    return f"{number:,}"


def plural(number: int, what: str) -> str:
    """Format a number and what it counts."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 99.5:
        return f"{seconds:.2f} s" if seconds < 9.95 else f"{seconds:.1f} s"
    for unit, length in (("min", 60), ("h", 3600)):
        if seconds < 100 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def first_few(names: Sequence[str]) -> str:
    """List the first names, and say how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def short_repr(value: Any, most: int = 80) -> str:
    """Return `repr` of a value, cut to `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than some thousand digits
        text = f"a {type(value).__name__} with an integer of very many digits"
    return text if len(text) <= most else text[: most - 3] + "..."


def _console(stderr: bool = False) -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=stderr, highlight=False)  # honours NO_COLOR


_STYLES = MappingProxyType(
    {
        "published": "green",
        "whole": "bold green",
        "DAMAGED": "bold red",
        "pending": "yellow",
        "abandoned": "dim",
        "added": "green",
        "removed": "red",
        "changed": "yellow",
    }
)
"""Styles of rich for cells with these texts."""


def _rich_table(columns: Sequence[str], rows: list[list[str]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        overflow: Any = "ellipsis" if column.startswith(">") else "fold"
        table.add_column(
            Text(column.removeprefix(">")),
            justify="right" if column.startswith(">") else "left",
            overflow=overflow,
            no_wrap=column.startswith(">"),
        )
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table


def _aligned(columns: Sequence[str], rows: list[list[str]]) -> Iterator[str]:
    titles = [column.removeprefix(">") for column in columns]
    widths = [max(map(len, cells)) for cells in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        padded = [
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        yield "  ".join(padded).rstrip()


def _printable(text: str) -> str:
    """Escape what the encoding of stdout cannot represent."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int) and value.bit_length() > _MAX_PRINTED_BITS:
        return hex(value)
    return value if value is None or isinstance(value, bool | int | float | str) else _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except ValueError:
        return short_repr(value)
