"""Which tests run: `make test` has some cells of the long matrices, `make test-faults` (TESTS=full) all of them."""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("TESTS") == "full"

full_only = pytest.mark.skipif(not FULL, reason="runs in `make test-faults`")
