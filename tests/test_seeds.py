"""Tests are the same each time: random numbers come from `tests.support.seeds`, or from a seed that a test names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
_UNSEEDED = re.compile(
    r"\bos\.urandom\(|\bSystemRandom\b|\bsecrets\.|\brandom\.Random\(\)|default_rng\(\)|\bnp\.random\.(rand|bytes)"
    r"|\brandom\.(randrange|randint|randbytes|shuffle|sample|choice|choices|getrandbits|uniform)\("
)
_ALLOWED = {
    "support/seeds.py",
    "support/ranks.py",  # a port
    "support/slurm.py",  # a key
    "ckpt/values/test_rng_state.py",  # about these generators; seeds them
    "ckpt/replication/test_buddies.py",  # an argument of this name, from hypothesis
    "tools/inspect_ckpt/test_goodput.py",  # the same
}


def test_no_test_makes_random_numbers_of_its_own() -> None:
    files = (file for file in _TESTS.rglob("*.py") if file != Path(__file__))
    found = {str(file.relative_to(_TESTS)) for file in files if _UNSEEDED.search(file.read_text())}
    assert found <= _ALLOWED


_PROGRAM = """
from hypothesis import given, strategies as st
from tests.support.seeds import random_bytes, seed_of, use_hypothesis_profile
use_hypothesis_profile()
@given(st.integers())
def example(number):
    print(number)
example()
print(seed_of("OWN_SEED"), random_bytes(8))
"""


def _output(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_TESTS.parent, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.timeout(120)
def test_each_run_plays_the_same_examples() -> None:
    first = _output()
    assert first == _output()
    assert _output(TESTS="full") != first
    seed = first.splitlines()[-1].split()[0]
    assert f"OWN_SEED={seed} in the environment replays this" in first
    assert _output(OWN_SEED="7").splitlines()[-1].startswith("7 ")
