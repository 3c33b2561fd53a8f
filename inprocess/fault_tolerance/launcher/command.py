"""The command `ckpt_launcher`: from the command line to an exit code."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler
from torch.distributed.launcher.api import LaunchConfig

from inprocess.exception import TimeoutError
from inprocess.fault_tolerance.launcher.agent import LauncherAgent
from inprocess.fault_tolerance.launcher.bounded_store import BoundedStore, interruptible
from inprocess.fault_tolerance.launcher.cycle import LauncherResources
from inprocess.fault_tolerance.launcher.cycle_logs import CycleLogs
from inprocess.fault_tolerance.launcher.dynamic_rounds import DynamicRounds, RoundRules, this_node
from inprocess.fault_tolerance.launcher.inboxes import ControlInbox, Interrupted, SignalInbox
from inprocess.fault_tolerance.launcher.meeting import LauncherExit
from inprocess.fault_tolerance.launcher.monitors import RankMonitors
from inprocess.fault_tolerance.launcher.network_check import NetworkCheck
from inprocess.fault_tolerance.launcher.node_admission import NodeAdmission
from inprocess.fault_tolerance.launcher.options import LauncherOptions, parse
from inprocess.fault_tolerance.launcher.orphans import GpuMemory
from inprocess.fault_tolerance.launcher.preloading import PreloadedWorkers
from inprocess.fault_tolerance.launcher.rendezvous_rounds import Rounds, StaticRounds
from inprocess.fault_tolerance.progress_tracker import TrainingProgressTracker

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 600.0
_ALIVE_INTERVAL_S = 5.0
_ALIVE_ATTEMPTS = 3
_CONNECT_S = 60.0  # torch's default
# Torch raises an exception for each signal in this list, wherever its code is, also between the starts of two workers.
# Here signals are events, so torch gets a signal that is never sent.
_SIGNALS_FOR_TORCH = "SIGRTMAX"


def run(argv: Sequence[str] | None = None) -> int:
    """Launch as the command line says; returns the exit code. Main thread; SystemExit for a wrong command line."""
    args, options = parse(argv)
    logging.basicConfig(
        level=options.config.log_level,
        format=f"%(asctime)s | %(levelname)s | ckpt_launcher {os.getpid()} | %(name)s | %(message)s",
    )
    config, command, arguments = torchrun.config_from_args(args)
    try:
        outcome = record(_launch)(options, config, command, arguments)
    except ChildFailedError as error:  # `record` has kept the worker's error file
        _log.error("%s", error)
        return 1
    if outcome is None:  # a worker function has called sys.exit(0)
        return 0
    log = _log.info if outcome.code == 0 else _log.error
    log("exit code %d: %s", outcome.code, outcome.reason)
    return outcome.code


def _launch(options: LauncherOptions, config: LaunchConfig, command: Any, arguments: list[str]) -> LauncherExit:
    """Create what the agent needs, and run it. ChildFailedError if workers' failures end the job."""
    with ExitStack() as stack:
        signals = stack.enter_context(SignalInbox.of_names(config.signals_to_handle))
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS_FOR_TORCH
        os.environ.update(options.worker_environment)  # workers inherit it
        monitors = RankMonitors(options.config, config.nproc_per_node)
        stack.callback(monitors.close)
        prefix, logs = options.cycle_log_prefix, None
        if prefix is not None:
            os.environ.setdefault("PYTHONUNBUFFERED", "1")  # or a worker that is killed has not printed its last lines
            logs = stack.enter_context(CycleLogs(prefix, config.nproc_per_node))
        preloaded = PreloadedWorkers(options.preload, config.nproc_per_node)
        stack.callback(preloaded.close)
        inbox = stack.enter_context(ControlInbox())
        silence_s = _silence_s(config)
        try:
            with signals.raising():
                rounds = _rounds(options, config, silence_s, signals)
        except Interrupted as interrupted:
            return LauncherExit(128 + interrupted.number, f"{interrupted.number.name} before the first rendezvous")
        except RendezvousError as error:
            return LauncherExit(1, f"the rendezvous cannot be joined: {error}")
        admission = NodeAdmission(options.config, rounds, config.max_nodes - config.min_nodes)
        stack.callback(admission.close)
        resources = LauncherResources(
            options=options,
            rounds=rounds,
            silence_s=silence_s,
            monitors=monitors,
            preloaded=preloaded,
            inbox=inbox,
            signals=signals,
            progress=TrainingProgressTracker.from_config(options.config),
            gpu_memory=GpuMemory(options.config),
            cycle_logs=logs,
            admission=admission,
            network=NetworkCheck(options.config, rounds, admission, config.nproc_per_node, _alive_interval_s(config)),
        )
        agent = LauncherAgent(
            _known(WorkerSpec, _spec(config, rounds, command, arguments)),
            resources,
            logs_specs=config.logs_specs if logs is None else logs.specs(config.logs_specs),
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
        )
        outcome = agent.run_job()
        if outcome.failures:
            raise ChildFailedError(agent.entrypoint_name, dict(outcome.failures))
        return outcome


