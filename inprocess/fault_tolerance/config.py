"""The settings of section monitoring and of the launcher, also read from YAML; `config_cli` has the command line."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

__all__ = [
    "WITHOUT_EFFECT",
    "FaultToleranceConfig",
    "convert",
    "instead_of",
    "is_off",
    "parse_log_level",
    "parse_section_timeouts",
    "parse_signal",
]

_log = logging.getLogger(__name__)

# Settings without effect here, for files that are shared with other launchers, and what to do instead. They are refused
# as command line options, and reported if they are in a file.
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "numa_bind_strict": "binding to NUMA nodes is torchrun's: use --numa-binding",
        "pci_topo_file": "network cards near a GPU are found in /sys; leave it out",
        "link_down_path_template": "the state of network cards is read in /sys; leave it out",
        "link_state_path_template": "the state of network cards is read in /sys; leave it out",
        "attribution_endpoint": "no service is asked; the launcher's log has the root suspect of ranks that are late",
        "attribution_stop_action": "no service is asked; a rank may use send_workload_control_request",
        "attribution_export_url": "nothing is exported; reports of late ranks are lines of JSON in the log",
        "cycle_info_dir": "there are no files for cycles; the launcher's log says when each begins and why it ends",
    }
)
# How settings and options of other launchers begin that are not among the above, and what to do instead.
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "per_cycle_applog": "it is no setting of a file: give --ft-per-cycle-applog-prefix=PATH to ckpt_launcher",
        "nvrx_logfile": "the launcher logs to stderr: redirect that",
        **dict.fromkeys(
            ("enable_log_server", "log_server_", "log_aggregator_", "log_leaf_"),
            "logs are sent to no server; with --ft-per-cycle-applog-prefix=PATH all nodes append to one file",
        ),
        **dict.fromkeys(("attribution_", "attrsvc_", "fact_"), WITHOUT_EFFECT["attribution_endpoint"]),
        "cycle_info_": WITHOUT_EFFECT["cycle_info_dir"],
        "rdzv_impl": "there is one way for nodes to meet; leave it out",
        "use_infra_group_rank": "nodes are numbered by --node-rank, with --rdzv-backend=static; leave it out",
        "max_no_progress_restarts": "use --ft-max-no-progress-cycles",
        "progress_update_interval": "--ft-checkpoint-iteration-file is read at each restart; leave it out",
    }
)
_SECTION = "fault_tolerance"
_NULLS = ("", "null", "none")
_LEVELS = {"DBG": logging.DEBUG, "WARN": logging.WARNING, "ERR": logging.ERROR, "CRIT": logging.CRITICAL}
_LEVELS |= {logging.getLevelName(n): n for n in (10, 20, 30, 40, 50)}
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass
class FaultToleranceConfig:
    """All settings. Times in seconds; a limit of None: never late. Do not change it once it is in use.

    Some settings are our own: `enable_gpu_healthcheck`, `storage_min_free_gb`, `max_clock_error`, `network_check*`, and
    `node_health_*` but for the endpoint and the interval. `ladder` says when a late section leads to an in-process
    restart, under the wrapper: "limit": at its limit; "progress": not while the main thread executes bytecode.
    `termination_grace_time` is how long a rank may take to end after `rank_termination_signal` before the launcher's
    monitor sends SIGKILL; the wrapper has an argument of that name. ValueError for an invalid value.

    `segment` is how many nodes of one NVLink domain have contiguous group ranks; only the launcher reads it.
    Settings in `WITHOUT_EFFECT` are only kept, for files that other launchers also read.
    """

    workload_check_interval: float = 5.0
    node_health_check_interval: float = 5.0
    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: dict[str, float | None] = field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    safety_factor: float = 5.0
    rank_termination_signal: signal.Signals = signal.SIGKILL
    termination_grace_time: float = 15.0
    log_level: int = logging.INFO
    restart_check_interval: float = 60.0
    skip_section_response: bool = True
    num_warmup_iterations: int = 5
    install_exception_hook: bool = False
    check_remaining_processes: bool = False
    max_no_progress_cycles: int = 3
    min_progress_iterations: int = 1
    checkpoint_iteration_file: str | None = None
    segment: int | None = None
    gpu_memory_reclaim_timeout: float = 50.0
    gpu_memory_tolerance_mb: float = 512.0
    gpu_memory_poll_interval: float = 2.0
    numa_bind_strict: bool = True
    enable_nic_monitor: bool = False
    enable_nic_healthcheck: bool = True
    enable_gpu_healthcheck: bool = True
    enable_dist_storage_healthcheck: bool = False
    storage_healthcheck_path: str | None = None
    storage_min_free_gb: float = 0.0
    max_clock_error: float | None = None
    node_health_check_endpoint: str | None = None
    node_health_check_command: str | None = None
    node_health_check_timeout: float = 60.0
    node_health_publish_dir: str | None = None
    segment_health_check_dir: str | None = None
    network_check: bool = False
    network_check_mb: float = 64.0
    network_check_timeout: float = 30.0
    network_check_factor: float = 3.0
    pci_topo_file: str | None = None
    link_down_path_template: str | None = None
    link_state_path_template: str | None = None
    attribution_endpoint: str | None = None
    attribution_stop_action: str | None = None
    attribution_export_url: str | None = None
    cycle_info_dir: str | None = None
    ladder: str = "limit"

    def __post_init__(self) -> None:
        for item in fields(self):
            setattr(self, item.name, convert(item.name, str(item.type), getattr(self, item.name)))
        for name in (
            "workload_check_interval",
            "node_health_check_interval",
            "node_health_check_timeout",
            "network_check_mb",
            "network_check_timeout",
            "safety_factor",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not self.network_check_factor > 1:
            raise ValueError(f"network_check_factor must be more than 1, not {self.network_check_factor}")
        if self.segment is not None and self.segment < 1:
            raise ValueError(f"segment must be at least 1, not {self.segment}")
        if self.ladder not in ("limit", "progress"):
            raise ValueError(f'ladder must be "limit" or "progress", not {self.ladder!r}')

    @staticmethod
    def from_kwargs(ignore_not_recognized: bool = True, **kwargs: Any) -> FaultToleranceConfig:
        """Create one from keyword arguments. ValueError for unknown ones, unless they are to be ignored."""
        known = {item.name for item in fields(FaultToleranceConfig)}
        unknown = sorted(set(kwargs) - known)
        if unknown and not ignore_not_recognized:
            raise ValueError(f"unknown settings: {', '.join(unknown)}")
        return FaultToleranceConfig(**{name: value for name, value in kwargs.items() if name in known})

    @staticmethod
    def from_yaml_file(cfg_path: str | os.PathLike[str], ignore_not_recognized: bool = True) -> FaultToleranceConfig:
        """Read the first mapping called "fault_tolerance" in a file, at any depth. ValueError if there is none.

        A warning in the log names settings that have no effect here.
        """
        found = _read_section(cfg_path)
        if not found:
            raise ValueError(f"{os.fspath(cfg_path)} has no {_SECTION!r} section with settings in it")
        _report_without_effect(cfg_path, found)
        return FaultToleranceConfig.from_kwargs(ignore_not_recognized, **found)

    @staticmethod
    def from_args(args: argparse.Namespace) -> FaultToleranceConfig:
        """Defaults, overridden by the file `args.ft_cfg_path` if it is given, and by each `args.ft_*` not None.

        The file need not have the section, but must exist: OSError. A warning in the log names settings that have no
        effect here.
        """
        path = getattr(args, "ft_cfg_path", None)
        values = dict(_read_section(path) or {}) if path else {}
        if path:
            _report_without_effect(path, values)
        for item in fields(FaultToleranceConfig):
            value = getattr(args, f"ft_{item.name}", None)
            if value is not None:
                values[item.name] = value
        return FaultToleranceConfig.from_kwargs(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as values of JSON and YAML, which `from_kwargs` reads."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["rank_section_timeouts"] = dict(self.rank_section_timeouts)
        values["rank_termination_signal"] = self.rank_termination_signal.name
        values["log_level"] = logging.getLevelName(self.log_level) if self.log_level % 10 == 0 else self.log_level
        return values

    def to_yaml_file(self, cfg_path: str | os.PathLike[str]) -> None:
        """Write a file that `from_yaml_file` reads."""
        with open(cfg_path, "w") as file:
            _yaml().safe_dump({_SECTION: self.to_dict()}, file, sort_keys=False)


def parse_signal(value: Any) -> signal.Signals:
    """Read a signal: its number, its name with or without "SIG" in any case, or itself. ValueError else."""
    if isinstance(value, str):
        text = value.strip().upper()
        if not text.isdecimal():
            text = text if text.startswith("SIG") else f"SIG{text}"
            if text in signal.Signals.__members__:
                return signal.Signals[text]
            raise ValueError(f"unknown signal {value!r}")
        value = int(text)
    if isinstance(value, int) and not isinstance(value, bool):
        return signal.Signals(value)
    raise ValueError(f"a signal is a number or a name, not {value!r}")


def parse_log_level(value: Any) -> int:
    """Read a level: a number between DEBUG and CRITICAL, or a name, in any case. ValueError else."""
    if isinstance(value, str):
        text = value.strip().upper()
        if text in _LEVELS:
            return _LEVELS[text]
        value = int(text) if text.isdecimal() else value
    if isinstance(value, int) and not isinstance(value, bool) and logging.DEBUG <= value <= logging.CRITICAL:
        return int(value)
    raise ValueError(f"a log level is a name, or a number between 10 and 50, not {value!r}")


def parse_section_timeouts(value: Any) -> dict[str, float | None]:
    """Read a mapping, or text like "setup:600,step:30,checkpointing:null". ValueError else."""
    if value is None:
        return {}
    if isinstance(value, str):
        pairs = [part.rsplit(":", 1) for part in value.split(",") if part.strip()]
        if any(len(pair) != 2 or not pair[0].strip() for pair in pairs):
            raise ValueError(f"limits of sections are written name:seconds,name:null, not {value!r}")
        value = {name.strip(): limit for name, limit in pairs}
    if not isinstance(value, Mapping):
        raise ValueError(f"limits of sections are a mapping, not {value!r}")
    return {str(name): convert(str(name), "float | None", limit) for name, limit in value.items()}


def convert(name: str, kind: str, value: Any) -> Any:
    """Return a value in the type of its setting. ValueError if it has none in that type."""
    if name == "rank_termination_signal":
        return parse_signal(value)
    if name == "log_level":
        return parse_log_level(value)
    if kind.startswith("dict"):
        return parse_section_timeouts(value)
    optional = kind.endswith("| None")
    if optional and (value is None or (isinstance(value, str) and value.strip().lower() in _NULLS)):
        return None
    try:
        return _read(kind.removesuffix(" | None"), value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be of type {kind}, not {value!r}") from None


def _read(kind: str, value: Any) -> Any:
    if kind == "bool":
        text = str(value).strip().lower()
        return _BOOLS[text] if text in _BOOLS else _no(value)
    if isinstance(value, bool):
        return _no(value)
    if kind == "float":
        number = float(value)
        return number if number >= 0 else _no(value)  # also refuses NaN
    if kind == "int":
        return int(value) if int(value) == float(value) else _no(value)
    return os.fspath(value) if kind == "str" else _no(value)


def _no(value: Any) -> Any:
    raise ValueError(value)


def instead_of(setting: str) -> str | None:
    """Return what to do instead of a setting that is unknown here; None if no launcher is known to have it."""
    return next((instead for begin, instead in _ELSEWHERE.items() if setting.startswith(begin)), None)


def is_off(value: Any) -> bool:
    """Whether a setting without effect here is switched off anyway."""
    return value is None or value is False


def _report_without_effect(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    unknown = sorted(set(values) - {item.name for item in fields(FaultToleranceConfig)})
    found = [f"{name} ({WITHOUT_EFFECT[name]})" for name in WITHOUT_EFFECT if not is_off(values.get(name))]
    found += [f"{name} ({instead_of(name) or 'unknown'})" for name in unknown]
    if found:
        _log.warning("%s: these settings have no effect here: %s", os.fspath(path), "; ".join(found))


def _read_section(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    with open(path) as file:
        return _find(_yaml().safe_load(file))


def _find(node: Any) -> dict[str, Any] | None:
    if isinstance(node, Mapping):
        found = node.get(_SECTION)
        if isinstance(found, Mapping):
            return dict(found)
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        found = _find(child)
        if found is not None:
            return found
    return None


def _yaml() -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise RuntimeError("settings in YAML files need the package PyYAML: pip install pyyaml") from None
    return yaml
