"""The language model example stops, resumes, and ends with the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import run_ranks

pytestmark = pytest.mark.timeout(180)  # it starts Python with torch several times

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
SMALL = ("--save-every", "2", "--d-model", "64", "--layers", "1", "--context", "32", "--batch", "2")


def train(root: Path, steps: int, log: Path) -> list[dict[str, Any]]:
    run_ranks(SCRIPT, 2, "--root", str(root), "--steps", str(steps), "--log-file", str(log), *SMALL)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_run_in_two_halves_ends_like_one_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6, tmp_path / "whole.jsonl")
    first = train(tmp_path / "halves", 4, tmp_path / "first.jsonl")
    second = train(tmp_path / "halves", 6, tmp_path / "second.jsonl")
    assert first[-1]["step"] == 4
    assert second[0]["step"] == 4, "it continues where it stopped"
    assert second[-1]["digest"] == whole[-1]["digest"]
    losses = {record["step"]: record["loss"] for record in whole if record["event"] == "step"}
    assert all(losses[r["step"]] == r["loss"] for r in first + second if r["event"] == "step")
