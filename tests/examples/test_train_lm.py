"""The language model example stops, resumes, and ends with the same weights."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import launch_ranks, run_ranks

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


def test_a_preempted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    root, log = tmp_path / "preempted", tmp_path / "first.jsonl"
    options = ("--root", root, "--log-file", log, "--steps", 100_000, "--preemptible", *SMALL)
    with launch_ranks(SCRIPT, 2, *options) as group:
        deadline = time.monotonic() + 40
        while not log.exists() or '"step"' not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        group.kill(1, signal.SIGUSR1)
        group.wait(returncodes={0: 75, 1: 75})
    first = [json.loads(line) for line in log.read_text().splitlines()]
    (stop,) = (record["step"] for record in first if record["event"] == "preempted")
    assert first[-1]["step"] == stop
    second = train(root, stop + 2, tmp_path / "second.jsonl")
    assert second[0]["step"] == stop, "that step is saved"
    assert second[-1]["digest"] == train(tmp_path / "whole", stop + 2, tmp_path / "whole.jsonl")[-1]["digest"]
