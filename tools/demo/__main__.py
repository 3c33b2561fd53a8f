"""Train; kill all processes and resume; restart in process after faults, with saves and snapshots; compare results.

    python -m tools.demo [--root s3://BUCKET/PREFIX]

Checkpoints go below demo-out, or below a URL; what is there stays. Logs and pictures are always in demo-out. Ends with
four tables and a picture, or with a message and a non-zero exit code.
"""

import argparse
import shutil
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import ckpt
from tools.demo.report import (
    EVENTS,
    draw_loss,
    goodput_table,
    loss_segments,
    read_recoveries,
    recovery_table,
    summary_table,
)
from tools.demo.run import DemoError, Settings, TrainingRun

OUT = Path("demo-out")
STEPS = 36
SAVE_EVERY = 4
KILL_AFTER = 24  # the first save that may be in flight at the kill; should it be durable already, the next one
FAULTS = ["6:exception", "12:exception:staged", "18:hang", "24:exception:half", "28:kill:staged"]
SOFT_TIMEOUT_S = 8.0
LIMIT_S = 480.0
_RANKS, _ACTIVE = 3, 2
_WIDTH = 110  # of tables that do not go to a terminal


@dataclass(frozen=True)
class Killed:
    """A run that was killed when the save of `step` was in flight."""

    run: TrainingRun
    step: int
    newest: int  # published when the last process of the run had ended


