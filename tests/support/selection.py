"""Which tests run: `make test` has some cells of the long matrices, `make test-faults` (TESTS=full) all of them."""

from __future__ import annotations

import importlib.util
import os

import pytest

FULL = os.environ.get("TESTS") == "full"

full_only = pytest.mark.skipif(not FULL, reason="runs in `make test-faults`")


def needs(*packages: str) -> None:
    """Skip the module that calls this while it is imported, unless these packages are installed.

    They are not imported, as `pytest.importorskip` would: every process of a run imports every module of tests.
    """
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; the extra `frameworks` has it", allow_module_level=True)
