"""The table, and the same as JSON."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from tools.bench.measure import Results, Round

__all__ = ["Row", "as_document", "environment", "print_report", "print_table"]

_WRITER_BYTES = 150e6
_WIDTH = 120  # in a file


@dataclass(frozen=True)
class Row:
    """One line: values of the rounds, to be read as `show` says; the limit they are compared with; the target, which
    the ratio should not exceed, or reach if `at_least`."""

    title: str
    values: list[float]
    limits: list[float] | None = None
    target: float | None = None
    show: Callable[[float], str] = lambda seconds: f"{1e3 * seconds:.0f} ms"
    at_least: bool = False

    @property
    def ratios(self) -> list[float]:
        """Of each round; empty without a limit."""
        return [] if self.limits is None else [v / n for v, n in zip(self.values, self.limits, strict=True)]

    @property
    def ratio(self) -> float | None:
        """The median of the ratios of each round: noise that lasts longer than a round cancels out."""
        return median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        if self.ratio is None or self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def document(self) -> dict[str, Any]:
        """The same for programs."""
        figures = {"values": self.values, "ratio": self.ratio, "target": self.target, "met": self.met}
        return {"title": self.title.strip(), **figures}

    def cells(self) -> list[str]:
        numbers = [self.show(pick(self.values)) for pick in (median, min, max)]
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        ratio += f" ({min(self.ratios):.2f}-{max(self.ratios):.2f})" if len(self.ratios) > 1 else ""
        target = "" if self.target is None else f"{'≥' if self.at_least else '≤'} {self.target:g}"
        return [self.title, *numbers, ratio, target, {True: "met", False: "missed", None: ""}[self.met]]


_HEADERS = ("", "median", "min", "max", "ratio", "target", "")


def _rows(results: Results) -> list[Row]:
    rounds = results.rounds

    def of(pick: Callable[[Round], float]) -> list[float]:
        return [pick(taken) for taken in rounds]

    copy, disk = of(lambda r: r.copy), of(lambda r: r.disk)
    memory_limit = [results.slots * results.staged_bytes + 0.0] * len(rounds)
    allowed = 1.05 * memory_limit[0] + _WRITER_BYTES * results.writers
    return [
        Row("limit: copy to warm memory, all threads", copy),
        Row("limit: O_DIRECT write + fsync, one file", disk),
        Row("limit: the same in as many files as a save", of(lambda r: r.disk_files), disk),
        Row("peer: torch.save + fsync (training waits)", of(lambda r: r.torch_save), disk),
        Row("stall, first save after warm-up", of(lambda r: r.first.stall), copy),
        Row("stall, steady", of(lambda r: r.steady.stall), copy, 1.5),
        Row("durable and published, from the call", of(lambda r: r.steady.durable), disk),
        Row("durable and published, after the stall", of(_after_stall), disk, 1.5),
        Row("  the same, to the limit of as many files", of(_after_stall), of(lambda r: r.disk_files)),
        Row("  until the writer begins", of(lambda r: _queued(r.steady.times))),
        Row("  data", of(lambda r: r.steady.times["write_s"])),
        Row("  sync, metadata", of(lambda r: r.steady.times["sync_s"])),
        Row("  manifest, publish, answer", of(lambda r: _published(r))),
        Row("warm-up call", of(lambda r: r.warmup)),
        Row("training step, no save in flight", of(lambda r: r.step)),
        Row("training step, save in flight", of(lambda r: r.step_saving), of(lambda r: r.step)),
        Row("one save costs training, stall included", of(lambda r: r.added)),
        Row("memory beside the state", of(lambda r: r.memory), memory_limit, allowed / memory_limit[0], _megabytes),
        Row("  largest writer, without shared memory", of(lambda r: r.largest_writer), None, None, _megabytes),
    ]


def _after_stall(taken: Round) -> float:
    return taken.steady.durable - taken.steady.stall


def _queued(times: dict[str, float]) -> float:
    return times["write_begin"] - times["begin"] - times["stall_s"]


def _published(taken: Round) -> float:
    times = taken.steady.times
    return taken.steady.durable - taken.steady.stall - _queued(times) - times["write_s"] - times["sync_s"]


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB"


def environment() -> dict[str, Any]:
    """What the figures depend on, without the name of the machine."""
    packages = ("numpy", "zarr", "tensorstore")
    versions = {name: importlib.metadata.version(name) for name in packages}
    system = {"python": platform.python_version(), "linux": platform.release(), "torch": torch.__version__}
    gpu = {"GPU": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {**system, **versions, "torch threads": torch.get_num_threads(), **gpu}


def as_document(results: Results) -> dict[str, Any]:
    return {"environment": environment(), "rows": [row.document() for row in _rows(results)], **asdict(results)}


def print_report(results: Results) -> None:
    title = (
        f"{results.staged_bytes / 1e9:.2f} GB in {results.tensors} tensors, world size 1, {len(results.rounds)} "
        f"rounds; "
        "ratio: median of the rounds, to the limit in the same round"
    )
    print_table(title, _rows(results))
    print(", ".join(f"{name} {value}" for name, value in environment().items()))


def print_table(title: str, rows: Iterable[Row]) -> None:
    lines = [row.cells() for row in rows]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for line in [list(_HEADERS), *lines]:
            print(f"{line[0]:<44}" + "".join(f"{cell:>10}" for cell in line[1:]))
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for number, header in enumerate(_HEADERS):
        table.add_column(header, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    console.print(table)
