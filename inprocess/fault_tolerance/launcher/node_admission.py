"""Whether this node may work: its checks before each rendezvous and while it works, and how others learn of a failure.

the launcher's log         each check that has failed
the log of the others      through the store of the rendezvous: a line of the value of "unfit"
--ft-node-health-publish-dir    HOST.json: the last failure; events.jsonl: a line for each
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inprocess.bounded_waits import bounded_call
from inprocess.exception import TimeoutError
from inprocess.fault_classes import Symptoms, class_of
from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.launcher.meeting import LauncherExit
from inprocess.fault_tolerance.launcher.rendezvous_rounds import Rounds
from inprocess.fault_tolerance.launcher.worker_causes import cause_of_node
from inprocess.node_health.interface import CheckResult
from inprocess.node_health.messages import NodeCheckSettings
from inprocess.node_health.node_probe import NodeProbe
from inprocess.node_health.outside_checks import socket_path_of
from inprocess.restart_events import RestartEvents

_log = logging.getLogger(__name__)
_OTHERS_INTERVAL_S = 1.0
_PUBLISH_S = 10.0


@dataclass(frozen=True)
class _UnfitNode:
    """An entry for the other nodes."""

    host: str
    pid: int
    reason: str


class NodeAdmission:
    """The checks of this node, and what follows from them. For the launcher's thread; `close` it.

    `spares` is how many nodes more than it needs the job may have.
    """

    def __init__(self, config: FaultToleranceConfig, rounds: Rounds, spares: int) -> None:
        settings = check_settings(config)
        self._probe = None if settings is None else NodeProbe(settings)
        self._rounds = rounds
        self._spares = spares
        self._folder = config.node_health_publish_dir
        self.unfit: str | None = None  # which checks have failed since the last rendezvous
        self.is_refused = False  # this node does not join any more
        self._tolerated: str | None = None  # a failure with which it may join
        self._read = 0  # entries of the store
        self._next_read_s = 0.0
        self._nodes: set[tuple[str, int]] = set()

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable when there is something for `look`; -1 if nothing is checked."""
        return -1 if self._probe is None else self._probe.fd

    @property
    def pids(self) -> list[int]:
        """The process that checks this node."""
        return [] if self._probe is None else self._probe.pids

    def refusal(self, cycle: int) -> str | None:
        """Check this node before it joins `cycle`; return why it may not.

        Takes as long as the checks, whose limits hold. A signal handler may raise meanwhile.
        """
        if self.is_refused:
            return self.unfit
        if self._probe is None:
            return None
        self.unfit = None
        results = self._probe.run()
        _log.info("checks of this node: %s", "; ".join(map(str, results)))
        self._judge([result for result in results if result.is_failure], cycle)
        reason, self.unfit = self.unfit, self.unfit or self._tolerated
        self.is_refused = reason is not None
        return reason

    def look(self, cycle: int) -> bool:
        """Return whether a check has failed since the last call, while this node worked or waited. Does not wait."""
        return self._probe is not None and self._judge(self._probe.take_failures(), cycle)

    def refuse(self) -> str | None:
        """Do not let this node join any more; return why."""
        self.is_refused = True
        if self._tolerated is not None:
            self._say(self._tolerated)
        return self.unfit

    def condemn(self, result: CheckResult, cycle: int) -> str:
        """Do not let this node join `cycle` or later ones because of this failure; return it as a reason."""
        self._judge([result], cycle)
        return self.refuse() or result.why

    def pardon(self) -> None:
        """Forget what was tolerated: it is about to be checked again."""
        if self._tolerated is not None and not self.is_refused:
            self.unfit = self._tolerated = None

    def tolerate(self, result: CheckResult, cycle: int, may_leave: bool) -> None:
        """Publish a failure with which this node takes part, until a spare comes if it `may_leave`."""
        earlier = self.unfit
        self._judge([result], cycle, is_told=False)
        self._tolerated, self.unfit = (self.unfit, self.unfit) if may_leave else (None, earlier)

    def exit(self, reason: str) -> LauncherExit:
        """Return how the launcher of this node ends: as an excluded one, or with 1 if the job has too few others."""
        self.report_others(at_once=True)
        if len(self._nodes | {_here()}) <= self._spares:
            return LauncherExit(0, f"this node is unfit and takes no part: {reason}", is_excluded=True)
        return LauncherExit(1, f"this node is unfit, and no spare node is left for it: {reason}")

    def report_others(self, at_once: bool = False) -> bool:
        """Log which other nodes are unfit, once a second at most; return whether it looked."""
        if not at_once and time.monotonic() < self._next_read_s:
            return False
        self._next_read_s = time.monotonic() + _OTHERS_INTERVAL_S
        store = self._rounds.job_store
        try:
            lines = store.get("unfit").splitlines() if store is not None and store.check(["unfit"]) else []
            while self._read < len(lines):
                self._read += 1
                entry = _UnfitNode(**json.loads(lines[self._read - 1]))
                self._nodes.add((entry.host, entry.pid))
                if (entry.host, entry.pid) != _here():
                    node = f"{entry.host} (launcher {entry.pid})"
                    _log.warning("cause: %s", cause_of_node(node, "unfit", entry.reason))
        except (RuntimeError, ValueError, TypeError) as error:
            _log.debug("unfit nodes cannot be read: %s", error)  # a store that is lost is noticed elsewhere
        return True

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._probe is not None:
            self._probe.close()

    def _judge(self, failures: Sequence[CheckResult], cycle: int, is_told: bool = True) -> bool:
        if not failures:
            return False
        self.unfit = reason = "; ".join(f"{result.name}: {result.why}" for result in failures)
        _log.error("this node is unfit: %s", reason)
        if is_told:
            self._say(reason)
        if self._folder is not None:
            folder = Path(self._folder)
            try:
                bounded_call(lambda: _publish(folder, cycle, failures, reason), _PUBLISH_S, f"writing to {folder}")
            except (OSError, TimeoutError) as error:
                _log.error("the failure is not published: %s", error)
        return True

    def _say(self, reason: str) -> None:
        store = self._rounds.job_store
        if store is None:
            return
        host, pid = _here()
        entry = json.dumps({"host": host, "pid": pid, "reason": reason})
        try:
            store.append("unfit", f"{entry}\n")
        except RuntimeError as error:
            _log.warning("the other nodes are not told: %s", error)


