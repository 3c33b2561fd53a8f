"""Measure what checkpoints and restarts cost, beside the limits of this machine in the same run.

    python -m tools.bench [KIND ...] [options]    without a KIND: systems
    python -m tools.bench --list                  the kinds
    python -m tools.bench KIND --help             the options of a kind

Several kinds run one after the other, each in a process of its own; all of them must know the options given.
A figure that misses its target is printed as such, and never makes the command fail.
"""

import argparse
import importlib
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path


@dataclass(frozen=True)
class Kind:
    """A kind of measurement. `module` has two functions: `add_options(parser)` and `run(options)`.

    All kinds have the option `--json`; `run` writes the file.
    """

    summary: str
    module: str


KINDS = {
    "systems": Kind(
        "saves and loads, beside those of other libraries: stall, time to durable, load, memory, files",
        "tools.bench.systems.command",
    ),
    "save": Kind(
        "one save in detail: stall, time to durable, what it costs training, memory",
        "tools.bench.save",
    ),
    "small": Kind(
        "CPU that a save of many small tensors takes of training: in dicts, a module, an optimizer",
        "tools.bench.small",
    ),
    "compression": Kind(
        "saves with and without compression: size, processor time, stall, restore; of a model that was trained",
        "tools.bench.compression",
    ),
    "snapshot": Kind(
        "snapshots: stall, what one before each step costs, and a restart from one; one rank and two",
        "tools.bench.snapshot",
    ),
    "replicas": Kind(
        "replicas of snapshots: what they add to training that makes a snapshot before each step; two ranks",
        "tools.bench.replicas",
    ),
    "objects": Kind(
        "a save to an object store and a restore, beside plain puts and gets by the same client; requests",
        "tools.bench.objects",
    ),
    "validate": Kind(
        "`inspect_ckpt validate`, beside plain reads of the same files; commands on very many tensors",
        "tools.bench.validate",
    ),
    "restart": Kind(
        "from a fault until the wrapped function runs again in the same processes; what idling costs",
        "tools.bench.restart",
    ),
    "recover": Kind(
        "from a fault to the first finished step with the state restored, beside a relaunch by torchrun",
        "tools.bench.recover",
    ),
    "nodes": Kind(
        "from the loss of a node to training on a spare, beside a relaunch of the job by torchrun",
        "tools.bench.nodes",
    ),
    "coordination": Kind(
        "the coordination server in a job of thousands of simulated ranks",
        "tools.bench.coordination",
    ),
    "sections": Kind(
        "monitoring of sections: cost of events, delay of detection, cost of a monitor",
        "tools.bench.sections",
    ),
    "trees": Kind(
        "this tree beside another checkout of this code, in turns: stall, durable, snapshots, restores, memory",
        "tools.bench.trees",
    ),
    "scale": Kind(
        "planning and commit check of a save of thousands of simulated ranks",
        "tools.bench.scale",
    ),
    "goodput": Kind(
        "the share of its time that a large job trains in spite of faults: simulated, with costs measured here",
        "tools.bench.goodput.command",
    ),
    "pace": Kind(
        "how often to save: what `ckpt.Optimal` loses beside fixed intervals, simulated and in a job with faults",
        "tools.bench.pace",
    ),
}
_DEFAULT = "systems"


def main(arguments: list[str] | None = None) -> int:
    """Run the kinds that are named first in `arguments`, with the options that follow; return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    kinds = list(takewhile(lambda word: not word.startswith("-"), words))
    rest = words[len(kinds) :]
    if not kinds and rest and rest[0] in ("-h", "--help", "--list"):
        print(_kinds() if rest[0] == "--list" else f"{(__doc__ or '').rstrip()}\n\nKinds:\n{_kinds()}")
        return 0
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        print(f"unknown kind of measurement: {', '.join(unknown)}; there are:\n{_kinds()}", file=sys.stderr)
        return 2
    if len(kinds) <= 1:
        kind = kinds[0] if kinds else _DEFAULT
        importlib.import_module(KINDS[kind].module).run(_parse(kind, rest))
        return 0
    return _run_each(kinds, rest)


def _run_each(kinds: list[str], rest: list[str]) -> int:
    """Run the kinds in processes of their own: a kind that forks its ranks needs a process with one thread."""
    for kind in kinds:
        if _parse(kind, rest).json is not None:
            print("--json: needs exactly one kind of measurement", file=sys.stderr)
            return 2
    for kind in kinds:
        print(f"{kind}: {KINDS[kind].summary}", flush=True)
        command = [sys.executable, "-m", "tools.bench", kind, *rest]
        if code := subprocess.run(command, check=False).returncode:
            return code
    return 0


def _parse(kind: str, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m tools.bench {kind}", description=KINDS[kind].summary)
    importlib.import_module(KINDS[kind].module).add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every value of every round to FILE")
    return parser.parse_args(words)


def _kinds() -> str:
    width = max(map(len, KINDS))
    return "\n".join(f"    {kind:<{width}}  {found.summary}" for kind, found in KINDS.items())


if __name__ == "__main__":
    sys.exit(main())
