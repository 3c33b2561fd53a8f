"""The command line of `ckpt_launcher`, and small parts of the launcher by themselves."""

import ctypes
import dataclasses
import importlib.machinery
import importlib.util
import logging
import os
import signal
import stat
import subprocess
import sys
import time
import types
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from inprocess.fault_tolerance import FaultToleranceConfig
from inprocess.fault_tolerance.config import WITHOUT_EFFECT
from inprocess.fault_tolerance.launcher.node_admission import check_settings
from inprocess.fault_tolerance.launcher.options import LauncherOptions, parse
from inprocess.fault_tolerance.launcher.orphans import GpuMemory
from inprocess.fault_tolerance.launcher.workers import WorkerProcesses
from tests.inprocess.fault_tolerance.launching import REPOSITORY
from tests.support.selection import full_only
from tests.support.template import quick_python


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


@pytest.mark.parametrize(
    "spelling",
    ["--ft-param-safety_factor", "--ft-param-safety-factor", "--ft-safety_factor", "--ft_param_safety_factor"],
)
def test_older_spellings_of_settings(spelling: str) -> None:
    assert options(f"{spelling}=2").config.safety_factor == 2


@pytest.mark.parametrize("spelling", ["--restart-policy", "--restart_policy", "--ft_restart_policy"])
def test_older_spellings_of_the_restart_policy(spelling: str) -> None:
    assert options(f"{spelling}=in-process").leaves_survivors


def test_a_missing_file_is_an_error_unless_that_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nowhere.yaml"
    with pytest.raises(SystemExit) as error:
        options(f"--ft-cfg-path={path}")
    assert error.value.code == 2
    assert str(path) in capsys.readouterr().err
    for ignore in ("--ft-ignore-missing-cfg", "--ignore-missing-fault-tol-cfg"):
        assert options(f"--ft-cfg-path={path}", ignore).config == FaultToleranceConfig()


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


# Every setting as an option: what is given, and what the launcher works with. `test_*` beside it test the effects.
EFFECTIVE = {
    "workload_check_interval": ("2", 2.0),
    "node_health_check_interval": ("2", 2.0),
    "initial_rank_heartbeat_timeout": ("9", 9.0),
    "rank_heartbeat_timeout": ("null", None),
    "rank_section_timeouts": ("a:1,b:null", {"a": 1.0, "b": None}),
    "rank_out_of_section_timeout": ("3", 3.0),
    "safety_factor": ("2", 2.0),
    "rank_termination_signal": ("term", signal.SIGTERM),
    "termination_grace_time": ("3", 3.0),
    "log_level": ("dbg", logging.DEBUG),
    "restart_check_interval": ("3", 3.0),
    "skip_section_response": ("false", False),
    "num_warmup_iterations": ("3", 3),
    "install_exception_hook": ("true", True),
    "check_remaining_processes": ("true", True),
    "max_no_progress_cycles": ("7", 7),
    "min_progress_iterations": ("7", 7),
    "checkpoint_iteration_file": ("/x", "/x"),
    "segment": ("1", 1),
    "gpu_memory_reclaim_timeout": ("7", 7.0),
    "gpu_memory_tolerance_mb": ("7", 7.0),
    "gpu_memory_poll_interval": ("7", 7.0),
    "enable_nic_monitor": ("true", True),
    "enable_nic_healthcheck": ("false", False),
    "enable_gpu_healthcheck": ("false", False),
    "enable_dist_storage_healthcheck": ("true", True),
    "storage_healthcheck_path": ("/x,/y", "/x,/y"),
    "storage_min_free_gb": ("7", 7.0),
    "max_clock_error": ("0.5", 0.5),
    "node_health_check_endpoint": ("unix:///x.sock", "unix:///x.sock"),
    "node_health_check_command": ("check --all", "check --all"),
    "node_health_check_timeout": ("7", 7.0),
    "node_health_publish_dir": ("/x", "/x"),
    "segment_health_check_dir": ("/x", "/x"),
    "network_check": ("true", True),
    "network_check_mb": ("7", 7.0),
    "network_check_timeout": ("7", 7.0),
    "network_check_factor": ("2", 2.0),
}
# What is refused, and a word of the sentence that says what to do instead.
REFUSED = {
    "numa_bind_strict": ("true", "--numa-binding"),
    "pci_topo_file": ("/x", "leave it out"),
    "link_down_path_template": ("/x", "leave it out"),
    "link_state_path_template": ("/x", "leave it out"),
    "attribution_endpoint": ("http://x", "root suspect"),
    "attribution_stop_action": ("stop", "send_workload_control_request"),
    "attribution_export_url": ("http://x", "lines of JSON in the log"),
    "cycle_info_dir": ("/x", "the launcher's log"),
    "ladder": ("progress", "inprocess.Wrapper"),
    "restart_policy": ("min-healthy", "use in-process"),
    "min_workers": ("2", "--ft-restart-policy=in-process"),
}