def _rounds(options: LauncherOptions, config: LaunchConfig, silence_s: float, signals: SignalInbox) -> Rounds:
    """Return the rounds of this launcher's nodes. Torch's errors. May wait for the host for a minute."""

    def bounded(store: Any) -> BoundedStore:
        return BoundedStore(store, silence_s, signals.has_any)

    join_timeout_s = float(config.rdzv_configs.get("join_timeout", _JOIN_TIMEOUT_S))
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    if config.rdzv_backend == "static":
        handler = create_rdzv_handler(parameters)
        assert isinstance(handler, StaticTCPRendezvous)
        return StaticRounds(handler, join_timeout_s, bounded)
    limit_s = float(config.rdzv_configs.get("read_timeout", _CONNECT_S)) + silence_s
    try:
        _, store = interruptible(lambda: create_backend(parameters), "launcher-rendezvous", limit_s)
    except TimeoutError as error:
        raise RendezvousConnectionError(f"the host of the rendezvous does not answer: {parameters.endpoint}") from error
    rules = RoundRules(
        nodes=config.min_nodes,
        block=options.config.segment or 1,
        join_timeout_s=join_timeout_s,
        alive_interval_s=_alive_interval_s(config),
        silence_s=silence_s,
        is_mended=not options.leaves_survivors,
        most_nodes=config.max_nodes if options.hot_spares else config.min_nodes,
    )
    node = this_node(config.local_addr, options.segment_id, config.nproc_per_node)
    return DynamicRounds(bounded(store), config.run_id, node, rules)


def _silence_s(config: LaunchConfig) -> float:
    """Return how long a node, or the host of the rendezvous, may be silent before it counts as lost."""
    attempts = config.rdzv_configs.get("keep_alive_max_attempt", _ALIVE_ATTEMPTS)
    return _alive_interval_s(config) * float(attempts)


def _alive_interval_s(config: LaunchConfig) -> float:
    return float(config.rdzv_configs.get("keep_alive_interval", _ALIVE_INTERVAL_S))


def _spec(config: LaunchConfig, rounds: Rounds, command: Any, arguments: list[str]) -> dict[str, Any]:
    address, port = None, None
    if config.rdzv_backend == "static":
        address, _, text = config.rdzv_endpoint.strip().rpartition(":")
        port = int(text)
    return {
        "role": config.role,
        "local_world_size": config.nproc_per_node,
        "entrypoint": command,
        "args": tuple(arguments),
        "rdzv_handler": rounds,
        "max_restarts": config.max_restarts,
        "monitor_interval": config.monitor_interval,
        "master_addr": address,
        "master_port": port,
        "local_addr": config.local_addr,
        "event_log_handler": getattr(config, "event_log_handler", "null"),
        "numa_options": getattr(config, "numa_options", None),
        "duplicate_stdout_filters": getattr(config, "duplicate_stdout_filters", None),
        "duplicate_stderr_filters": getattr(config, "duplicate_stderr_filters", None),
        "virtual_local_rank": getattr(config, "virtual_local_rank", False),
    }


def _known(kind: Any, values: dict[str, Any]) -> Any:
    """Create an object from the fields that this version of torch has."""
    names = {item.name for item in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})
