"""The loss of both runs over time, with the faults in it, as a picture."""

from pathlib import Path
from typing import Any

from tools.demo.restarted import Recovery
from tools.demo.timeline import describe

__all__ = ["draw"]

Record = dict[str, Any]
_LINE, _QUIET, _FAULT = "#1f6fb4", "#9a9a9a", "#c0392b"


def draw(file: Path, undisturbed: list[Record], segments: list[list[Record]], recoveries: list[Recovery]) -> str:
    """Write the picture and return a sentence about it; also where there is no matplotlib to draw it."""
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
    listed = "\n".join(f"{n}  {describe(recovery)}" for n, recovery in enumerate(recoveries, start=1))
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
