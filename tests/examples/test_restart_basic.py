"""The basic restart example: after a fault on one rank, all ranks continue from the weights they kept."""

from pathlib import Path

import pytest

from tests.support import run_ranks

pytestmark = pytest.mark.timeout(180)  # it starts Python with torch several times

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "restart_basic.py"


def test_one_fault_one_restart() -> None:
    results = run_ranks(SCRIPT, 2, init_process_group=False)
    for result in results:
        begins = [line for line in result.stdout.splitlines() if line.startswith("iteration")]
        assert begins == [
            f"iteration {i}: rank {result.rank} of 2 begins with step {step}" for i, step in ((0, 1), (1, 21))
        ]
        assert result.stdout.splitlines()[-1].startswith("done, loss 0.")
    assert "RuntimeError: a fault on one rank" in results[1].stderr
