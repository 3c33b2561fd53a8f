"""Checks that others make: a command, and decisions of the scheduler."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from inprocess.node_health.interface import FAILED, NOT_APPLICABLE, OK
from inprocess.node_health.outside_checks import CommandCheck, SegmentDecisionCheck, ServiceCheck


def test_a_command_says_whether_the_node_is_fit() -> None:
    assert CommandCheck("true").run().outcome == OK
    result = CommandCheck("echo the fan stands still; echo >&2 really; exit 3").run()
    assert (result.outcome, result.why) == (FAILED, "the fan stands still\nreally (exit code 3)")
    assert CommandCheck("false").run().why == "false (exit code 1)"
    assert CommandCheck("kill -9 $$").run().why == "kill -9 $$ (exit code -9)"


def test_a_command_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    result = CommandCheck(f"echo waiting; sleep 1000 & echo $! > {tmp_path}/pid; wait", limit_s=0.5).run()
    assert result.why == "it has not ended within 0.5 s and was killed: waiting"
    sleeping = int((tmp_path / "pid").read_text())
    psutil.wait_procs([psutil.Process(sleeping)] if psutil.pid_exists(sleeping) else [], timeout=10)
    assert not psutil.pid_exists(sleeping) or psutil.Process(sleeping).status() == psutil.STATUS_ZOMBIE


def test_a_command_may_leave_a_daemon_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the output of the command open."""
    check = CommandCheck(f"echo done; sleep 1000 & echo $! > {tmp_path}/pid; exit $CODE", limit_s=30)
    began = time.monotonic()
    try:
        monkeypatch.setenv("CODE", "0")
        assert check.run().outcome == OK
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        monkeypatch.setenv("CODE", "4")
        assert check.run().why == "done (exit code 4)"
        assert time.monotonic() - began < 25
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_of_much_output_the_end_is_shown() -> None:
    result = CommandCheck("head -c 9000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 1").run()
    assert result.why.endswith("x\nthe end (exit code 1)")
    assert len(result.why) < 600


def test_the_scheduler_excludes_an_allocation(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_PROCID": "0"}
    check = SegmentDecisionCheck(str(tmp_path), slurm)
    file = tmp_path / "segment_health_check.7.2"
    assert check.run().outcome == OK
    file.touch()
    assert check.run().outcome == OK, "an empty file excludes none"
    file.write_text("node,state\nn1,drain\n")
    assert check.run().why == f"{file} excludes this allocation"
    assert SegmentDecisionCheck(str(tmp_path), {**slurm, "SLURM_PROCID": "1"}).run().outcome == NOT_APPLICABLE
    assert SegmentDecisionCheck(str(tmp_path), {}).run().outcome == NOT_APPLICABLE
    (tmp_path / "segment_health_check.9.9").write_text("x")
    assert SegmentDecisionCheck(str(tmp_path), {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0"}).run().outcome == FAILED
    os.remove(file)
    file.mkdir()
    assert check.run().outcome == NOT_APPLICABLE, "what is no decision excludes none"


@pytest.mark.parametrize("endpoint", ["http://localhost:1", "localhost:1", "unix://relative"])
def test_a_service_is_at_a_unix_socket(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"unix:///PATH"):
        ServiceCheck(endpoint)
