"""Which jobs the suite runs, one after the other, and what comes of each."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from tools.bench.suite.jobs import JobResult, run_job
from tools.bench.suite.spec import JobSpec
from tools.bench.systems import SYSTEMS

__all__ = ["KINDS", "Measured", "Options", "Scenario", "measure"]

_REPOSITORY = Path(__file__).resolve().parents[3]


KINDS = ("saving", "small", "reshard", "scale")


@dataclass(frozen=True)
class Options:
    """What to measure. `only` are some of `KINDS`; the state is on each of `devices` in turn.

    `parts`, `ranks` and `tensors` are of the simulated large job.
    """

    gigabytes: tuple[float, ...]
    world_sizes: tuple[int, ...]
    systems: tuple[str, ...]
    rounds: int
    folder: Path
    reshard: tuple[int, int]
    count: int
    ranks: int
    parts: int
    tensors: int
    sharded_commit: bool
    devices: tuple[str, ...] = ("cpu",)
    step_s: float = 0.05
    most_steps: int = 100
    only: tuple[str, ...] = KINDS


@dataclass
class Scenario:
    """The results of one job (or of two that belong together). `failures` says why a system has none."""

    title: str
    kind: str
    total_bytes: float
    world_size: int
    sharded: bool
    turns: JobResult = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


@dataclass
class Measured:
    """All of one run. `scale` has the seconds and bytes of the simulated large job, by what was done."""

    scenarios: list[Scenario] = field(default_factory=list)
    scale: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    scale_of: dict[str, int] = field(default_factory=dict)


def measure(options: Options, folder: Path, keep: Callable[[Measured], None]) -> Measured:
    """Runs everything; `keep` gets what there is after each job. Files stay in `folder`, most of them empty."""
    measured = Measured(scale_of={"ranks": options.ranks, "parts": options.parts, "tensors": options.tensors})
    for number, spec in enumerate(_saving_jobs(options, folder) if "saving" in options.only else ()):
        print(f"\njob {number + 1}: {_title(spec)}", file=sys.stderr)
        scenario = _run(spec, _title(spec))
        counts = replace(spec, kind="counting", rounds=0, folder=f"{spec.folder}-counting")
        _add_counts(scenario, run_job(counts, counting=True)[0])
        measured.scenarios.append(scenario)
        keep(measured)
    if "small" in options.only:
        small = _spec(options, "small", 1, folder / "small", total_bytes=0.0)
        measured.scenarios.append(_run(small, f"{options.count} tensors of 4 KB"))
        keep(measured)
    if "reshard" in options.only:
        measured.scenarios.append(_reshard(options, folder))
        keep(measured)
    if "scale" in options.only:
        measured.scale = _scale(options, folder)
        keep(measured)
    return measured


def _saving_jobs(options: Options, folder: Path) -> list[JobSpec]:
    jobs = []
    for gigabytes in options.gigabytes:
        for world_size in options.world_sizes:
            for sharded, device in product((False, True) if world_size > 1 else (False,), options.devices):
                where = folder / f"saving-{gigabytes:g}-{world_size}-{int(sharded)}-{device}"
                spec = _spec(options, "saving", world_size, where, 1e9 * gigabytes, sharded)
                jobs.append(replace(spec, device=device))
    return jobs


def _spec(
    options: Options, kind: str, world_size: int, folder: Path, total_bytes: float, sharded: bool = False
) -> JobSpec:
    known = {name: SYSTEMS[name] for name in options.systems}
    systems = tuple(
        name
        for name, entry in known.items()
        if not (entry.one_rank_only and world_size > 1) and not (entry.only_saves and kind != "saving")
    )
    folder.mkdir()
    return JobSpec(
        kind,
        world_size,
        systems,
        str(folder),
        options.rounds,
        total_bytes,
        sharded,
        options.step_s,
        options.most_steps,
        options.count,
    )


def _run(spec: JobSpec, title: str) -> Scenario:
    turns, failures = run_job(spec)
    return Scenario(title, spec.kind, spec.total_bytes, spec.world_size, spec.sharded, turns, failures)


def _title(spec: JobSpec) -> str:
    how = "1 rank" if spec.world_size == 1 else f"{spec.world_size} ranks, {'FSDP' if spec.sharded else 'DDP'}"
    return f"{spec.total_bytes / 1e9:g} GB, {how}{', CUDA' if spec.device == 'cuda' else ''}"


def _add_counts(scenario: Scenario, counted: JobResult) -> None:
    """Into every turn of the system: counts do not vary."""
    for name, turns in counted.items():
        for turn in scenario.turns.get(name, []):
            turn |= turns[0]


def _reshard(options: Options, folder: Path) -> Scenario:
    """A job of some ranks leaves checkpoints, one of another number loads them."""
    before, after = options.reshard
    able = tuple(name for name in options.systems if SYSTEMS[name].reshards)
    total = 1e9 * min(options.gigabytes)
    saving = _spec(options, "reshard_save", before, folder / "reshard-saved", total, sharded=True)
    _, failures = run_job(replace(saving, systems=able, rounds=0))
    loading = _spec(options, "reshard_load", after, folder / "reshard-loaded", total, sharded=True)
    able = tuple(name for name in able if name not in failures)
    title = f"{total / 1e9:g} GB, {before} → {after} ranks"
    scenario = _run(replace(loading, systems=able, earlier=saving.folder), title)
    scenario.failures |= failures
    return scenario


def _scale(options: Options, folder: Path) -> dict[str, dict[str, list[float]]]:
    repeats = ["--tensors", str(options.tensors), "--repeats", str(max(1, min(3, options.rounds)))]
    committing = ["committing", "--parts", str(options.parts), "--folder", str(folder), *repeats]
    planning = ["planning", "--ranks", str(options.ranks), "--tensors", str(options.tensors), "--repeats", "1"]
    scale = {"planning": _module(*planning), "commit": _module(*committing)}
    if options.sharded_commit:
        scale["commit_sharded"] = _module(*committing, "--sharded", "--repeats", "1")
    return scale


def _module(name: str, *arguments: str) -> dict[str, list[float]]:
    """What a module of `tools.bench.scale` prints, in a process of its own so that its memory can be told."""
    print(f"\n{name} of a large job", file=sys.stderr)
    line = [sys.executable, "-m", f"tools.bench.scale.{name}", *arguments]
    found: dict[str, Any] = json.loads(subprocess.run(line, cwd=_REPOSITORY, stdout=subprocess.PIPE, check=True).stdout)
    return found
