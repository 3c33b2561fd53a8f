"""Random changes of a step: reading returns what the documents describe or fails, and `validate` finds the change.

An error is one of the package, raised soon and without using much memory.

`TESTS=full` (see `make test-faults`) tries 4,500 changes by a random seed instead of 36 by a fixed one.
`FUZZ_SEED` sets the seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ckpt.fuzz.states import LAYOUTS, save_all
from tests.support import run_ranks
from tests.support.seeds import seed_of
from tests.support.selection import FULL

REPOSITORY = Path(__file__).resolve().parents[3]
CASES = 1500 if FULL else 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_all, 2, folder)
    return folder


@pytest.mark.timeout(900 if FULL else 120)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mutations(saved: Path, layout: str) -> None:
    seed = seed_of("FUZZ_SEED")
    command = [sys.executable, "-m", "tests.ckpt.fuzz.worker", str(saved / layout / "step_00000004"), str(seed), "0"]
    done = subprocess.run(
        [*command, str(CASES)],
        cwd=REPOSITORY,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},  # each arena would take address space
        capture_output=True,
        text=True,
        timeout=880 if FULL else 110,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)
    print(f"{CASES} cases, seed {seed}: {answer['outcomes']}")
    assert not answer["failures"], f"seed {seed}:\n" + "\n".join(map(ascii, answer["failures"]))
    assert sum(answer["outcomes"].values()) == CASES
