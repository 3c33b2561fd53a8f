"""A process that is forked from a trainer owns nothing of the trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run_ranks

PROGRAM = Path(__file__).parent / "fork_program.py"


@pytest.mark.timeout(150)
def test_children_of_a_trainer_with_everything_on_have_no_effect(tmp_path: Path) -> None:
    for result in run_ranks(PROGRAM, 2, tmp_path, timeout=120):
        assert result.stdout.splitlines()[-1] == "done"