# Options of newer and older launchers that are no settings here, and a word of what to do instead.
ELSEWHERE = {
    "nvrx_logfile": "redirect that",
    "enable_log_server": "--ft-per-cycle-applog-prefix=PATH",
    "log_server_port": "--ft-per-cycle-applog-prefix=PATH",
    "log_aggregator_count": "--ft-per-cycle-applog-prefix=PATH",
    "log_leaf_max_queue_chunks": "--ft-per-cycle-applog-prefix=PATH",
    "log_server_log_prefix": "--ft-per-cycle-applog-prefix=PATH",
    "log_server_graceful_shutdown_timeout": "--ft-per-cycle-applog-prefix=PATH",
    "attribution_startup_timeout": "root suspect",
    "attribution_llm_api_key_file": "root suspect",
    "attribution_llm_base_url": "root suspect",
    "attribution_llm_model": "root suspect",
    "attribution_analysis_backend": "root suspect",
    "attribution_compute_timeout": "root suspect",
    "attribution_log_level": "root suspect",
    "attrsvc_host": "root suspect",
    "fact_url": "root suspect",
    "fact_history_es_url": "root suspect",
    "cycle_info_job_id": "the launcher's log",
    "rdzv_impl": "leave it out",
    "use_infra_group_rank": "--node-rank",
    "max_no_progress_restarts": "--ft-max-no-progress-cycles",
    "progress_update_interval": "--ft-checkpoint-iteration-file",
}


def test_every_setting_is_in_a_list() -> None:
    settings = {field.name for field in dataclasses.fields(FaultToleranceConfig)}
    assert set(EFFECTIVE).isdisjoint(REFUSED)
    assert settings == {*EFFECTIVE, *REFUSED} - {"restart_policy", "min_workers"}


