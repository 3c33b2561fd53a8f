"""How fast `validate` reads every byte, next to plain reads of the same files; and commands on very many tensors.

python -m tools.bench.validate [--gb 1] [--rounds 9] [--tensors 5000 10000] [--folder DIR] [--json FILE]

Slow figures never make it fail.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.bench.checking import CheckResults, FullBenchmark, ManyBenchmark
from tools.bench.report import Row, environment, print_table

__all__ = ["main"]

_TARGET = 0.8


def run(gigabytes: float, rounds: int, tensors: list[int], folder: Path) -> CheckResults:
    """`rounds` rounds of everything after one that does not count, on the disk of `folder`."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as temporary:
        full = FullBenchmark(1e9 * gigabytes, Path(temporary))
        for number in range(rounds + 1):
            print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
            full.round(count=number > 0)
        for count in tensors:
            many = ManyBenchmark(count, Path(temporary))
            for number in range(rounds + 1):
                print(f"\r{count} tensors, round {number} of {rounds}", end="", file=sys.stderr, flush=True)
                many.round(count=number > 0)
            full.results.commands[count] = many.seconds
        print(file=sys.stderr)
    return full.results


def rows(results: CheckResults) -> list[Row]:
    """Speeds of the full validation, and seconds of the rest."""

    def speeds(*names: str) -> list[float]:
        """Bytes per second, by round; of several turns in a round their mean."""
        return [len(names) * results.bytes / sum(taken[name] for name in names) for taken in results.rounds]

    read, direct, both = speeds("read"), speeds("read_direct"), speeds("validate", "validate_again")
    found = [
        Row("limit: read, page cache cold", read, show=_rate),
        Row("limit: read with O_DIRECT", direct, show=_rate),
        Row("validate, page cache cold", both, read, _TARGET, _rate, at_least=True),
        Row("  the same, to O_DIRECT", both, direct, show=_rate),
        Row("limit: read, page cache warm", speeds("read_warm"), show=_rate),
        Row("validate, page cache warm", speeds("validate_warm"), speeds("read_warm"), show=_rate),
        Row("validate --quick", [taken["quick"] for taken in results.rounds]),
    ]
    for count, commands in results.commands.items():
        found += [Row(f"{count} tensors: {name}", seconds) for name, seconds in commands.items()]
    return found


def as_document(results: CheckResults) -> dict[str, Any]:
    return {"environment": environment(), "rows": [row.document() for row in rows(results)], **asdict(results)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.validate", description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state in 1e9 bytes (default: 1)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default: 9)")
    parser.add_argument(
        "--tensors", type=int, nargs="*", default=[5000, 10000], metavar="N", help="of the checkpoints of many tensors"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured (default: here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every value of every round to FILE")
    options = parser.parse_args(arguments)
    if options.gb <= 0 or options.rounds < 1 or any(count < 8 for count in options.tensors):
        parser.error("--gb must be more than 0, --rounds at least 1 and --tensors at least 8")
    results = run(options.gb, options.rounds, options.tensors, options.folder)
    title = (
        f"{results.bytes / 1e9:.2f} GB in {results.files} files, {len(results.rounds)} rounds; "
        "ratio: median (min-max) of the rounds, to the limit in the same round"
    )
    print_table(title, rows(results))
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    if options.json is not None:
        options.json.write_text(json.dumps(as_document(results), indent=1) + "\n")
    return 0


def _rate(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main())
