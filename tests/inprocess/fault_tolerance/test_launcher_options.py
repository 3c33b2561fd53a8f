"""The command line of `ft_launcher`, and small parts of the launcher by themselves."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inprocess.fault_tolerance import FaultToleranceConfig
from inprocess.fault_tolerance.launcher.gpu_memory import GpuMemory
from inprocess.fault_tolerance.launcher.options import LauncherOptions, parse
from inprocess.fault_tolerance.launcher.workers import WorkerProcesses
from tests.inprocess.fault_tolerance.launching import REPOSITORY, slow


def options(*argv: str) -> LauncherOptions:
    return parse([*argv, "train.py"])[1]


def test_the_defaults() -> None:
    found = options()
    assert found.config == FaultToleranceConfig()
    assert (found.workers_stop_timeout_s, found.term_timeout_s) == (15, 1800)
    assert (found.no_restart_exit_code, found.restart_policy) == (93, "any-failed")


def test_the_command_line_of_torchrun_is_understood() -> None:
    argv = "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=host:1234 --rdzv-id=7 --max-restarts=3"
    args, _ = parse([*argv.split(), "-m", "package.train", "--lr", "1", "--ft-segment", "2"])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint, args.max_restarts) == ("2", "4", "host:1234", 3)
    assert args.module
    assert (args.training_script, args.training_script_args) == ("package.train", ["--lr", "1", "--ft-segment", "2"])


def test_one_node_needs_no_address() -> None:
    args, _ = parse(["train.py"])
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "localhost:0")


@pytest.mark.parametrize("spelling", ["--workers-stop-timeout", "--workers_stop_timeout", "--shutdown-timeout"])
def test_how_long_workers_may_take_to_stop(spelling: str) -> None:
    assert options(f"{spelling}=3").workers_stop_timeout_s == 3


def test_settings_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text("job:\n  fault_tolerance:\n    safety_factor: 2\n    rank_section_timeouts: {step: 3}\n")
    found = options(f"--ft-cfg-path={file}", "--ft-safety-factor=4")
    assert found.config.safety_factor == 4
    assert found.config.rank_section_timeouts == {"step": 3}


@pytest.mark.parametrize("spelling", ["--fault-tol-cfg-path", "--fault_tol_cfg_path", "--ft_cfg_path"])
def test_older_spellings_of_the_file(spelling: str, tmp_path: Path) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text("fault_tolerance: {safety_factor: 2}")
    assert options(f"{spelling}={file}").config.safety_factor == 2


@pytest.mark.parametrize("spelling", ["--ft-param-safety_factor", "--ft-param-safety-factor", "--ft-safety_factor"])
def test_older_spellings_of_settings(spelling: str) -> None:
    assert options(f"{spelling}=2").config.safety_factor == 2


def test_a_missing_file_is_an_error_unless_that_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nowhere.yaml"
    with pytest.raises(SystemExit) as error:
        options(f"--ft-cfg-path={path}")
    assert error.value.code == 2
    assert str(path) in capsys.readouterr().err
    assert options(f"--ft-cfg-path={path}", "--ft-ignore-missing-cfg").config == FaultToleranceConfig()


@pytest.mark.parametrize(
    "argv",
    [
        ["--ft-safety-factor=many"],
        ["--workers-stop-timeout=-1"],
        ["--nnodes=2:3", "--master-port=1"],
        ["--nnodes=3:2", "--rdzv-backend=c10d", "--rdzv-endpoint=host:1"],
        ["--ft-restart-policy=whatever"],
    ],
)
def test_nonsense_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        options(*argv)
    assert error.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_help_says_what_does_nothing_yet_and_hides_older_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(["--help"])
    assert error.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in ("segment", "cycle-info-dir", "attribution-endpoint", "numa-bind-strict", "storage-healthcheck-path"):
        said = text.split(f" --ft-{key} ")[-1].split(" --ft-")[0]
        assert "does nothing yet" in said, key
    said = text.split(" --ft-rank-section-timeouts ")[-1].split(" --ft-")[0]
    assert "does nothing" not in said
    assert "min-healthy is accepted and does nothing yet" in text
    for hidden in ("fault-tol", "ft-param", "ft_cfg_path"):
        assert hidden not in text
    for shown in ("--workers-stop-timeout", "--term-timeout", "--ft-no-restart-exit-code", "--nproc-per-node"):
        assert shown in text


@pytest.mark.parametrize(
    "module", ["tools.ft_launcher", pytest.param("inprocess.fault_tolerance.launcher", marks=slow)]
)
def test_it_runs_as_a_module(module: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", module, "--no-such-option", "train.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert answer.returncode == 2
    assert "usage: ft_launcher" in answer.stderr


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, inprocess.fault_tolerance.launcher; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=30)


class Driver:
    """An nvidia-smi that says what a file holds; a machine with GPUs is not needed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = folder / "used"
        tool = folder / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\ncat {self._file}\n')
        tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def set(self, *used_mb: int) -> None:
        self._file.write_text("".join(f"GPU-{number}, {used}\n" for number, used in enumerate(used_mb)))


def test_memory_of_gpus_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path, monkeypatch)
    driver.set(100, 5000)
    memory = GpuMemory(FaultToleranceConfig(gpu_memory_reclaim_timeout=0.3, gpu_memory_poll_interval=0.05))
    driver.set(600, 5400)
    assert memory.wait_free(), "within the tolerance of what others had used before"
    driver.set(700, 5400)
    began = time.monotonic()
    assert not memory.wait_free()
    assert 0.3 <= time.monotonic() - began < 20


def test_without_gpus_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert GpuMemory(FaultToleranceConfig()).wait_free()
    driver = Driver(tmp_path, monkeypatch)
    driver.set(100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert GpuMemory(FaultToleranceConfig()).wait_free()
    assert not (tmp_path / "asked").exists()


def test_a_stopped_worker_can_be_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 19)"])
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    workers = WorkerProcesses({0: process.pid})
    assert workers.take_ended() == {}
    workers.stop(30)
    assert workers.fds == []
    assert process.wait() == -15
