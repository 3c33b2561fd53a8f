"""Random numbers of tests: the same in each `make test`, new ones in `make test-faults` (TESTS=full)."""

from __future__ import annotations

import os
import random

import hypothesis

from tests.support.selection import FULL

_FIXED = 20_250_117


def seed_of(variable: str, number: int = 0) -> int:
    """Return the seed of a test, and print how to replay it.

    It is the value of the environment variable, if that is set. Otherwise it is a constant, another one for each
    `number`, or with TESTS=full a random number. Call it in the test, which then prints it when it fails.
    """
    given = os.environ.get(variable)
    seed = int(given) if given else random.SystemRandom().randrange(1 << 32) if FULL else _FIXED + number
    print(f"{variable}={seed} in the environment replays this{', with TESTS=full' if FULL else ''}")
    return seed


def random_bytes(count: int, seed: int = _FIXED) -> bytes:
    """Return incompressible bytes, the same in each run."""
    return random.Random(seed).randbytes(count)


def use_hypothesis_profile() -> None:
    """Select the examples of hypothesis: always the same ones, or with TESTS=full random ones and how to replay them.

    No example has a deadline: the load of the machine decides nothing.
    """
    hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("random" if FULL else "fixed")
