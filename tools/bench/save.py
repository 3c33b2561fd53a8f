"""Stall, time to durable, and memory of a save, with the limits of the machine measured in between.

python -m tools.bench.save [--gb 1] [--rounds 9] [--folder DIR] [--json FILE]

Slow figures never make it fail.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tools.bench.measure import Benchmark, Results
from tools.bench.report import as_document, print_report

__all__ = ["main"]


def run(gigabytes: float, rounds: int, folder: Path) -> Results:
    """`rounds` rounds after one that does not count, on the disk of `folder`."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as temporary:
        benchmark = Benchmark(1e9 * gigabytes, Path(temporary))
        try:
            for number in range(rounds + 1):
                print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
                benchmark.round(count=number > 0)
        finally:
            print(file=sys.stderr)
            benchmark.close()
    return benchmark.results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.save", description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state in 1e9 bytes (default: 1)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default: 9)")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured (default: here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every value of every round to FILE")
    options = parser.parse_args(arguments)
    if options.gb <= 0 or options.rounds < 1:
        parser.error("--gb must be more than 0 and --rounds at least 1")
    results = run(options.gb, options.rounds, options.folder)
    print_report(results)
    if options.json is not None:
        options.json.write_text(json.dumps(as_document(results), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
