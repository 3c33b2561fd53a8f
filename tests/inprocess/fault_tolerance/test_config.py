import argparse
import logging
import signal
from pathlib import Path
from typing import Any

import pytest

from inprocess.fault_tolerance import FaultToleranceConfig
from inprocess.fault_tolerance.config_cli import add_arguments


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_defaults() -> None:
    config = FaultToleranceConfig()
    assert config.workload_check_interval == 5.0
    assert config.initial_rank_heartbeat_timeout is None
    assert config.rank_section_timeouts == {}
    assert config.rank_termination_signal is signal.SIGKILL
    assert config.log_level == logging.INFO
    assert config.skip_section_response is True


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = FaultToleranceConfig(
        rank_section_timeouts={"step": 2, "save": None},
        rank_termination_signal=signal.SIGTERM,
        log_level=logging.DEBUG,
        segment=4,
        skip_section_response=False,
    )
    path = tmp_path / "ft.yaml"
    config.to_yaml_file(path)
    text = path.read_text()
    assert "SIGTERM" in text
    assert "DEBUG" in text
    assert FaultToleranceConfig.from_yaml_file(path, ignore_not_recognized=False) == config


def test_the_section_is_found_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text("a:\n - b:\n    fault_tolerance: {safety_factor: 3, unknown: 1}\n")
    assert FaultToleranceConfig.from_yaml_file(path).safety_factor == 3.0
    with pytest.raises(ValueError, match="unknown"):
        FaultToleranceConfig.from_yaml_file(path, ignore_not_recognized=False)
    for text in ("a: 1\n", "fault_tolerance:\n", "fault_tolerance: {}\n", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match="fault_tolerance"):
            FaultToleranceConfig.from_yaml_file(path)


def test_unknown_keys() -> None:
    assert FaultToleranceConfig.from_kwargs(nonsense=1) == FaultToleranceConfig()
    with pytest.raises(ValueError, match="nonsense"):
        FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, nonsense=1)


@pytest.mark.parametrize("value", ["SIGTERM", "sigterm", "term", 15, "15", signal.SIGTERM])
def test_signals(value: Any) -> None:
    assert FaultToleranceConfig(rank_termination_signal=value).rank_termination_signal is signal.SIGTERM


@pytest.mark.parametrize(("value", "level"), [("dbg", 10), ("warn", 30), ("WARNING", 30), (35, 35), ("critical", 50)])
def test_levels(value: Any, level: int) -> None:
    assert FaultToleranceConfig(log_level=value).log_level == level
    assert FaultToleranceConfig.from_kwargs(**FaultToleranceConfig(log_level=value).to_dict()).log_level == level


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank_termination_signal": "SIGNOTHING"},
        {"rank_termination_signal": 1000},
        {"rank_termination_signal": None},
        {"log_level": 5},
        {"log_level": 51},
        {"log_level": "loud"},
        {"log_level": True},
        {"rank_heartbeat_timeout": "soon"},
        {"rank_heartbeat_timeout": -1.0},
        {"safety_factor": 0},
        {"rank_section_timeouts": "step"},
        {"rank_section_timeouts": [1]},
        {"ladder": "steps"},
        {"skip_section_response": "maybe"},
        {"num_warmup_iterations": 1.5},
    ],
)
def test_what_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        FaultToleranceConfig(**wrong)


def test_arguments_over_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance: {safety_factor: 3, segment: 2, rank_section_timeouts: {a: 1}}\n")
    args = parsed("--ft-cfg-path", str(path), "--ft-safety-factor", "4", "--ft-rank_heartbeat_timeout=null")
    config = FaultToleranceConfig.from_args(args)
    assert (config.safety_factor, config.segment, config.rank_heartbeat_timeout) == (4.0, 2, None)
    path.write_text("other: 1\n")
    assert FaultToleranceConfig.from_args(args).safety_factor == 4.0
    with pytest.raises(OSError, match="missing"):
        FaultToleranceConfig.from_args(parsed("--ft-cfg-path", str(tmp_path / "missing")))


@pytest.mark.parametrize(
    "option",
    ["--ft-rank-section-timeouts", "--ft-rank_section_timeouts", "--ft-param-rank_section_timeouts"],
)
def test_spellings(option: str) -> None:
    config = FaultToleranceConfig.from_args(parsed(option, "a:1,b:2,c:null"))
    assert config.rank_section_timeouts == {"a": 1.0, "b": 2.0, "c": None}


@pytest.mark.parametrize("text", ["None", "null", ""])
def test_null_spellings(text: str) -> None:
    assert parsed("--ft-segment", text).ft_segment is None


def test_options_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    args = parsed("--fault-tol-cfg-path", "x")
    assert args.ft_cfg_path == "x"
    assert args.ft_ignore_missing_cfg is False
    assert (args.ft_no_restart_exit_code, args.ft_restart_policy) == (93, "any-failed")
    args = parsed("--ft-ignore-missing-cfg", "--ft-no-restart-exit-code", "7", "--ft-restart-policy", "in-process")
    assert (args.ft_ignore_missing_cfg, args.ft_no_restart_exit_code, args.ft_restart_policy) == (
        True,
        7,
        "in-process",
    )
    with pytest.raises(SystemExit):
        parsed("--ft-log-level", "loud")
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = capsys.readouterr().out
    assert "--ft-param" not in shown
    assert "--ft-rank-section-timeouts" in shown
