"""The example that is asked to stop, under launchers and in its batch script: it saves a step, and continues there."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import ckpt
from tests.examples.pages import REPOSITORY, assert_page_shows
from tests.support import RankGroup, free_port, launch_ranks
from tests.support.slurm import missing_for_slurm, run_slurm
from tests.support.template import quick_python

pytestmark = pytest.mark.timeout(180)  # it starts Python with torch several times

SCRIPT = REPOSITORY / "examples" / "preemption.py"
BATCH = REPOSITORY / "examples" / "preemption.sbatch"
_TORCHRUN = "from torch.distributed.run import main; main()"
_CKPT_LAUNCHER = "import sys; from inprocess.fault_tolerance.launcher import main; sys.exit(main())"


@contextlib.contextmanager
def _running(code: str, folder: Path, *arguments: str) -> Iterator[RankGroup]:
    """One process that starts two ranks, which begin to train."""
    starter = folder / "starter.py"
    starter.write_text(code)
    options = {"env": {"PYTHON_EXEC": quick_python()}, "init_process_group": False, "imports": ()}
    with launch_ranks(starter, 1, *arguments, **options) as group:
        for rank in range(2):
            group.wait_for_output(0, rf"rank {rank} begins after step \d+", timeout=60)
        yield group


def _launched(code: str, folder: Path, *arguments: str) -> contextlib.AbstractContextManager[RankGroup]:
    options = ["--standalone", "--nproc-per-node=2", f"--log-dir={folder / 'logs'}", str(SCRIPT)]
    return _running(code, folder, *options, "--root", str(folder / "run"), "--step-seconds", "0.02", *arguments)


def _workers(group: RankGroup) -> list[psutil.Process]:
    children = psutil.Process(group.pid(0)).children(recursive=True)
    return [child for child in children if str(SCRIPT) in child.cmdline()]


def _ended(group: RankGroup, folder: Path, code: int) -> int:
    """Wait; assert that both ranks have stopped after the same step, and that it is published; return it."""
    (result,) = group.wait(returncodes={0: code}, timeout=60)
    group.wait_for_no_survivors()
    stops = re.findall(r"rank \d stops after step (\d+), published: True", result.stdout)
    assert len(stops) == 2, result.stdout + result.stderr
    assert stops[0] == stops[1]
    assert ckpt.Checkpointer(folder / "run", read_only=True).latest_step() == int(stops[0])
    return int(stops[0])


def test_torchrun_passes_sigterm_on_and_the_next_run_continues(tmp_path: Path) -> None:
    with _launched(_TORCHRUN, tmp_path) as group:
        group.kill(0, signal.SIGTERM)
        step = _ended(group, tmp_path, 1)
    with _launched(_TORCHRUN, tmp_path, "--steps", str(step + 3)) as group:
        (result,) = group.wait(timeout=60)
        assert f"rank 1 begins after step {step}\n" in result.stdout
        assert f"rank 0 done after step {step + 3}\n" in result.stdout


def test_torchrun_succeeds_when_a_worker_was_asked_and_the_exit_code_is_0(tmp_path: Path) -> None:
    with _launched(_TORCHRUN, tmp_path, "--exit-code", "0") as group:
        _workers(group)[1].send_signal(signal.SIGUSR1)
        _ended(group, tmp_path, 0)


@pytest.mark.parametrize("policy", ["any-failed", "in-process"])
def test_ckpt_launcher_passes_sigterm_on_and_succeeds(policy: str, tmp_path: Path) -> None:
    code = _CKPT_LAUNCHER.replace("main())", f"main([{f'--ft-restart-policy={policy}'!r}, *sys.argv[1:]]))")
    with _launched(code, tmp_path, "--exit-code", "0") as group:
        group.kill(0, signal.SIGTERM)
        _ended(group, tmp_path, 0)


@pytest.mark.skipif(missing_for_slurm() is not None, reason=str(missing_for_slurm()))
def test_slurm_requeues_the_batch_script_until_it_is_done(tmp_path: Path) -> None:
    variables = {
        "PATH": os.pathsep.join([str(Path(quick_python()).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHON_EXEC": quick_python(),
        "RANKS_PER_NODE": "2",
        "PORT": str(free_port()),
    }
    output = tmp_path / "output.txt"
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    with run_slurm(tmp_path / "slurm") as slurm:
        options = ["--parsable", "--nodes=1", f"--output={output}"]
        arguments = ["--step-seconds", "0.02", "--steps", "400"]
        job = slurm.run("sbatch", *options, str(BATCH), *arguments, env=variables, folder=tmp_path).strip()
        for rank in range(2):
            _wait_for_line(output, rf"rank {rank} begins after step 0")
        slurm.run("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1 makes Slurm send
        stops = [_wait_for_line(output, rf"rank {rank} stops after step (\d+), published: True") for rank in range(2)]
        assert stops[0] == stops[1]
        for rank in range(2):
            _wait_for_line(output, rf"rank {rank} begins after step {stops[0]}")
            _wait_for_line(output, rf"rank {rank} done after step 400")
        slurm.wait_for_state(job, "COMPLETED")
    assert not (tmp_path / f"stop.{job}").exists()


def _wait_for_line(file: Path, pattern: str) -> str:
    """Return the first group of a line that matches, or the line, as soon as there is one."""
    deadline = time.monotonic() + 60
    while True:
        text = file.read_text() if file.exists() else ""
        if (found := re.search(rf"^{pattern}$", text, re.MULTILINE)) is not None:
            return found[1] if found.groups() else found[0]
        assert time.monotonic() < deadline, f"no line {pattern!r}:\n{text[-3000:]}"
        time.sleep(0.1)


def test_the_page_shows_the_batch_script() -> None:
    assert_page_shows("docs/preemption.md", BATCH)
