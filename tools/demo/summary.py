"""The table at the end of the demo."""

from collections.abc import Iterable
from statistics import median
from typing import Any

from rich.table import Table

from tools.demo.training import TrainingRun


def _ms(seconds: Iterable[float]) -> str:
    values = list(seconds)
    return f"{1e3 * median(values):.1f} ms (median of {len(values)})" if values else "-"


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def summary_table(first: TrainingRun, killed: TrainingRun, third: TrainingRun, killed_at: int) -> Table:
    """Stalls and step times are those of rank 0; the first step after a start is left out of the step times."""
    runs = (killed, third)
    saves: list[dict[str, Any]] = [record for run in runs for record in run.of("save")]
    steps = [record for run in runs for record in run.of("step")[1:]]
    durable_s = [
        run.published_at[save["step"]] - (save["time"] - save["stall_s"])
        for run in runs
        for save in run.of("save")
        if save["step"] in run.published_at and save["step"] != killed_at
    ]
    folder = third.settings.root / f"step_{third.settings.steps:08d}"
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    stall = [save["stall_s"] for save in saves]

    table = Table(title="train_lm.py, 2 ranks on CPU", title_justify="left", show_header=False)
    start = third.of("start")[0]["step"]
    table.add_row("steps", f"{third.settings.steps} (killed at {killed_at}, resumed from {start})")
    table.add_row("saves", f"{len(saves)}, every {third.settings.save_every} steps")
    table.add_row("stall per save", f"{_ms(stall)}, longest {1e3 * max(stall):.1f} ms")
    table.add_row("step, no save in flight", _ms(s["step_s"] for s in steps if not s["in_flight"]))
    table.add_row("step, save in flight", _ms(s["step_s"] for s in steps if s["in_flight"]))
    table.add_row("step, run without saves", _ms(s["step_s"] for s in first.of("step")[1:]))
    table.add_row("checkpoint", f"{_mb(size)} in {len(files)} files")
    rate = f"{_mb(size / median(durable_s))}/s, {_ms(durable_s)}" if durable_s else "-"
    table.add_row("to durable, from the call", rate)
    return table
