"""All systems, all figures: what a save and a load cost, next to what the machine can do at the same time.

python -m tools.bench [--full] [--gb 1,2,4] [--world 1,2,4] [--device cpu,cuda] [--systems ckpt,dcp] [--rounds N]
                      [--json FILE] [--plots DIR] [--table FILE] [--note TEXT]

A figure that misses its target is printed as such, and never makes the command fail.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tools.bench.report import environment
from tools.bench.suite.figures import verdicts
from tools.bench.suite.plan import KINDS, Measured, Options, Scenario, measure
from tools.bench.suite.plots import plot
from tools.bench.suite.tables import markdown, replace_between_markers
from tools.bench.systems import SYSTEMS, version_of

__all__ = ["main", "read_documents"]

_QUICK = Options((1.0,), (1, 2), (), 3, Path(), (4, 3), 10_000, 1024, 4096, 3000, sharded_commit=False)
_FULL = replace(_QUICK, gigabytes=(1.0, 2.0, 4.0), world_sizes=(1, 2, 4), rounds=9, sharded_commit=True)
_TINY = replace(
    _QUICK, gigabytes=(0.002,), world_sizes=(1,), rounds=0, reshard=(2, 1), count=100, ranks=8, parts=8, tensors=20,
    sharded_commit=True, step_s=0.002, most_steps=6,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.from_json is not None:
        measured, known = read_documents(options.from_json), True
    else:
        chosen, known = _options(options, parser), False
        with tempfile.TemporaryDirectory(prefix="suite-", dir=options.folder) as temporary:
            measured = measure(chosen, Path(temporary).resolve(), _keeper(options.json))
        print(file=sys.stderr)
    text = markdown(measured, options.note)
    print(text)
    if options.json is not None and not known:
        options.json.write_text(_document(measured))
    if options.plots is not None:
        for path in plot(measured, options.plots):
            print(f"wrote {path}", file=sys.stderr)
    if options.table is not None:
        replace_between_markers(options.table, text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=(__doc__ or "").splitlines()[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--full", action="store_true", help="1, 2 and 4 GB on 1, 2 and 4 ranks, 9 rounds: hours")
    sizes.add_argument("--tiny", action="store_true", help="everything once, with sizes that tell nothing: a test")
    parser.add_argument("--gb", type=_numbers(float), metavar="N,N", help="sizes of the state in 1e9 bytes")
    parser.add_argument("--world", type=_numbers(int), metavar="N,N", help="numbers of ranks")
    parser.add_argument("--device", type=_devices, metavar="NAME", help="cpu, cuda or both, where the state is")
    parser.add_argument("--systems", type=lambda text: tuple(text.split(",")), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds that count, after one that does not")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured (default: here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every value of every round")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), help=f"of {','.join(KINDS)}; default: all")
    parser.add_argument(
        "--from-json", type=Path, nargs="+", metavar="FILE", help="measure nothing: tables and plots of earlier runs"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="pictures (needs matplotlib)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="put the tables between this document's markers")
    parser.add_argument("--note", default="", help="a sentence for the tables: what else ran on the machine")
    return parser


def _numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(kind(part) for part in text.split(","))
        if any(value <= 0 for value in values):
            raise argparse.ArgumentTypeError(f"{text}: all must be more than 0")
        return values

    return parse


def _devices(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= {"cpu", "cuda"} or ("cuda" in names and not torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f"{text}: there is cpu, and cuda on a machine that has it")
    return names


def _options(given: argparse.Namespace, parser: argparse.ArgumentParser) -> Options:
    """Those of the command, the others as --full, --tiny or neither has them."""
    installed = tuple(name for name in SYSTEMS if version_of(name) is not None)
    systems = given.systems or installed
    unknown = [name for name in systems if name not in installed]
    if unknown:
        parser.error(f"--systems: {', '.join(unknown)}: not known or not installed; there is {', '.join(installed)}")
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds must be at least 1")
    if missing := [name for name in SYSTEMS if name not in installed]:
        print(f"not installed, left out: {', '.join(missing)} (pip install '.[bench]')", file=sys.stderr)
    base = _FULL if given.full else _TINY if given.tiny else _QUICK
    if given.only is not None and not set(given.only) <= set(KINDS):
        parser.error(f"--only: there is {', '.join(KINDS)}")
    changes = {"gigabytes": given.gb, "world_sizes": given.world, "rounds": given.rounds, "only": given.only}
    changes["devices"] = given.device or (("cpu", "cuda") if torch.cuda.is_available() else None)
    chosen = {key: value for key, value in changes.items() if value is not None}
    return replace(base, systems=systems, folder=given.folder, **chosen)


def _keeper(path: Path | None) -> Callable[[Measured], None]:
    """Writes what there is after each job: a run that is interrupted leaves what it has."""

    def keep(measured: Measured) -> None:
        if path is not None:
            path.write_text(_document(measured))

    return keep


def _document(measured: Measured) -> str:
    found = [asdict(verdict) for verdict in verdicts(measured)]
    return json.dumps({"environment": environment(), "verdicts": found, **asdict(measured)}, indent=1) + "\n"


def read_documents(paths: list[Path]) -> Measured:
    """What earlier runs wrote, one behind the other."""
    measured = Measured()
    for path in paths:
        document = json.loads(path.read_text())
        measured.scenarios += [Scenario(**scenario) for scenario in document["scenarios"]]
        measured.scale |= document["scale"]
        measured.scale_of |= document["scale_of"]
    return measured


if __name__ == "__main__":
    sys.exit(main())
