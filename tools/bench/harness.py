"""What all kinds of measurement share: rounds, ratios to a limit of the same round, tables and JSON."""

import argparse
import csv
import importlib.metadata
import json
import math
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

UNBOUNDED_FAULTS: Mapping[str, Any] = MappingProxyType(
    {"max_same_faults": None, "max_faults_per_hour": None, "max_backoff": timedelta(0)}
)
"""Arguments of the wrapper, for jobs that measure one fault after the other."""

_WIDTH = 1000  # more than any table


# -- options -----------------------------------------------------------------------------------------------------------


def positive(text: str) -> float:
    """Parse a number greater than 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0")
    return value


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are not less than `least`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        return value

    parse.__name__ = "integer"  # in argparse's message about text that is no number
    return parse


def add_size_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add `--gb` and `--rounds`."""
    parser.add_argument("--gb", type=positive, default=1.0, help="size of the state in 1e9 bytes (default: 1)")
    help_text = f"rounds that count, after one that does not (default: {rounds})"
    parser.add_argument("--rounds", type=at_least(1), default=rounds, metavar="N", help=help_text)


def add_disk_option(parser: argparse.ArgumentParser) -> None:
    """Add `--folder`."""
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured (default: here)")


# -- rounds ------------------------------------------------------------------------------------------------------------


def rounds(count: int, label: str = "round") -> Iterator[bool]:
    """Yield `count` + 1 times, whether the round counts: the first one warms up. Shows progress on standard error."""
    for number in range(count + 1):
        print(f"\r{label} {number} of {count}", end="", file=sys.stderr, flush=True)
        yield number > 0
    print(file=sys.stderr)


@contextmanager
def temporary_folder(disk: Path) -> Iterator[Path]:
    """Make an empty folder on the disk of the folder `disk`, and remove it in the end."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=disk) as name:
        yield Path(name).resolve()


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest of the values that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


# -- results -----------------------------------------------------------------------------------------------------------


def milliseconds(seconds: float, digits: int = 0) -> str:
    return f"{1e3 * seconds:.{digits}f} ms"


def kilobytes(value: float) -> str:
    """Return a number of bytes in kB."""
    return f"{value / 1e3:.0f} kB"


def megabytes(count: float, digits: int = 0) -> str:
    return f"{count / 1e6:.{digits}f} MB"


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


@dataclass(frozen=True)
class Row:
    """One line of a table.

    `values` and `limits` are of the same rounds, or `limits` is None. `target` is what the ratio of values to limits
    should not exceed, or should reach with `at_least`. `show` formats a value.
    """

    title: str
    values: list[float]
    limits: list[float] | None = None
    target: float | None = None
    show: Callable[[float], str] = milliseconds
    at_least: bool = False

    @property
    def ratios(self) -> list[float]:
        """The ratio to the limit in each round; empty without a limit."""
        return [] if self.limits is None else [v / n for v, n in zip(self.values, self.limits, strict=True)]

    @property
    def ratio(self) -> float | None:
        """The median of the ratios of each round: noise that lasts longer than a round cancels out."""
        return median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.ratio is None or self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def document(self) -> dict[str, Any]:
        """Return the row as it is written to JSON."""
        figures = {"values": self.values, "ratio": self.ratio, "target": self.target, "met": self.met}
        return {"title": self.title.strip(), **figures}

    def cells(self) -> list[str]:
        """Return one text per column of the table."""
        summaries = (median(self.values), percentile(self.values, 0.95), min(self.values), max(self.values))
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        ratio += f" ({min(self.ratios):.2f}-{max(self.ratios):.2f})" if len(self.ratios) > 1 else ""
        target = "" if self.target is None else f"{'≥' if self.at_least else '≤'} {self.target:g}"
        met = {True: "met", False: "missed", None: ""}[self.met]
        return [self.title, *map(self.show, summaries), ratio, target, met]


_HEADERS = ("", "median", "p95", "min", "max", "ratio", "target", "")


def print_report(title: str, rows: Iterable[Row]) -> None:
    """Print the table, and below it what the figures depend on."""
    print_table(title, rows)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))


def print_table(title: str, rows: Iterable[Row]) -> None:
    """Print one line per row, with rich where it is installed."""
    lines = [row.cells() for row in rows]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for line in [list(_HEADERS), *lines]:
            print(f"{line[0]:<50}" + "".join(f"{cell:>12}" for cell in line[1:]))
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for number, header in enumerate(_HEADERS):
        table.add_column(header, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, Console(width=_WIDTH).measure(table).maximum)  # rich cuts what is longer
    console.print(table)


def environment() -> dict[str, Any]:
    """Return what the figures depend on, without the name of the machine."""
    packages = ("numpy", "zarr", "tensorstore")
    versions = {name: importlib.metadata.version(name) for name in packages}
    system = {"python": platform.python_version(), "linux": platform.release(), "torch": torch.__version__}
    gpu = {"GPU": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {**system, **versions, "torch threads": torch.get_num_threads(), **gpu}


def write_json(path: Path | None, values: dict[str, Any]) -> None:
    """Write the environment and `values` to `path`, if there is one. Rows become their documents."""
    if path is not None:
        text = json.dumps({"environment": environment(), **values}, indent=1, default=Row.document)
        path.write_text(text + "\n")


def replace_between_markers(path: Path, text: str, begin: str, end: str) -> None:
    """Replace what is between two markers of a document; ValueError if it does not have both of them once."""
    document = path.read_text()
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"{path} needs the lines {begin!r} and {end!r}, once each")
    head, rest = document.split(begin)
    _, tail = rest.split(end)
    path.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}")


def publish(page: Path, text: str, begin: str, end: str, prefix: str, shown: Container[str]) -> None:
    """Write a report: what decides into a page, all tables beside it as data.

    Between the markers of the page comes what stands before the first heading of `text`, and the sections whose titles
    are in `shown`. Each section is also a file ``PREFIX-TITLE.csv`` in the folder that is named like the page.
    """
    first, *sections = re.split(r"^### ", text, flags=re.MULTILINE)
    titled = [(section.partition("\n")[0].strip(), section.partition("\n")[2].strip()) for section in sections]
    parts = [first.strip(), *(f"### {title}\n\n{body}" for title, body in titled if title in shown)]
    replace_between_markers(page, "\n\n".join(parts), begin, end)
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{prefix}-*.csv"):
        old.unlink()
    for title, body in titled:
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        with (folder / f"{prefix}-{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(_rows(body))


def _rows(body: str) -> list[list[str]]:
    """Return the lines of Markdown as rows: the cells of a table, or a sentence in one cell."""
    rows = []
    for line in filter(None, map(str.strip, body.splitlines())):
        cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")] if line[0] == "|" else [line]
        if not all(re.fullmatch(r"[-: ]+", cell) for cell in cells):
            rows.append(cells)
    return rows
