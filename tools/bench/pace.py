"""How often to save: `ckpt.Optimal` beside fixed intervals, in simulated jobs, and in a real one with faults.

The real job trains in one process, with steps that wait instead of computing, and a state that takes a while to gather,
as the training time that a save costs. It raises at times that are drawn from an exponential distribution, the same
for each policy, restarts in its process, and restores. Lost is the time that is not spent on steps that count.
"""

import argparse
import random
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch

import ckpt
import inprocess
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from tools.bench.goodput.pace import PacedJob, table
from tools.bench.harness import Row, at_least, percent, positive, print_report, temporary_folder, write_json

_STEP_S = 0.01
_SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the interval of Young
_AT_MOST = 1.05  # of what the best fixed interval loses
_SIMULATED_FAULTS = 300


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    parser.add_argument("--cost", type=positive, default=0.1, metavar="S", help="of a save (default: 0.1 s)")
    parser.add_argument("--mtbf", type=positive, default=10.0, metavar="S", help="between faults (default: 10 s)")
    parser.add_argument("--faults", type=at_least(1), default=25, metavar="N", help="of each round (default: 25)")
    parser.add_argument("--rounds", type=at_least(1), default=3, metavar="N", help="with other faults (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the checkpoints (default: here)")


def run(given: argparse.Namespace) -> None:
    """Simulate, run the real job with all policies in turns, and print what each loses."""
    simulated = [
        Row(f"simulated: {name}, Optimal", [optimal], [least], _AT_MOST, percent)
        for name, _, least, optimal in table(_SIMULATED_FAULTS, given.seed)
    ]
    young_s = (2 * given.cost * given.mtbf) ** 0.5
    policies: dict[str, ckpt.Pace] = {
        f"every {young_s * times:.2f} s": ckpt.Seconds(young_s * times) for times in _SWEEP
    }
    policies["Optimal"] = ckpt.Optimal(mtbf=timedelta(seconds=given.mtbf))
    lost: dict[str, list[float]] = {name: [] for name in policies}
    for number in range(given.rounds):
        job = PacedJob("real", given.cost, 0.0, 0.0, given.mtbf)
        for name, policy in policies.items():
            with temporary_folder(given.folder) as root:
                lost[name].append(lost_in_a_job(job, policy, root, given.faults, given.seed + number))
    best = min((name for name in lost if name != "Optimal"), key=lambda name: median(lost[name]))
    rows = [
        Row(f"real: {name}", values, lost[best], _AT_MOST if name == "Optimal" else None, percent)
        for name, values in lost.items()
    ]
    print_report("training time lost; ratio: to the best fixed interval", [*simulated, *rows])
    write_json(given.json, {"rows": [*simulated, *rows]})


class _Gathered:
    """A state that takes `cost_s` to gather."""

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s
        self._weights = torch.zeros(1000)

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self._cost_s)
        return {"weights": self._weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._weights.copy_(state_dict["weights"])


def lost_in_a_job(job: PacedJob, policy: ckpt.Pace, root: Path, faults: int, seed: int) -> float:
    """Return the share of time that a real job loses until it has restored after so many faults."""
    rng = random.Random(seed)
    until_fault = [rng.expovariate(1 / job.mtbf_s) for _ in range(faults)]
    step_times: list[float] = []
    with ckpt.Checkpointer(root, save_every=policy, keep=2) as checkpointer:

        def train(call: inprocess.CallWrapper) -> int:
            state = _Gathered(0.0 if call.iteration == faults else job.cost_s)
            step: int = checkpointer.restore({"state": state}) or 0
            if call.iteration == faults:
                return step
            ends_at = time.monotonic() + until_fault[call.iteration]
            while time.monotonic() < ends_at:
                began = time.monotonic()
                time.sleep(_STEP_S)
                step_times.append(time.monotonic() - began)
                step += 1
                checkpointer.step({"state": state}, step)
            raise RuntimeError("a fault")

        wrapper = inprocess.Wrapper(
            abort=CheckpointAbort(checkpointer),
            finalize=CheckpointFinalize(checkpointer),
            initialize=inprocess.initialize.RetryController(max_iterations=faults + 1),
            max_same_faults=None,
            max_faults_per_hour=None,
            max_backoff=timedelta(0),
        )
        began = time.monotonic()
        steps = wrapper(train)()
        assert steps is not None
        return 1 - steps * median(step_times) / (time.monotonic() - began)
