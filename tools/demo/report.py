"""Report of the demo: what the libraries and the ranks have recorded, as tables and a picture.

    faults.jsonl      before each fault, by the rank that fails
    events.jsonl      after each restart, by `inprocess`
    ranks.jsonl       what each rank of train_lm.py logs; the restores in it are those that `ckpt` reports
    saves.jsonl       what each rank did with checkpoints, by `ckpt.sinks.JsonLines`

The times of all are of one clock.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

import ckpt
from tools.demo.run import DemoError, TrainingRun
from tools.inspect_ckpt.goodput import goodput, read_events

EVENTS = "saves.jsonl"
"""The events of `ckpt.observe` in the folder of the run with faults."""

Record = dict[str, Any]
_FAULTS = {"exception": "exception", "hang": "hang", "kill": "kill -9"}
_SAVES = {"": "", "staged": ", save staged", "half": ", save half staged"}
_LINE, _QUIET, _FAULT = "#1f6fb4", "#9a9a9a", "#c0392b"


# -- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """One restart. `fault` is None if it was not planned: on a busy machine a rank can seem to hang.

    `finished` is the last step that rank 0 has finished before. `pending` are the steps whose save was scheduled, and
    not known to be finalized, `published` those of them that were published all the same. `starts` are the records of
    the ranks that had their state back, by rank; they and `first_step` are missing if the next restart came at once.
    """

    fault: Record | None
    event: Record
    finished: int
    pending: list[int]
    published: frozenset[int]
    starts: list[Record]
    first_step: Record | None

    @property
    def noticed(self) -> float:
        """When the first surviving rank learned of it."""
        return float(self.event["time"] - self.event["seconds"]["total"])

    @property
    def decided(self) -> float:
        """When all saves in flight were published or given up, as rank 0 saw it."""
        after = ("health", "barrier")
        return float(self.event["time"] - sum(self.event["seconds"].get(name, 0.0) for name in after))

    @property
    def began(self) -> float:
        """When it happened, or was noticed if it was not planned."""
        return float(self.fault["time"]) if self.fault else self.noticed

    @property
    def resumed(self) -> float | None:
        """When the last rank had its state back and began to train."""
        return max((float(start["time"]) for start in self.starts), default=None)

    @property
    def step(self) -> int | None:
        """The step that was restored, on all ranks; 0 for the initial state."""
        return int(self.starts[0]["step"]) if self.starts else None

    @property
    def lost(self) -> int | None:
        """How many steps are done again."""
        return None if self.step is None else self.finished - self.step

    @property
    def saves(self) -> dict[int, str]:
        """The outcome of each save in flight."""
        return {step: "published" if step in self.published else "given up" for step in self.pending}


def read_recoveries(folder: Path, plan: list[str]) -> list[Recovery]:
    """Return all restarts in order; DemoError unless each planned fault happened and caused its own restart."""
    faults, events, ranks = (_read(folder / f"{name}.jsonl") for name in ("faults", "events", "ranks"))
    publications = [record for record in _read(folder / EVENTS) if record["event"] == "SavePublished"]
    if len(faults) != len(plan):
        raise DemoError(f"{len(faults)} faults of {len(plan)} happened: {faults}")
    recoveries = []
    began = [0.0, *(event["time"] for event in events), float("inf")]
    for number, event in enumerate(events, start=1):
        before = [r for r in ranks if began[number - 1] < r["time"] < began[number] and r["rank"] == 0]
        after = [r for r in ranks if began[number] < r["time"] < began[number + 1]]
        own = [fault for fault in faults if began[number - 1] < fault["time"] < event["time"]]
        published = {record["step"] for record in publications if record["time"] < event["time"]}
        recoveries.append(_recovery(own[-1] if own else None, event, before, after, published))
    caused = [recovery.fault for recovery in recoveries if recovery.fault]
    if caused != faults:
        raise DemoError(f"of the faults {faults} only {caused} were followed by a restart")
    return recoveries


def _recovery(
    fault: Record | None, event: Record, before: list[Record], after: list[Record], published: set[int]
) -> Recovery:
    starts = sorted((record for record in after if record["event"] == "start"), key=lambda start: int(start["rank"]))
    steps = [record for record in after if record["event"] == "step"]
    finished = max((record["step"] for record in before if record["event"] == "step"), default=0)
    saves, finalized = ([r["step"] for r in before if r["event"] == name] for name in ("save", "finalized"))
    pending = [step for step in saves if step not in finalized]
    restored = starts[0]["restored"] if starts else None
    if (
        restored is not None and not restored["in_memory"]
    ):  # all steps up to one that is read from storage are published
        published = published | {step for step in pending if step <= restored["step"]}
    first_step = min(steps, key=lambda step: float(step["time"]), default=None)
    return Recovery(fault, event, finished, pending, frozenset(published.intersection(pending)), starts, first_step)


def loss_segments(folder: Path) -> list[list[Record]]:
    """Return the steps of rank 0, divided where a restart went back."""
    records = [record for record in _read(folder / "ranks.jsonl") if record["rank"] == 0]
    cuts = [number for number, record in enumerate(records) if record["event"] == "start"]
    segments = [records[first:last] for first, last in pairwise([*cuts, len(records)])]
    return [[record for record in segment if record["event"] == "step"] for segment in segments]


def _read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- tables ------------------------------------------------------------------------------------------------------------


def summary_table(first: TrainingRun, killed: TrainingRun, third: TrainingRun, killed_at: int) -> Table:
    """Return the table of the runs that save. Times are of rank 0, without the first step after a start."""
    runs = (killed, third)
    saves: list[dict[str, Any]] = [record for run in runs for record in run.of("save")]
    steps = [record for run in runs for record in run.of("step")[1:]]
    durable_s = [
        run.published_at[save["step"]] - (save["time"] - save["stall_s"])
        for run in runs
        for save in run.of("save")
        if save["step"] in run.published_at and save["step"] != killed_at
    ]
    with ckpt.open(third.settings.root, third.settings.steps) as checkpoint:
        size, files = checkpoint.summary["bytes"], checkpoint.summary["files"]
    stall = [save["stall_s"] for save in saves]

    table = Table(title="train_lm.py, 2 ranks on CPU", title_justify="left", show_header=False)
    start = third.of("start")[0]["step"]
    table.add_row("steps", f"{third.settings.steps} (killed at {killed_at}, resumed from {start})")
    table.add_row("saves", f"{len(saves)}, every {third.settings.save_every} steps")
    table.add_row("stall per save", f"{_ms(stall)}, longest {1e3 * max(stall):.1f} ms")
    table.add_row("step, no save in flight", _ms(s["step_s"] for s in steps if not s["in_flight"]))
    table.add_row("step, save in flight", _ms(s["step_s"] for s in steps if s["in_flight"]))
    table.add_row("step, run without saves", _ms(s["step_s"] for s in first.of("step")[1:]))
    table.add_row("checkpoint", f"{_mb(size)} in {files} files")
    rate = f"{_mb(size / median(durable_s))}/s, {_ms(durable_s)}" if durable_s else "-"
    table.add_row("to durable, from the call", rate)
    return table


def _ms(seconds: Iterable[float]) -> str:
    values = list(seconds)
    return f"{1e3 * median(values):.1f} ms (median of {len(values)})" if values else "-"


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def recovery_table(recoveries: list[Recovery], keeps: str = "saves") -> Table:
    """Return a line for each restart: milliseconds since the fault, on rank 0, or on the last rank if all take part.

    `keeps` says what there is to go back to.
    """
    table = Table(
        title=f"{len(recoveries)} restarts in one run with {keeps}, 2 ranks and a spare; times in ms since the fault",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for title in ("seen", "saves\ndecided", "trains\nagain", "step\ndone"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("goes\non at", justify="right")
    table.add_column("steps\nlost", justify="right")
    table.add_column("restored from, MB")
    for recovery in recoveries:
        table.add_row(*_cells(recovery))
    return table


def goodput_table(folder: Path) -> Table:
    """Return what the time of the run with faults was for, as its events tell."""
    times = goodput(read_events([str(folder / EVENTS)]).events)
    table = Table(
        title=f"goodput of this run: {100 * times.goodput:.1f}% of {times.wall_s:.1f} s",
        title_justify="left",
        show_header=False,
        box=box.SIMPLE,
    )
    for row in times.rows():
        table.add_row(*row)
    return table


def _describe(recovery: Recovery) -> str:
    """Name the fault, and the save in flight."""
    if recovery.fault is None:
        reason = recovery.event["reasons"][0]
        return f"unplanned: {reason['interruption'].lower()}"
    fault = recovery.fault
    return _FAULTS[fault["kind"]] + _SAVES[fault["save"]]


def _cells(recovery: Recovery) -> list[str]:
    def after(moment: float | None) -> str:
        return "-" if moment is None else f"{1e3 * (moment - recovery.began):.0f}"

    saves = "".join(f"\n  save of step {step} {outcome}" for step, outcome in recovery.saves.items())
    first = recovery.first_step
    return [
        str(recovery.fault["step"]) if recovery.fault else "",
        _describe(recovery) + saves,
        after(recovery.noticed),
        after(recovery.decided),
        after(recovery.resumed),
        after(float(first["time"]) if first else None),
        "-" if recovery.step is None else str(recovery.step),
        "-" if recovery.lost is None else str(recovery.lost),
        _sources(recovery.starts),
    ]


def _sources(starts: list[dict[str, Any]]) -> str:
    """Name the sources of the bytes of each rank; once if they are the same for all."""
    texts = [_source(start["restored"]) for start in starts]
    if len(set(texts)) <= 1:
        return texts[0] if texts else "-"
    return "\n".join(f"rank {start['rank']}: {text}" for start, text in zip(starts, texts, strict=True))


def _source(report: dict[str, Any] | None) -> str:
    if report is None:
        return "nothing saved yet"
    names = {"own_memory_bytes": "own memory", "neighbour_memory_bytes": "neighbour's"}
    names |= {"remote_memory_bytes": "another node's", "storage_bytes": "storage"}
    parts = [f"{name} {report[key] / 1e6:.0f}" for key, name in names.items() if report[key]]
    return ", ".join(parts)


# -- picture -----------------------------------------------------------------------------------------------------------


def draw_loss(file: Path, undisturbed: list[Record], segments: list[list[Record]], recoveries: list[Recovery]) -> str:
    """Draw the loss of both runs over time, with the faults. Return a sentence about it, also without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is missing (pip install '.[plot]')"
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    loss, steps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    begin, quiet_begin = float(segments[0][0]["time"]), float(undisturbed[0]["time"])
    expected = {record["step"]: record["loss"] for record in undisturbed}
    done = [record for segment in segments for record in segment]
    times = [float(record["time"]) - begin for record in done]
    ring = {"ls": "", "marker": "o", "ms": 9, "mfc": "none", "mec": _QUIET}
    loss.plot(times, [expected[record["step"]] for record in done], **ring, label="the same step, undisturbed run")
    quiet = [float(record["time"]) - quiet_begin for record in undisturbed]
    steps.plot(quiet, [record["step"] for record in undisturbed], color=_QUIET, lw=1.5, label="undisturbed run")
    for axes, key in ((loss, "loss"), (steps, "step")):
        for number, segment in enumerate(filter(None, segments)):
            seconds = [float(record["time"]) - begin for record in segment]
            label = "run with faults" if number == 0 else None
            axes.plot(seconds, [record[key] for record in segment], ".-", color=_LINE, lw=1.5, ms=5, label=label)
        for number, recovery in enumerate(recoveries):
            end = recovery.resumed or recovery.event["time"]
            label = "from a fault until it trains again" if number == 0 else None
            axes.axvspan(recovery.began - begin, end - begin, color=_FAULT, alpha=0.25, lw=0, label=label)
            axes.axvline(recovery.began - begin, color=_FAULT, lw=1, ls="--")
        axes.grid(alpha=0.25)
    for number, recovery in enumerate(recoveries, start=1):
        at = (recovery.began - begin, 1.0)
        box = {"boxstyle": "circle", "fc": "white", "ec": _FAULT}
        loss.annotate(
            str(number), at, xycoords=("data", "axes fraction"), ha="center", va="center", color=_FAULT, bbox=box
        )
    listed = "\n".join(f"{n}  {_describe(recovery)}" for n, recovery in enumerate(recoveries, start=1))
    loss.text(1.01, 0.98, listed, transform=loss.transAxes, va="top", color=_FAULT)
    handles, labels = loss.get_legend_handles_labels()
    loss.legend(handles, labels, loc="lower left", bbox_to_anchor=(1.0, 0.0), frameon=False)
    steps.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    loss.set_ylabel("loss")
    steps.set_ylabel("step")
    steps.set_xlabel("seconds since the first step")
    figure.suptitle(f"{len(recoveries)} restarts in the same processes: every loss is that of the undisturbed run")
    figure.savefig(file, dpi=110)
    return f"picture: {file}"
