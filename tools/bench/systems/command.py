"""Saves and loads, beside those of other libraries and the limits of the machine: jobs, options, results.

    this process                       each rank
    run: jobs.run_job             ──▶  rank.main: in each round, the turn of every system
                                           turns: limits, saves, training, memory, loads of one system
    figures: medians, ratios      ◀──  what each turn gave
    report: Markdown, plots

A ratio is that of a figure to the limit measured in the same turn.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tools.bench.harness import (
    add_disk_option,
    at_least,
    positive,
    publish,
    temporary_folder,
    write_json,
)
from tools.bench.scale import Figures, measure_commit, measure_planning
from tools.bench.systems import SYSTEMS, version_of
from tools.bench.systems.figures import Measured, Scenario, verdicts
from tools.bench.systems.jobs import JobResult, JobSpec, run_job
from tools.bench.systems.report import BEGIN, END, SHORT, markdown, plot

JOBS = ("saving", "small", "reshard", "scale")


@dataclass(frozen=True)
class Options:
    """What to measure. `only` are some of `JOBS`; the state is on each of `devices` in turn.

    `reshard` are the ranks that save and those that load, `count` is the number of small tensors. `parts`, `ranks` and
    `tensors` are of the simulated large job.
    """

    gigabytes: tuple[float, ...]
    world_sizes: tuple[int, ...]
    systems: tuple[str, ...]
    rounds: int
    reshard: tuple[int, int]
    count: int
    ranks: int
    parts: int
    tensors: int
    devices: tuple[str, ...] = ("cpu",)
    step_s: float = 0.05
    most_steps: int = 100
    only: tuple[str, ...] = JOBS


_QUICK = Options(
    gigabytes=(1.0,),
    world_sizes=(1, 2),
    systems=(),
    rounds=3,
    reshard=(4, 3),
    count=10_000,
    ranks=4096,
    parts=4096,
    tensors=2160,
)
_FULL = replace(_QUICK, gigabytes=(1.0, 2.0, 4.0), world_sizes=(1, 2, 4), rounds=9)
_TINY = replace(
    _QUICK,
    gigabytes=(0.002,),
    world_sizes=(1,),
    rounds=0,
    reshard=(2, 1),
    count=100,
    ranks=8,
    parts=8,
    tensors=20,
    step_s=0.002,
    most_steps=6,
)


# -- options -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--full", action="store_true", help="1, 2 and 4 GB on 1, 2 and 4 ranks, 9 rounds: hours")
    sizes.add_argument("--tiny", action="store_true", help="everything once, in sizes for a test")
    parser.add_argument("--gb", type=_list_of(positive), metavar="N,N", help="sizes of the state in 1e9 bytes")
    parser.add_argument("--world", type=_list_of(at_least(1)), metavar="N,N", help="numbers of ranks")
    parser.add_argument("--device", type=_devices, metavar="NAME", help="cpu, cuda or both, where the state is")
    parser.add_argument("--systems", type=_systems, help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=at_least(1), metavar="N", help="rounds that count, after one that does not")
    parser.add_argument("--only", type=_jobs, help=f"of {','.join(JOBS)}; default: all")
    add_disk_option(parser)
    parser.add_argument(
        "--from-json",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: show the tables and plots of earlier runs",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="pictures (needs matplotlib)")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="put the short table between the markers of this page, and all as CSV beside it",
    )
    parser.add_argument("--note", default="", help="a sentence for the tables: what else ran on the machine")


def _list_of(parse_one: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(parse_one(part) for part in text.split(","))

    parse.__name__ = "list of numbers"  # in argparse's message about text that is none
    return parse


def _devices(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= {"cpu", "cuda"} or ("cuda" in names and not torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f"{text}: there is cpu, and cuda on a machine that has it")
    return names


def _jobs(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(JOBS):
        raise argparse.ArgumentTypeError(f"{text}: there is {', '.join(JOBS)}")
    return names


def _systems(text: str) -> tuple[str, ...]:
    names, installed = tuple(text.split(",")), _installed()
    if unknown := [name for name in names if name not in installed]:
        listed = ", ".join(installed)
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not known or not installed; there is {listed}")
    return names


def _installed() -> tuple[str, ...]:
    return tuple(name for name in SYSTEMS if version_of(name) is not None)


def _options(given: argparse.Namespace) -> Options:
    """Return the options given, and the others as --full, --tiny or neither has them."""
    if missing := [name for name in SYSTEMS if name not in _installed()]:
        print(f"not installed, left out: {', '.join(missing)} (pip install '.[bench]')", file=sys.stderr)
    base = _FULL if given.full else _TINY if given.tiny else _QUICK
    changes = {"gigabytes": given.gb, "world_sizes": given.world, "rounds": given.rounds, "only": given.only}
    changes["devices"] = given.device or (("cpu", "cuda") if torch.cuda.is_available() else None)
    chosen = {key: value for key, value in changes.items() if value is not None}
    return replace(base, systems=given.systems or _installed(), **chosen)


def run(given: argparse.Namespace) -> None:
    """Measure, or read earlier results; print the tables, and draw the plots if asked to."""
    if given.from_json is not None:
        measured = read_documents(given.from_json)
    else:
        with temporary_folder(given.folder) as temporary:
            # What there is is written after each job: a run that is interrupted leaves that.
            measured = measure(_options(given), temporary, lambda so_far: _write(so_far, given.json))
        print(file=sys.stderr)
        _write(measured, given.json)
    text = markdown(measured, given.note)
    print(text)
    if given.plots is not None:
        for path in plot(measured, given.plots):
            print(f"wrote {path}", file=sys.stderr)
    if given.table is not None:
        publish(given.table, text, BEGIN, END, "systems", {SHORT})


def _write(measured: Measured, path: Path | None) -> None:
    write_json(path, {"verdicts": [asdict(verdict) for verdict in verdicts(measured)], **asdict(measured)})


def read_documents(paths: list[Path]) -> Measured:
    """Read what earlier runs wrote, one after the other."""
    measured = Measured()
    for path in paths:
        document = json.loads(path.read_text())
        measured.scenarios += [Scenario(**scenario) for scenario in document["scenarios"]]
        measured.scale |= document["scale"]
        measured.scale_of |= document["scale_of"]
    return measured


# -- jobs --------------------------------------------------------------------------------------------------------------


def measure(options: Options, folder: Path, keep: Callable[[Measured], None]) -> Measured:
    """Run all jobs; call `keep` with what there is after each. Files stay in `folder`, most of them empty."""
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
    """Add the counts, which do not vary, to every turn of the system."""
    for name, turns in counted.items():
        for turn in scenario.turns.get(name, []):
            turn |= turns[0]


def _reshard(options: Options, folder: Path) -> Scenario:
    """Save in a job of some ranks, and load in a job of another number."""
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


def _scale(options: Options, folder: Path) -> dict[str, Figures]:
    repeats = max(1, min(3, options.rounds))
    print("\nplanning and commit check of a large job", file=sys.stderr)
    planning = measure_planning(options.tensors, options.ranks, repeats)
    return {"planning": planning, **measure_commit(options.parts, options.tensors, repeats, folder)}
