"""The output of all workers of a cycle in one file, each line with its rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from inprocess.fault_tolerance.launcher import cycle_logs
from inprocess.fault_tolerance.launcher.cycle_logs import CycleLogs
from inprocess.fault_tolerance.launcher.options import parse
from tests.inprocess.fault_tolerance.launching import Job


def test_each_cycle_has_a_file_with_all_lines_of_all_workers(job: Job) -> None:
    prefix = job.folder / "logs" / "train.log"
    script = """
        for number in range(300):
            print("out", cycle, number)
            print("error", cycle, number, file=sys.stderr)
        os.write(1, b"no end")
        others("there")
        if cycle == 0 and rank == 1:
            raise KeyError("the fault")
        if cycle == 0:
            hang()
    """
    launcher = job.one_node(script, f"--ft-per-cycle-applog-prefix={prefix}", ranks=2)
    assert launcher.wait() == 0, launcher.log()
    assert {path.name for path in prefix.parent.glob("train*")} == {"train_cycle0.log", "train_cycle1.log"}
    texts = [(prefix.parent / f"train_cycle{cycle}.log").read_text() for cycle in (0, 1)]
    for cycle, text in enumerate(texts):
        lines = text.splitlines()
        for rank in (0, 1):
            for stream in ("out", "error"):
                found = [line for line in lines if line.startswith(f"{rank}: {stream} {cycle} ")]
                assert found == [f"{rank}: {stream} {cycle} {number}" for number in range(300)]
        assert {line for line in lines if "no end" in line} == {"0: no end", "1: no end"}
    assert "1: KeyError: 'the fault'" in texts[0].splitlines()
    assert texts[0].count("Traceback") == 1
    assert "KeyError" not in texts[1] + launcher.log().replace("cause: user code", "")


def test_a_replacement_writes_to_the_log_of_the_cycle(job: Job) -> None:
    prefix = job.folder / "train"
    script = """
        first = not os.path.exists(os.environ["TEST_EVENTS"])
        say("begins")
        print("pid", os.getpid())
        while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
            time.sleep(0.02)
    """
    options = (f"--ft-per-cycle-applog-prefix={prefix}", "--ft-restart-policy=in-process")
    launcher = job.one_node(script, *options, ranks=2, restarts=0)
    log = job.folder / "train_cycle0.log"

    def text() -> str:
        return log.read_text() if log.exists() else ""

    os.kill(int(job.wait_for(text, r"^1: pid (\d+)$", 30)[1]), signal.SIGKILL)
    job.wait_for(text, r"^1: pid \d+\n(.*\n)*1: pid \d+$", 30)
    Path(f"{job.events_file}.go").touch()
    assert launcher.wait() == 0


def run(path: str, code: str) -> subprocess.Popen[bytes]:
    with open(path, "wb", buffering=0) as stream:
        return subprocess.Popen([sys.executable, "-c", code], stdout=stream, stdin=subprocess.PIPE)


def paths(logs: CycleLogs, folder: Path) -> dict[int, str]:
    envs: dict[int, dict[str, str]] = {number: {} for number in range(2)}
    return logs.specs(DefaultLogsSpecs(str(folder))).reify(envs).stdouts


def test_what_is_left_behind_can_go_on_writing(tmp_path: Path) -> None:
    with CycleLogs(str(tmp_path / "a.log"), 2) as logs:
        logs.begin_cycle(0, [8, 11], 12)
        left = run(paths(logs, tmp_path / "x")[1], "import sys; print('first', flush=True); sys.stdin.read(); print(2)")
        run(paths(logs, tmp_path / "x")[0], "print('x' * 200_000)").communicate(timeout=30)
        deadline = time.monotonic() + 30
        while "11: first\n" not in (tmp_path / "a_cycle0.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        logs.begin_cycle(1, [3, 4], 12)
        left.communicate(timeout=30)
        assert left.returncode == 0
    assert (tmp_path / "a_cycle1.log").read_text() == " 4: 2\n"
    lines = (tmp_path / "a_cycle0.log").read_text().splitlines()
    assert sum(line.count("x") for line in lines) == 200_000
    assert all(line.startswith(" 8: x") for line in lines if "x" in line)


def test_workers_never_wait_for_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").touch()
    with CycleLogs(str(tmp_path / "folder" / "a.log"), 2) as logs:
        logs.begin_cycle(0, [0, 1], 2)
        run(paths(logs, tmp_path / "x")[0], "print('x' * 9_000_000)").communicate(timeout=30)
    assert "the output of the workers of this cycle is lost" in caplog.text


def test_the_launcher_goes_on_if_the_file_system_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycle_logs, "_SLOW_S", 0.1)
    log = tmp_path / "a_cycle0.log"
    os.mkfifo(log)  # whose opening waits for a reader
    with CycleLogs(str(tmp_path / "a.log"), 2) as logs:
        logs.begin_cycle(0, [0, 1], 2)
        assert "has not answered for 0.1 s" in caplog.text
        monkeypatch.undo()
        run(paths(logs, tmp_path / "x")[0], "print('a line')").communicate(timeout=30)
        with open(log) as stream:
            assert stream.readline() == "0: a line\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ft-per-cycle-applog-prefix=logs/x"], "is not an absolute path"),
        (["--ft-per-cycle-applog-prefix=/x", "--tee=3"], "--tee and --ft-per-cycle-applog-prefix"),
        (["--ft_per_cycle_applog_prefix=/x", "--redirects", "1:3"], "--redirects and --ft-per-cycle-applog-prefix"),
        (["--ft-per-cycle-applog-prefix=/x", "--run-path"], "leave one of them out"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*options, "train.py"])
    assert words in capsys.readouterr().err
