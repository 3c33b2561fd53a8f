"""The command line: torchrun's options, the launcher's, and one per setting of `FaultToleranceConfig`."""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import run as torchrun

from inprocess.fault_tolerance import config_cli
from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.launcher.node_admission import check_settings
from inprocess.hardware import open_gpu
from inprocess.settings import LAUNCHER_VARIABLES, RejoinPolicy

_DESCRIPTION = (
    "Starts training like torchrun, with a monitor process beside each worker that ends it when a section takes too "
    "long, and restarts that all nodes agree on. With --nnodes=MIN:MAX exactly MIN nodes train, the others are hot "
    "spares. Exit codes: 0 success, or a spare that was not needed; 1 no restarts left; 93 (--ft-no-restart-exit-code) "
    "do not start this again; 128 + N ended by signal N."
)
_DEFAULT_MASTER_PORT = 29500
_MAX_REPLACEMENTS = 8
_SEGMENT = "INPROCESS_SEGMENT"


@dataclass(frozen=True)
class LauncherOptions:
    """The options that torchrun does not have. Times in seconds."""

    config: FaultToleranceConfig
    workers_stop_timeout_s: float
    term_timeout_s: float
    no_restart_exit_code: int
    restart_policy: str
    hot_spares: bool
    min_workers: int
    max_replacements: int
    cycle_log_prefix: str | None  # see `cycle_logs`

    preload: tuple[str, ...]  # modules
    segment_id: str  # the name of this node's segment; "" without --ft-segment
    worker_environment: Mapping[str, str]  # settings of the wrapper in the workers

    @property
    def leaves_survivors(self) -> bool:
        """Whether workers go on when others have failed."""
        return self.restart_policy == config_cli.IN_PROCESS


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, LauncherOptions]:
    """Parse the command line: torchrun's values, completed as torchrun does, and ours.

    SystemExit with 2 and a message for what is invalid or not available, with 0 after --help.
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(config_cli.unrecognized(unknown))
    try:
        options = _options(args)
        check_settings(options.config)
        _complete(args, parser.get_default("master_port"))
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    return args, options


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog = "ckpt_launcher"
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
    text = (
        "absolute path: the output of all workers of cycle N goes to PATH_cycleN.log (before an extension, if there is "
        "one), each line with its rank; not to the terminal"
    )
    spellings = ["--ft-per-cycle-applog-prefix", "--ft_per_cycle_applog_prefix"]
    parser.add_argument_group("logs").add_argument(*spellings, metavar="PATH", help=text)

    group = parser.add_argument_group("spare nodes, and restarts")
    text = "modules that processes import in advance, which become workers when a cycle begins, such as torch"
    group.add_argument("--ft-preload", "--ft_preload", type=_modules, metavar="MODULE,...", help=text)
    group = parser.add_argument_group("workers that go on when others have failed (--ft-restart-policy=in-process)")
    text = "fewest workers of the job that must be left, running or ended with 0 (1); with fewer all are started again"
    spellings = ["--ft-min-workers", "--ft_min_workers", "--ft-min_workers"]
    group.add_argument(*spellings, type=_count, metavar="N", help=text)
    text = "processes that a node starts, at most, in the place of workers that were lost (8)"
    spellings = ["--ft-max-replacements", "--ft_max_replacements"]
    group.add_argument(*spellings, type=_count_or_none, metavar="N", help=text)
    text = (
        "when a process in the place of a lost one makes the others restart: as soon as it is ready (now), so long "
        "after that (after=SECONDS), or never (next-restart); replaces the argument of inprocess.Wrapper, which is now"
    )
    spellings = ["--ft-rejoin", "--ft_rejoin"]
    group.add_argument(*spellings, type=_rejoin, metavar="{now,after=SECONDS,next-restart}", help=text)
    text = (
        "spare nodes (--nnodes=MIN:MAX) start their workers at once: they take the places of those of a lost node when "
        "the others restart in their processes. inprocess.Wrapper assigns ranks by whole nodes then"
    )
    group.add_argument("--ft-hot-spares", "--ft_hot_spares", action="store_true", help=text)
    group = parser.add_argument_group("faults that come back (these replace arguments of inprocess.Wrapper in workers)")
    text = "how often the same fault may end an iteration without progress between, or none (3)"
    _add_limit(group, "max-same-faults", _count_or_unlimited, "N", text)
    text = "how many faults there may be within an hour without progress between, or none (20)"
    _add_limit(group, "max-faults-per-hour", _count_or_unlimited, "N", text)
    text = "longest wait between faults without progress, which grows from 0, 1, 2, 4, ... seconds (60)"
    _add_limit(group, "max-backoff", _seconds, "SECONDS", text)
    return parser


def _add_limit(group: Any, name: str, read: Callable[[str], Any], metavar: str, text: str) -> None:
    spellings = [f"--ft-{name}", f"--ft_{name.replace('-', '_')}"]
    group.add_argument(*spellings, type=read, default=None, metavar=metavar, help=text)


def _add_seconds(group: Any, option: str, default: float | None, text: str) -> None:
    spellings = [option, option[0:2] + option[2:].replace("-", "_")]
    group.add_argument(*spellings, type=_seconds, default=default, metavar="SECONDS", help=f"seconds {text}")


def _seconds(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of workers")
    return int(text)


def _count_or_unlimited(text: str) -> str:
    return "none" if text == "none" else str(_count(text))


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _modules(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(f"{text} is no list of modules")
    return names


def _rejoin(text: str) -> str:
    try:
        RejoinPolicy.from_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _check_restart_policy(args: argparse.Namespace) -> None:
    is_in_process = args.ft_restart_policy == config_cli.IN_PROCESS
    if is_in_process and args.run_path:
        raise ValueError(f"--run-path runs functions, which --ft-restart-policy={config_cli.IN_PROCESS} cannot watch")
    for name in ("min-workers", "max-replacements", "rejoin"):
        if not is_in_process and getattr(args, f"ft_{name.replace('-', '_')}") is not None:
            raise ValueError(f"--ft-{name} has a meaning only with --ft-restart-policy={config_cli.IN_PROCESS}")
    if args.ft_hot_spares and not is_in_process:
        raise ValueError(f"--ft-hot-spares has a meaning only with --ft-restart-policy={config_cli.IN_PROCESS}")
    if args.ft_preload and (args.run_path or args.no_python):
        raise ValueError("--ft-preload is for programs that Python runs: leave out --run-path and --no-python")
    if args.ft_ladder is not None:
        raise ValueError(
            "--ft-ladder is not available: give it to inprocess.Wrapper(sections=FaultToleranceConfig(...))"
        )


def _check_cycle_logs(args: argparse.Namespace) -> None:
    option = "--ft-per-cycle-applog-prefix"
    if args.ft_per_cycle_applog_prefix is None:
        return
    if not os.path.isabs(args.ft_per_cycle_applog_prefix):
        raise ValueError(f"{option}={args.ft_per_cycle_applog_prefix} is not an absolute path, such as /logs/train.log")
    if args.run_path:
        raise ValueError(f"--run-path runs functions, whose output {option} cannot take: leave one of them out")
    for name in ("redirects", "tee", "logs_specs", "duplicate_stdout_filters", "duplicate_stderr_filters"):
        if getattr(args, name, None) not in (None, "0", [], ""):
            raise ValueError(
                f"--{name.replace('_', '-')} and {option} both say where output goes: leave one of them out"
            )


def _options(args: argparse.Namespace) -> LauncherOptions:
    _check_restart_policy(args)
    _check_cycle_logs(args)
    path = args.ft_cfg_path
    if path and args.ft_ignore_missing_cfg and not os.path.exists(path):
        args.ft_cfg_path = None
    stop = args.workers_stop_timeout
    if stop is None:
        torchs = getattr(args, "shutdown_timeout", None)  # what newer torchrun calls it
        stop = 15.0 if torchs is None else float(torchs)
    config = FaultToleranceConfig.from_args(args)
    return LauncherOptions(
        config=config,
        workers_stop_timeout_s=stop,
        term_timeout_s=args.term_timeout,
        no_restart_exit_code=args.ft_no_restart_exit_code,
        restart_policy=args.ft_restart_policy,
        hot_spares=args.ft_hot_spares,
        min_workers=1 if args.ft_min_workers is None else args.ft_min_workers,
        max_replacements=_MAX_REPLACEMENTS if args.ft_max_replacements is None else args.ft_max_replacements,
        cycle_log_prefix=args.ft_per_cycle_applog_prefix,
        preload=tuple(args.ft_preload or ()),
        segment_id="" if config.segment is None else _segment_id(args, config.segment),
        worker_environment={
            variable: str(value)
            for name, variable in LAUNCHER_VARIABLES.items()
            if (value := getattr(args, f"ft_{name}")) is not None
        },
    )


def _segment_id(args: argparse.Namespace, size: int) -> str:
    """Return the name of this node's segment, as the environment or the GPU's driver says. ValueError."""
    fewest, _ = torchrun.parse_min_max_nnodes(args.nnodes)
    if fewest % size != 0:
        raise ValueError(f"--nnodes={args.nnodes}: {fewest} nodes are no multiple of --ft-segment={size}")
    if args.rdzv_backend == "static" and fewest > 1:
        raise ValueError("--ft-segment orders the nodes of a dynamic rendezvous: add --rdzv-backend=c10d")
    named = os.environ.get(_SEGMENT, "").strip()
    if named:
        return named
    with open_gpu(0) as gpu:
        found = "" if gpu is None else gpu.nvlink_domain()
    if not found:
        raise ValueError(
            f"--ft-segment: the segment of this node is not known, as NVML reports no NVLink domain of its GPUs (needs "
            f"the package nvidia-ml-py): set {_SEGMENT} to a name that the nodes of a segment have in common"
        )
    return found


def _complete(args: argparse.Namespace, default_port: Any) -> None:
    """Complete the values as torchrun's entry point does between parsing and launching.

    Older releases have a default port, which two jobs on a node would both use.
    """
    fewest, most = torchrun.parse_min_max_nnodes(args.nnodes)
    says_nothing = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port == default_port
    if args.standalone or (says_nothing and most == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = _DEFAULT_MASTER_PORT
    if args.rdzv_backend not in ("static", "c10d"):
        raise ValueError(f"--rdzv-backend={args.rdzv_backend} is not available: use c10d, or static")
    if args.rdzv_backend == "static" and fewest != most:
        raise ValueError("spare nodes (--nnodes=MIN:MAX) need a dynamic rendezvous: --rdzv-backend=c10d")
    if args.ft_hot_spares and fewest == most:
        raise ValueError(
            f"--ft-hot-spares is for spare nodes, and --nnodes={args.nnodes} has none: use --nnodes=MIN:MAX"
        )
    if not 0 < fewest <= most:
        raise ValueError(f"--nnodes={args.nnodes} is invalid")