@pytest.mark.parametrize("key", EFFECTIVE)
def test_options_that_have_an_effect(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INPROCESS_SEGMENT", "rack 7")
    text, value = EFFECTIVE[key]
    if key == "node_health_check_endpoint" and importlib.util.find_spec("grpc") is None:
        pytest.skip("grpcio is not installed")
    for name in (key, key.replace("_", "-")):
        assert getattr(options(f"--ft-{name}={text}").config, key) == value


NODES = ["--rdzv-backend=c10d", "--rdzv-endpoint=host:1"]


class _FabricInfo(ctypes.Structure):
    _fields_ = [("clusterUuid", ctypes.c_uint8 * 16), ("state", ctypes.c_uint)]


def gpu_in_domain(domain: bytes) -> types.ModuleType:
    """NVML with one GPU that is in this NVLink domain."""

    def fabric_info(_gpu: int, info: Any) -> int:
        info._obj.clusterUuid[:] = domain
        return 0

    return types.SimpleNamespace(  # type: ignore[return-value]
        __spec__=importlib.machinery.ModuleSpec("pynvml", None),
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        NVMLError=ValueError,
        c_nvmlGpuFabricInfo_t=_FabricInfo,
        nvmlDeviceGetGpuFabricInfo=fabric_info,
    )


def test_a_segment_is_named_by_the_environment_or_else_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options("--nnodes=4:6", *NODES).segment_id == ""
    monkeypatch.setitem(sys.modules, "pynvml", gpu_in_domain(bytes(range(16))))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = options("--nnodes=4:6", "--ft-segment=2", *NODES)
    assert (found.config.segment, found.segment_id) == (2, "00010203-0405-0607-0809-0a0b0c0d0e0f")
    monkeypatch.setenv("INPROCESS_SEGMENT", "rack 7")
    assert options("--nnodes=4:6", "--ft-segment=2", *NODES).segment_id == "rack 7"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nnodes=3:6", "--ft-segment=2", *NODES], "3 nodes are no multiple of --ft-segment=2"),
        (["--nnodes=4", "--ft-segment=2", "--master-port=1"], "add --rdzv-backend=c10d"),
        (["--nnodes=4", "--ft-segment=0", *NODES], "segment must be at least 1"),
        (["--nnodes=4", "--ft-segment=2", *NODES], "set INPROCESS_SEGMENT"),
        (["--nnodes=4", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=host:1"], "use c10d, or static"),
    ],
)
def test_segments_that_cannot_be_are_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", gpu_in_domain(bytes(16)))
    with pytest.raises(SystemExit) as error:
        options(*argv)
    assert error.value.code == 2
    assert said in capsys.readouterr().err.split("error:")[-1]


@pytest.mark.parametrize("key", REFUSED)
def test_options_without_effect_are_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, instead = REFUSED[key]
    for name in dict.fromkeys((key, key.replace("_", "-"))):
        with pytest.raises(SystemExit) as error:
            options(f"--ft-{name}={text}")
        assert error.value.code == 2
        said = capsys.readouterr().err.split("error:")[-1]
        assert instead in said
        assert f"--ft-{key.replace('_', '-')}" in said or f"--ft-{name}" in said


@pytest.mark.parametrize("key", ELSEWHERE)
def test_options_of_other_launchers_are_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (f"--ft-{key.replace('_', '-')}", f"--ft-{key}", f"--ft_{key}"):
        for argv in ([f"{option}=1"], [option, "1"]):
            with pytest.raises(SystemExit) as error:
                options(*argv)
            assert error.value.code == 2
            said = capsys.readouterr().err.split("error:")[-1]
            assert f"{option} is not available: " in said
            assert ELSEWHERE[key] in said


def test_what_no_launcher_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--ft-typo=1", "--fact-url=1", "--ft-fact-url=1")
    said = capsys.readouterr().err
    assert "error: --ft-fact-url is not available: " in said
    assert "; unrecognized arguments: --ft-typo=1 --fact-url=1" in said


def test_what_asks_for_nothing_is_accepted() -> None:
    found = options("--ft-cycle-info-dir=none", "--ft-segment=null", "--ft-numa-bind-strict=no").config
    assert (found.cycle_info_dir, found.segment, found.numa_bind_strict) == (None, None, False)


def test_settings_without_effect_in_a_file_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ft.yaml"
    settings = {key: REFUSED[key][0] for key in WITHOUT_EFFECT if key != "numa_bind_strict"}
    unknown = {"typo": 1, "per_cycle_applog_prefix": "/x", "attrsvc_port": 1}
    lines = [f"  {key}: {text}\n" for key, text in {**settings, "numa_bind_strict": "false", **unknown}.items()]
    file.write_text("fault_tolerance:\n  safety_factor: 2\n" + "".join(lines))
    for read in (lambda: options(f"--ft-cfg-path={file}").config, lambda: FaultToleranceConfig.from_yaml_file(file)):
        caplog.clear()
        assert read().safety_factor == 2
        (record,) = caplog.records
        said = record.getMessage()
        assert str(file) in said
        assert [key for key in settings if f"{key} (" not in said] == []
        assert "typo (unknown)" in said
        assert "per_cycle_applog_prefix (it is no setting of a file" in said
        assert "attrsvc_port (no service is asked" in said
        assert "numa_bind_strict" not in said, "it asks for nothing"
        assert "safety_factor" not in said


def test_a_file_with_effective_settings_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text(
        "fault_tolerance:\n  safety_factor: 2\n  rank_section_timeouts: {step: 3}\n  cycle_info_dir: null\n"
    )
    options(f"--ft-cfg-path={file}")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--ft-node-health-check-endpoint=http://x", "unix:///PATH"),
        ("--ft-storage-healthcheck-path=/x,y", "storage_healthcheck_path must be an absolute path, not 'y'"),
        ("--ft-node-health-publish-dir=x", "node_health_publish_dir must be an absolute path"),
        ("--ft-node-health-check-timeout=0", "node_health_check_timeout must be positive"),
    ],
)
def test_node_checks_that_cannot_be_made(argv: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(argv)
    assert said in capsys.readouterr().err


def test_a_health_service_needs_a_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        options("--ft-node-health-check-endpoint=/x.sock")
    assert "needs the package grpcio (pip install grpcio)" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["--ft-storage-health-check-path", "--ft_storage_health_check_path"])
def test_paths_of_storage_as_other_launchers_spell_them(spelling: str) -> None:
    assert options(f"{spelling}=/x").config.storage_healthcheck_path == "/x"


