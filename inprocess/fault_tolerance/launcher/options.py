"""The command line: that of torchrun, the options of the launcher, one option per setting."""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import run as torchrun

from inprocess.fault_tolerance import config_cli
from inprocess.fault_tolerance.config import FaultToleranceConfig

__all__ = ["LauncherOptions", "parse"]

_NO_EFFECT = " (accepted; does nothing yet)"
_WITHOUT_EFFECT = (
    "segment",
    "numa_bind_strict",
    "enable_nic_healthcheck",
    "enable_dist_storage_healthcheck",
    "storage_healthcheck_path",
    "pci_topo_file",
    "link_down_path_template",
    "link_state_path_template",
    "attribution_endpoint",
    "attribution_stop_action",
    "attribution_export_url",
    "cycle_info_dir",
)
_DESCRIPTION = (
    "Starts training like torchrun, with a monitor process beside each worker that ends it when a section takes too "
    "long, and restarts that all nodes agree on. With --nnodes=MIN:MAX exactly MIN nodes train, the others are hot "
    "spares. Exit codes: 0 success, or a spare that was not needed; 1 no restarts left; 93 (--ft-no-restart-exit-code) "
    "do not start this again; 128 + N ended by signal N."
)
_DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True)
class LauncherOptions:
    """What is ours on the command line; times in seconds."""

    config: FaultToleranceConfig
    workers_stop_timeout_s: float
    term_timeout_s: float
    no_restart_exit_code: int
    restart_policy: str


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, LauncherOptions]:
    """Read the command line: torchrun's values, completed as torchrun does, and ours.

    SystemExit with 2 and a message for what makes no sense, with 0 after --help.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        options = _options(args)
        _complete(args, parser.get_default("master_port"))
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    return args, options


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog = "ft_launcher"
    parser.description = _DESCRIPTION
    group = parser.add_argument_group("stopping workers")
    text = "from SIGTERM to SIGKILL, when workers are stopped (15)"
    _add_seconds(group, "--workers-stop-timeout", None, text)
    if "--shutdown-timeout" not in parser._option_string_actions:  # torchrun's name for it, since 2.13
        _add_seconds(group, "--shutdown-timeout", None, "the same")
    _add_seconds(
        group, "--term-timeout", 1800.0, "for workers to end by themselves after a SIGTERM to the launcher (1800)"
    )
    config_cli.add_arguments(parser)
    _say_what_does_nothing(parser)
    return parser


def _add_seconds(group: Any, option: str, default: float | None, text: str) -> None:
    spellings = [option, option[0:2] + option[2:].replace("-", "_")]
    group.add_argument(*spellings, type=_seconds, default=default, metavar="SECONDS", help=f"seconds {text}")


def _seconds(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _say_what_does_nothing(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if action.dest.removeprefix("ft_") in _WITHOUT_EFFECT and action.help not in (None, argparse.SUPPRESS):
            action.help = f"{action.help}{_NO_EFFECT}"
        elif action.dest == "ft_restart_policy" and action.help not in (None, argparse.SUPPRESS):
            action.help = f"{action.help}; min-healthy is accepted and does nothing yet: any-failed is what happens"


def _options(args: argparse.Namespace) -> LauncherOptions:
    path = args.ft_cfg_path
    if path and args.ft_ignore_missing_cfg and not os.path.exists(path):
        args.ft_cfg_path = None
    stop = args.workers_stop_timeout
    if stop is None:
        torchs = getattr(args, "shutdown_timeout", None)  # what newer torchrun calls it
        stop = 15.0 if torchs is None else float(torchs)
    return LauncherOptions(
        config=FaultToleranceConfig.from_args(args),
        workers_stop_timeout_s=stop,
        term_timeout_s=args.term_timeout,
        no_restart_exit_code=args.ft_no_restart_exit_code,
        restart_policy=args.ft_restart_policy,
    )


def _complete(args: argparse.Namespace, default_port: Any) -> None:
    """What torchrun's own entry point does between parsing and launching. Older ones have a port by default, and two
    jobs on a node would both take it."""
    fewest, most = torchrun.parse_min_max_nnodes(args.nnodes)
    says_nothing = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port == default_port
    if args.standalone or (says_nothing and most == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = _DEFAULT_MASTER_PORT
    if args.rdzv_backend == "static" and fewest != most:
        raise ValueError("spare nodes (--nnodes=MIN:MAX) need a dynamic rendezvous: --rdzv-backend=c10d")
    if not 0 < fewest <= most:
        raise ValueError(f"--nnodes={args.nnodes} makes no sense")
