"""`timeline`: show where the time of each save went, from what its parts recorded."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict

from ckpt.errors import CheckpointError
from ckpt.storage.step_source import StepSource

from .output import Exit, Output, duration, size
from .root import any_root, steps_of
from .step import PartTimes, SaveTimes, part_times, summary_of

HELP = "show how long each save made training wait, and how long it took to write"

_COMMIT_NOTE = (
    "commit: from the last part to the change time of the root's zarr.json, written right before the rename; in an "
    "object store, to the record of the step"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the times to this file (needs matplotlib)")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = any_root(arguments.root)
    saves, problems = [], []
    for step in steps_of(root):
        try:
            saves.append(save_times(root.source_of(step), root.published_s(step)))
        except (CheckpointError, KeyError, TypeError, OSError) as error:
            problems.append(f"step {step}: {error}")
    rows = [
        (
            str(save.step),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(save.begin)),
            str(save.ranks),
            size(save.bytes),
            duration(save.stall_s),
            duration(save.wait_s),
            duration(save.stage_s),
            duration(save.queue_s),
            duration(save.write_s),
            duration(save.sync_s),
            "?" if save.commit_s is None else duration(save.commit_s),
            f"{size(save.rate)}/s",
        )
        for save in saves
    ]
    if rows:
        columns = ("stall", "=wait", "+stage", "queue", "write", "sync", "commit", "rate")
        output.table((">step", "begin", ">ranks", ">size", *(f">{name}" for name in columns)), rows)
        output.line(
            "each the slowest rank; training waits during the stall only (wait: plan, and a free slot). "
            + _COMMIT_NOTE,
            "dim",
        )
    else:
        output.line("there is no published step")
    for problem in problems:
        output.line(problem, "bold red")
    if arguments.plot and saves:
        from .plots import plot_timeline

        plot_timeline(saves, arguments.plot)
        output.line(f"drew {arguments.plot}")
    output.json({"root": root.path, "commit": _COMMIT_NOTE, "saves": [asdict(s) for s in saves], "problems": problems})
    return Exit.DAMAGED if problems else Exit.WHOLE


def save_times(step: StepSource, published_s: float, parts: Sequence[PartTimes] | None = None) -> SaveTimes:
    """Return the times of the save of a step, from those of its `parts`, which are read if they are not given.

    CheckpointCorruptError, StorageError.
    """
    summary = summary_of(step)
    parts = part_times(step, summary) if parts is None else parts
    begin = min(part.write_begin for part in parts)
    written = max(part.written for part in parts)
    commit_s = published_s - written
    return SaveTimes(
        step=summary["step"],
        begin=min(part.begin for part in parts),
        ranks=summary["world_size"],
        bytes=summary["bytes"],
        wait_s=max(part.wait_s for part in parts),
        stage_s=max(part.stage_s for part in parts),
        stall_s=max(part.stall_s for part in parts),
        queue_s=max(0.0, max(part.write_begin - part.begin - part.stall_s for part in parts)),
        write_s=max(part.write_s for part in parts),
        sync_s=max(part.sync_s for part in parts),
        commit_s=max(0.0, commit_s) if -0.05 <= commit_s < 3600 else None,
        rate=summary["bytes"] / max(written - begin, 1e-6),
    )
