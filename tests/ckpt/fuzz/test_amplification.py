"""Documents with huge numbers, long texts and deep values are refused or read, in bounded time and memory.

`TESTS=full` (see `make test-faults`) tries some thousand cases by a random seed, otherwise 25 by a fixed one.
`FUZZ_SEED` sets the seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.seeds import seed_of
from tests.support.selection import FULL

REPOSITORY = Path(__file__).resolve().parents[3]
CASES = 8000 if FULL else 25


@pytest.mark.timeout(3600 if FULL else 300)
def test_a_small_document_costs_little() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ckpt.fuzz.amplify", str(seed_of("FUZZ_SEED")), str(CASES)],
        cwd=REPOSITORY,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},  # each arena would take address space
        capture_output=True,
        text=True,
        timeout=3500 if FULL else 290,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)
    print(f"{answer['cases']} cases: {answer['outcomes']}")
    assert not answer["failures"], "\n".join(map(ascii, answer["failures"]))
