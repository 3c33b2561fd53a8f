"""What happened in a run with faults, one row for each restart, from what the libraries recorded."""

from typing import Any

from rich import box
from rich.table import Table

from tools.demo.restarted import Recovery

__all__ = ["describe", "timeline"]

_FAULTS = {"exception": "exception", "hang": "hang", "kill": "kill -9"}
_SAVES = {"": "", "staged": ", save staged", "half": ", save half staged"}


def timeline(recoveries: list[Recovery]) -> Table:
    """Times are in milliseconds since the fault; they are those of rank 0, or of the last rank if all must be there."""
    table = Table(
        title=f"{len(recoveries)} restarts in one run, 2 ranks and a spare; times in ms since the fault",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for title in ("seen", "saves\ndecided", "trains\nagain", "step\ndone"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("goes\non at", justify="right")
    table.add_column("restored from, MB")
    for recovery in recoveries:
        table.add_row(*_cells(recovery))
    return table


def describe(recovery: Recovery) -> str:
    """What happened, and to whom."""
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
        describe(recovery) + saves,
        after(recovery.noticed),
        after(recovery.decided),
        after(recovery.resumed),
        after(float(first["time"]) if first else None),
        "-" if recovery.step is None else str(recovery.step),
        _sources(recovery.starts),
    ]


def _sources(starts: list[dict[str, Any]]) -> str:
    """Where each rank had the bytes from; said once if it is the same for all."""
    texts = [_source(start["restored"]) for start in starts]
    if len(set(texts)) <= 1:
        return texts[0] if texts else "-"
    return "\n".join(f"rank {start['rank']}: {text}" for start, text in zip(starts, texts, strict=True))


def _source(report: dict[str, Any] | None) -> str:
    if report is None:
        return "nothing saved yet"
    names = {"own_memory_bytes": "own memory", "neighbour_memory_bytes": "neighbour's", "storage_bytes": "storage"}
    parts = [f"{name} {report[key] / 1e6:.0f}" for key, name in names.items() if report[key]]
    return ", ".join(parts)
