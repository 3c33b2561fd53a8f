"""The language model example survives the faults of the demo, and ends with the weights of a run without faults."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_train_lm import SMALL, train
from tests.support import run_ranks
from tools.demo import faults
from tools.demo.report import EVENTS, draw_loss, loss_segments, read_recoveries, recovery_table
from tools.demo.run import DemoError

SCRIPT = Path(faults.__file__)
PLAN = ["3:exception", "4:exception:staged", "6:exception:half", "7:kill"]
STEPS = 8
SILENT_S = 20.0  # longer than a loaded machine delays a step: there is no hang in this test


def train_with_faults(folder: Path, plan: list[str], *options: str) -> list[dict[str, Any]]:
    run = [str(folder), *plan, "--", "--root", str(folder / "root"), "--steps", str(STEPS), *SMALL]
    restart = ["--restart", "--active", "2", "--soft-timeout", str(SILENT_S)]
    files = ["--log-file", str(folder / "log.jsonl"), "--monitor-log", str(folder / "monitor_{rank}.log")]
    files += ["--events", str(folder / EVENTS)]
    killed = {1: -9} if plan[-1].endswith("kill") else {}
    run_ranks(SCRIPT, 3, *run, *restart, *files, *options, returncodes=killed, imports=())
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a run without faults."""
    folder = tmp_path_factory.mktemp("whole")
    return train(folder / "root", STEPS, folder / "log.jsonl")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("snapshots", [False, True], ids=["saves", "snapshots"])
def test_a_run_with_faults_ends_like_one_without(tmp_path: Path, snapshots: bool, whole: list[dict[str, Any]]) -> None:
    disturbed = train_with_faults(tmp_path, PLAN, *(("--snapshot-every", "1") if snapshots else ()))

    assert disturbed[-1]["digest"] == whole[-1]["digest"]
    losses = {record["step"]: record["loss"] for record in whole if record["event"] == "step"}
    assert all(losses[r["step"]] == r["loss"] for r in disturbed if r["event"] == "step")

    recoveries = read_recoveries(tmp_path, PLAN)
    planned = {str(recovery.fault["step"]): recovery for recovery in recoveries if recovery.fault}
    assert planned["4"].saves == {4: "published"}, "all ranks had staged it"
    assert planned["6"].saves == {6: "given up"}, "one rank had not staged it"
    if snapshots:
        assert [planned[step].lost for step in ("3", "4", "6", "7")] == [1, 0, 1, 1]
        assert all(start["restored"]["storage_bytes"] == 0 for each in planned.values() for start in each.starts)
    last = planned["7"].starts
    assert [start["process"] for start in last] == [0, 2], "the spare took the place of the rank that was killed"
    assert [start["step"] for start in last] == [6, 6]
    assert recovery_table(recoveries).row_count == len(recoveries)
    steps = [record for record in whole if record["event"] == "step"]
    assert "loss.png" in draw_loss(tmp_path / "loss.png", steps, loss_segments(tmp_path), recoveries)
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_a_fault_that_did_not_happen_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="0 faults of 1"):
        read_recoveries(tmp_path, ["3:exception"])