class Demo:
    """The five runs, two of which share one checkpoint root: the one that is killed, and the one that resumes."""

    def __init__(self, console: Console, root: str | None = None) -> None:
        """`root` None: the checkpoints go below `OUT`."""
        self.console = console
        self.root = str(OUT) if root is None else f"{root.rstrip('/')}/{uuid.uuid4().hex[:12]}"
        self.deadline = time.monotonic() + LIMIT_S

    def run(self) -> None:
        began = time.monotonic()
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir()
        reference = Settings("uninterrupted", f"{self.root}/uninterrupted", STEPS, save_every=STEPS)
        interrupted = Settings("interrupted", f"{self.root}/checkpoints", STEPS, SAVE_EVERY)
        resumed = Settings("resumed", f"{self.root}/checkpoints", STEPS, SAVE_EVERY)
        survivor = self._with_faults("restarted")
        snapshots = self._with_faults("snapshots", "--snapshot-every", "1")
        columns = [TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=self.console) as progress:
            first = self._to_the_end(reference, progress, "1/5 without interruption")
            killed = self._until_killed(interrupted, progress, "2/5 saving, then kill -9")
            third = self._to_the_end(resumed, progress, "3/5 started again")
            fourth = self._to_the_end(survivor, progress, f"4/5 {len(FAULTS)} faults, restarted in process")
            fifth = self._to_the_end(snapshots, progress, "5/5 the same with snapshots")
        self._check(first, killed, third)
        self._check_same(first, [fourth, fifth])
        recoveries, with_snapshots = (read_recoveries(OUT / name, FAULTS) for name in ("restarted", "snapshots"))
        lost = [recovery.lost for recovery in with_snapshots if recovery.fault and recovery.lost is not None]
        if max(lost, default=0) > 1:
            raise DemoError(f"with a snapshot of each step the faults cost {lost} steps")
        for run in (third, fourth, fifth):
            arrays = _compare(first.settings.root, run.settings.root)
        self.console.print(summary_table(first, killed.run, third, killed.step))
        self.console.print(recovery_table(recoveries, f"a save every {SAVE_EVERY} steps"))
        self.console.print(recovery_table(with_snapshots, "a snapshot of each step"))
        self.console.print(goodput_table(OUT / "restarted"))
        self.console.print(draw_loss(OUT / "loss.png", first.of("step"), loss_segments(OUT / "restarted"), recoveries))
        self.console.print(
            f"[green]ok[/]: resumed from step {third.of('start')[0]['step']}, and restarted {len(recoveries)} and "
            f"{len(with_snapshots)} times without new processes. Each time the final weights and all {arrays} arrays "
            f"of the last step are bit-identical to the uninterrupted run. {time.monotonic() - began:.0f} s in all."
        )

    def _with_faults(self, name: str, *more: str) -> Settings:
        """Return a run of 3 processes, of which 2 train, that restarts after every fault; records go to `name`."""
        folder = OUT / name
        folder.mkdir()
        deaths = sum(":kill" in fault for fault in FAULTS)
        launcher = ["tools.demo.launch", "--ranks", str(_RANKS), "--may-die", str(deaths), "--"]
        launcher += [sys.executable, "-m", "tools.demo.faults", str(folder), *FAULTS, "--"]
        extra = ["--restart", "--active", str(_ACTIVE), "--soft-timeout", str(SOFT_TIMEOUT_S), *more]
        extra += ["--monitor-log", str(folder.resolve() / "monitor_{rank}.log"), "--events", str(folder / EVENTS)]
        root = f"{self.root}/{name}/checkpoints"
        return Settings(f"{name}-run", root, STEPS, SAVE_EVERY, extra=tuple(extra), launcher=tuple(launcher))

    def _to_the_end(self, settings: Settings, progress: Progress, title: str) -> TrainingRun:
        bar = progress.add_task(title, total=settings.steps)

        def show(record: dict[str, Any]) -> bool:
            if "step" in record:
                progress.update(bar, completed=record["step"])
            return False

        with TrainingRun(settings, OUT) as run:
            code = run.follow(self.deadline, show)
            if code != 0:
                raise DemoError(f"{settings.name}: ended with {code}\n{run.output()}")
            run.wait_for_silence(timeout=15)
        return run

    def _until_killed(self, settings: Settings, progress: Progress, title: str) -> Killed:
        bar = progress.add_task(title, total=settings.steps)

        def save_is_in_flight(record: dict[str, Any]) -> bool:
            progress.update(bar, completed=record["step"])
            wanted = record["event"] == "save" and record["step"] >= KILL_AFTER
            return wanted and not run.is_published(record["step"])

        with TrainingRun(settings, OUT) as run:
            code = run.follow(self.deadline, save_is_in_flight)
            if code is not None:
                raise DemoError(f"{settings.name}: ended with {code} before it could be killed\n{run.output()}")
            trainers = run.kill_trainers()
            step = int(run.records[-1]["step"])
            if trainers != settings.world_size:
                raise DemoError(f"{settings.name}: {trainers} trainers were there to kill, not {settings.world_size}")
            if run.follow(self.deadline, lambda record: False) == 0:
                raise DemoError(f"{settings.name}: torchrun reports success although its trainers were killed")
            run.wait_for_silence(timeout=15)
            newest = max(run.published_steps(), default=0)
        outcome = "still published" if newest == step else "given up"
        progress.update(bar, description=f"2/5 kill -9 at step {step}; save {outcome}")
        return Killed(run, step, newest)

    def _check(self, first: TrainingRun, killed: Killed, third: TrainingRun) -> None:
        start = third.of("start")[0]["step"]
        # The next start may publish the save that was in flight, if it was complete.
        if killed.newest == 0 or start not in (killed.newest, killed.step):
            raise DemoError(f"resumed from step {start}; killed at {killed.step}, published until {killed.newest}")
        self._check_same(first, [killed.run, third])

    def _check_same(self, first: TrainingRun, others: list[TrainingRun]) -> None:
        """Compare every loss, also of repeated steps, and the weights at the end."""
        losses = {record["step"]: record["loss"] for record in first.of("step")}
        digest = first.of("end")[0]["digest"]
        for run in others:
            for record in run.of("step"):
                step, loss = record["step"], record["loss"]
                if loss != losses[step]:
                    raise DemoError(f"{run.settings.name}: step {step}: loss {loss}, uninterrupted {losses[step]}")
            for end in run.of("end"):
                if end["digest"] != digest:
                    raise DemoError(f"{run.settings.name}: final weights {end['digest']}, uninterrupted {digest}")


def _compare(left: str, right: str) -> int:
    """Return the number of arrays of the last step of two roots; DemoError unless they are the same, bit by bit."""
    a, b = ckpt.open(left, STEPS), ckpt.open(right, STEPS)
    if only := set(a) ^ set(b):
        raise DemoError(f"in one of {left} and {right} only: {sorted(only)[:20]}")
    for name in a:
        x, y = a[name].read(), b[name].read()
        if (x.shape, x.dtype) != (y.shape, y.dtype) or x.tobytes() != y.tobytes():
            raise DemoError(f"{name} differs between {left} and {right}")
    if a.values_by_name != b.values_by_name:
        raise DemoError(f"what is not a tensor differs: {a.values_by_name} and {b.values_by_name}")
    if not len(a):
        raise DemoError(f"{left} and {right} hold no array")
    return len(a)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with faults; compare the results.")
    parser.add_argument("--root", help="URL for the checkpoints, as Checkpointer takes it (default: demo-out)")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    try:
        Demo(console, options.root).run()
    except DemoError as error:
        console.print("[red]failed[/]:", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