def test_without_settings_and_devices_no_process_checks_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pynvml" else find_spec(name))
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    assert check_settings(FaultToleranceConfig()) is None
    assert check_settings(FaultToleranceConfig(node_health_check_interval=1, storage_min_free_gb=1)) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    found = check_settings(FaultToleranceConfig())
    assert found is not None
    assert found.checks_gpus
    assert check_settings(FaultToleranceConfig(enable_gpu_healthcheck=False)) is None
    found = check_settings(FaultToleranceConfig(storage_healthcheck_path="/x, /y", storage_min_free_gb=2))
    assert found is not None
    assert (found.storage_paths, found.min_free_bytes) == (("/x", "/y"), 2 * 10**9)


def test_how_many_workers_must_be_left(capsys: pytest.CaptureFixture[str]) -> None:
    policy = "--ft-restart-policy=in-process"
    assert (options(policy).leaves_survivors, options(policy).min_workers) == (True, 1)
    assert options(policy, "--ft-min-workers=3").min_workers == 3
    assert not options().leaves_survivors
    for argv in ([policy, "--ft-min-workers=0"], [policy, "--run-path"]):
        with pytest.raises(SystemExit):
            options(*argv)
    assert "--run-path runs functions" in capsys.readouterr().err


def test_hot_spares_are_for_restarts_in_the_processes_and_more_nodes_than_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    policy, spares = "--ft-restart-policy=in-process", ("--nnodes=2:3", "--rdzv-backend=c10d")
    assert options("--ft-hot-spares", policy, *spares).hot_spares
    assert not options(policy, *spares).hot_spares
    for argv in (["--ft-hot-spares", *spares], ["--ft-hot-spares", policy, "--nnodes=2", "--rdzv-backend=c10d"]):
        with pytest.raises(SystemExit):
            options(*argv)
    said = capsys.readouterr().err
    assert "--ft-hot-spares has a meaning only with --ft-restart-policy=in-process" in said
    assert "--nnodes=2 has none: use --nnodes=MIN:MAX" in said


def test_when_replacements_join_is_passed_on_to_the_wrapper(capsys: pytest.CaptureFixture[str]) -> None:
    policy = "--ft-restart-policy=in-process"
    assert options(policy).worker_environment == {}
    for value in ("now", "after=60", "next-restart"):
        assert options(policy, f"--ft-rejoin={value}").worker_environment == {"INPROCESS_REJOIN": value}
    for argv in ([policy, "--ft-rejoin=soon"], ["--ft-rejoin=now"]):
        with pytest.raises(SystemExit):
            options(*argv)
    said = capsys.readouterr().err
    assert "'after=SECONDS' like 'after=60', not 'soon'" in said
    assert "--ft-rejoin has a meaning only with --ft-restart-policy=in-process" in said


def test_limits_of_faults_are_passed_on_to_the_wrapper(capsys: pytest.CaptureFixture[str]) -> None:
    assert options().worker_environment == {}
    given = ("--ft-max-same-faults=5", "--ft_max_faults_per_hour", "none", "--ft-max-backoff=0.5")
    assert options(*given).worker_environment == {
        "INPROCESS_MAX_SAME_FAULTS": "5",
        "INPROCESS_MAX_FAULTS_PER_HOUR": "none",
        "INPROCESS_MAX_BACKOFF": "0.5",
    }
    for argv in ("--ft-max-same-faults=0", "--ft-max-faults-per-hour=many", "--ft-max-backoff=-1"):
        with pytest.raises(SystemExit):
            options(argv)
    assert "many is not a number" in capsys.readouterr().err


def test_help_hides_older_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(["--help"])
    assert error.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "does nothing" not in text
    assert "not available: binding to NUMA nodes is torchrun's" in text
    for hidden in ("fault-tol", "ft-param", "ft_cfg_path"):
        assert hidden not in text
    for shown in ("--workers-stop-timeout", "--term-timeout", "--ft-no-restart-exit-code", "--nproc-per-node"):
        assert shown in text


def test_two_commands_start_the_launcher() -> None:
    found = {script.name: script.value for script in entry_points(group="console_scripts")}
    assert found["ckpt_launcher"] == "inprocess.fault_tolerance.launcher:main"
    assert "ft_launcher" in found, "which package installed it last, decides what it starts"


@pytest.mark.parametrize(
    "module", ["tools.ckpt_launcher", pytest.param("inprocess.fault_tolerance.launcher", marks=full_only)]
)
def test_it_runs_as_a_module(module: str) -> None:
    answer = subprocess.run(
        [quick_python(), "-m", module, "--no-such-option", "train.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert answer.returncode == 2
    assert "usage: ckpt_launcher" in answer.stderr


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