def _here() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _publish(folder: Path, cycle: int, failures: Sequence[CheckResult], reason: str) -> None:
    """Write the failures for others: whole or not at all."""
    host, pid = _here()
    failed = {result.name: result.why for result in failures}
    values: dict[str, Any] = {"time": time.time(), "host": host, "pid": pid, "cycle": cycle, "failed": failed}
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{host}.{pid}.json"
    part.write_text(json.dumps(values) + "\n")
    part.replace(folder / f"{host}.json")
    fault_class = class_of(Symptoms("unfit node", reason))
    RestartEvents(os.fspath(folder / "log")).node_unfit(host, cycle, failed, fault_class)


def check_settings(config: FaultToleranceConfig) -> NodeCheckSettings | None:
    """Return the checks that the settings and the devices of this node ask for; None if there are none.

    ValueError for a setting that cannot be used here.
    """
    paths = [path.strip() for path in (config.storage_healthcheck_path or "").split(",") if path.strip()]
    for name, path in [
        *(("storage_healthcheck_path", path) for path in paths),
        ("segment_health_check_dir", config.segment_health_check_dir),
        ("node_health_publish_dir", config.node_health_publish_dir),
    ]:
        if path is not None and not os.path.isabs(path):
            raise ValueError(f"{name} must be an absolute path, not {path!r}")
    endpoint = config.node_health_check_endpoint or ""
    if endpoint:
        socket_path_of(endpoint)
        if importlib.util.find_spec("grpc") is None:
            raise ValueError(
                "node_health_check_endpoint needs the package grpcio (pip install grpcio); without it, give a command "
                "that asks the service: --ft-node-health-check-command"
            )
    settings = NodeCheckSettings(
        interval_s=config.node_health_check_interval,
        limit_s=config.node_health_check_timeout,
        checks_gpus=config.enable_gpu_healthcheck and importlib.util.find_spec("pynvml") is not None,
        checks_network_cards=config.enable_nic_healthcheck and os.path.isdir("/sys/class/infiniband"),
        checks_shared_mounts=config.enable_dist_storage_healthcheck,
        storage_paths=tuple(paths),
        min_free_bytes=int(config.storage_min_free_gb * 1e9),
        max_clock_error_s=config.max_clock_error,
        endpoint=endpoint,
        command=config.node_health_check_command or "",
        segment_folder=config.segment_health_check_dir or "",
    )
    nothing = NodeCheckSettings(settings.interval_s, settings.limit_s, min_free_bytes=settings.min_free_bytes)
    return None if settings == nothing else settings
