"""Train, kill, resume, compare. Ends with a table, or with a message and a non-zero exit code."""

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools.demo.compare import compare_checkpoints
from tools.demo.summary import summary_table
from tools.demo.training import DemoError, Settings, TrainingRun

OUT = Path("demo-out")
STEPS = 60
SAVE_EVERY = 5
KILL_AFTER = 40  # the first save that may be in flight at the kill; should it be durable already, the next one
LIMIT_S = 170.0


@dataclass(frozen=True)
class Killed:
    """A run that was killed when the save of `step` was in flight."""

    run: TrainingRun
    step: int
    newest: int  # published when the last process of the run had ended


class Demo:
    """The three runs. `interrupted` and `resumed` share one checkpoint root."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.deadline = time.monotonic() + LIMIT_S

    def run(self) -> None:
        began = time.monotonic()
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir()
        reference = Settings("uninterrupted", OUT / "uninterrupted", STEPS, save_every=STEPS)
        interrupted = Settings("interrupted", OUT / "checkpoints", STEPS, SAVE_EVERY)
        resumed = Settings("resumed", OUT / "checkpoints", STEPS, SAVE_EVERY)
        columns = [TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=self.console) as progress:
            first = self._to_the_end(reference, progress, "1/3 without interruption")
            killed = self._until_killed(interrupted, progress, "2/3 saving, then kill -9")
            third = self._to_the_end(resumed, progress, "3/3 started again")
        self._check(first, killed, third)
        arrays = compare_checkpoints(*(run.settings.root / f"step_{STEPS:08d}" for run in (first, third)))
        self.console.print(summary_table(first, killed.run, third, killed.step))
        self.console.print(
            f"[green]ok[/]: resumed from step {third.of('start')[0]['step']}; final weights and all {arrays} arrays of "
            f"the last checkpoint are bit-identical to the uninterrupted run. {time.monotonic() - began:.0f} s in all."
        )

    def _to_the_end(self, settings: Settings, progress: Progress, title: str) -> TrainingRun:
        bar = progress.add_task(title, total=settings.steps)

        def show(record: dict[str, Any]) -> bool:
            if "step" in record:
                progress.update(bar, completed=record["step"])
            return False

        with TrainingRun(settings, OUT) as run:
            code = run.follow(self.deadline, show)
            if code != 0:
                raise DemoError(f"{settings.name}: torchrun ended with {code}\n{run.output()}")
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
        progress.update(bar, description=f"2/3 kill -9 at step {step}; save {outcome}")
        return Killed(run, step, newest)

    def _check(self, first: TrainingRun, killed: Killed, third: TrainingRun) -> None:
        start = third.of("start")[0]["step"]
        # The next start may publish the save that was in flight, if it was complete.
        if killed.newest == 0 or start not in (killed.newest, killed.step):
            raise DemoError(f"resumed from step {start}; killed at {killed.step}, published until {killed.newest}")
        losses = {record["step"]: record["loss"] for record in first.of("step")}
        for record in killed.run.of("step") + third.of("step"):
            if record["loss"] != losses[record["step"]]:
                raise DemoError(f"step {record['step']}: loss {record['loss']}, uninterrupted {losses[record['step']]}")
        digests = [run.of("end")[0]["digest"] for run in (first, third)]
        if digests[0] != digests[1]:
            raise DemoError(f"final weights differ: sha256 {digests[0]} uninterrupted, {digests[1]} resumed")


def main() -> int:
    console = Console()
    try:
        Demo(console).run()
    except DemoError as error:
        console.print("[red]failed[/]:", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
