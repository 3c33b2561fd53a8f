"""Try mutations of a step in a process with bounded memory, and print the outcomes.

    python -m tests.ckpt.fuzz.worker STEP SEED FIRST COUNT

prints one JSON object. A case that takes longer than `_DEADLINE_S` ends the process with the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

import ckpt
from ckpt.errors import CheckpointCorruptError, CheckpointError, FormatVersionError, StorageError
from ckpt.storage.documents import canonical_json
from ckpt.validation import validate
from ckpt.values.codec import encode_value
from tests.ckpt.fuzz.mutations import mutate
from tests.ckpt.fuzz.oracle import Contents, contents

T = TypeVar("T")

_DEADLINE_S = 40.0  # wall time, on a machine that may be busy
_CPU_S = 5.0
_MEMORY_BYTES = 1 << 30


def main(source: Path, seed: int, first: int, count: int) -> None:
    folder = Path(tempfile.mkdtemp())
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    before = _read(_fresh(source, folder))
    _check(_fresh(source, folder), before)  # also starts all threads
    with open("/proc/self/statm") as stream:
        limit = int(stream.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(first, first + count):
        step = _fresh(source, folder)
        what = mutate(step, random.Random(f"{seed} {number}"))
        sys.stderr.write(f"case {number}, seed {seed}: {what}\n")
        faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)
        start = _cpu_s()
        try:
            outcome = _check(step, before)
        except Exception as error:
            outcome = f"FAILED: {type(error).__name__}: {str(error)[:500]}"
        if _cpu_s() - start > _CPU_S:
            outcome = f"FAILED: took {_cpu_s() - start:.1f} s"
        outcomes[outcome.split(":")[0]] += 1
        if outcome.startswith("FAILED"):
            failures.append(f"case {number}: {what}: {outcome}")
    faulthandler.cancel_dump_traceback_later()
    shutil.rmtree(folder)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))


def _fresh(source: Path, folder: Path) -> Path:
    shutil.rmtree(folder)
    shutil.copytree(source, folder / source.name)
    return folder / source.name


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _read(step: Path) -> Contents:
    """Return everything that `ckpt.open` reads."""
    opened = ckpt.open(step)
    tensors = {}
    for name, tensor in opened.items():
        array = np.ascontiguousarray(tensor.read())
        tensors[name] = (tensor.dtype, list(tensor.shape), array.tobytes())
    return tensors, {
        name: canonical_json(encode_value(value)).decode() for name, value in opened.values_by_name.items()
    }


def _check(step: Path, before: Contents) -> str:
    """Read a changed step, and return the outcome.

    Raises AssertionError, or an error that is not of the package, unless the step is refused or read correctly."""
    found, refused = _outcome(lambda: _read(step))
    report, not_judged = _outcome(lambda: validate(str(step), jobs=2))
    if report is None:
        assert not isinstance(not_judged, CheckpointCorruptError), not_judged
        assert found is None or isinstance(not_judged, StorageError), not_judged
        return f"refused ({type(not_judged).__name__})"
    if found is None:
        assert isinstance(refused, CheckpointCorruptError | FormatVersionError), repr(refused)
        assert not report.restorable, f"validate finds nothing, but: {refused}"
        return f"refused ({type(refused).__name__})"
    if found == before:
        return "the same, " + ("whole" if report.whole else "damaged elsewhere")
    tensors, values = contents(step)
    assert found[0] == tensors, "other tensors than the step describes"
    assert found[1] == values, f"other values than the step describes: {found[1]} {values}"
    return "other contents, " + ("whole" if report.whole else "known as damaged")


def _outcome(read: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    try:
        return read(), None
    except CheckpointError as error:
        return None, error


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
