"""The check of the links between the nodes of a round, before their workers start: `--ft-network-check`.

    launcher of each node                     its processes (`transfer_process`: one, or one per GPU)
      NetworkCheck ── MeasureTransfer ──────▶   all-reduces with those of the node's partner
                   ◀───── TransferReport ────   a time for each
      times of all pairs, through the meeting: each launcher computes the next pairs, and the verdict

A node whose link is broken leaves. The slowest of those with a slow link leaves if a spare waits. The others meet again
then. All of them know the times, so none asks another which nodes are bad (`link_verdict`).
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch.distributed import is_nccl_available

from inprocess.attribution import Cause
from inprocess.bounded_waits import bounded_call
from inprocess.exception import TimeoutError
from inprocess.fault_classes import FaultClass
from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.launcher.meeting import Meeting, MeetingError
from inprocess.fault_tolerance.launcher.node_admission import NodeAdmission
from inprocess.fault_tolerance.launcher.rendezvous_rounds import Rounds
from inprocess.ipc.deadline import Deadline
from inprocess.node_health.interface import FAILED, CheckResult
from inprocess.node_health.link_probe import LinkProbe, TransferTime
from inprocess.node_health.link_verdict import LinkVerdict, Pair, judge, next_pairs
from inprocess.node_health.messages import MeasureTransfer

_log = logging.getLogger(__name__)
_START_S = 60.0  # for processes that import torch, on a busy machine
_GRACE_S = 30.0  # for other launchers, beside what their processes may take
_MOST_STAGES = 8
_REPEATS = 4
_DRIVER_S = 20.0
_SPARE_POLL_S = 0.2


@dataclass(frozen=True)
class LinkState:
    """A node before its links are checked. `check` is the id of the check that it leads if it is node 0.

    `passed` is the id of the last check in which it took part. `is_suspect`: a fault of the network was seen since.
    """

    host: str
    pid: int
    processes: int
    has_gpus: bool
    check: str
    passed: str
    is_suspect: bool


class NetworkCheck:
    """The check of the links of this node, and what follows from it. For the launcher's thread.

    `workers` is the number of workers of this node. A spare is seen to run within `alive_interval_s`.
    """

    def __init__(
        self,
        config: FaultToleranceConfig,
        rounds: Rounds,
        admission: NodeAdmission,
        workers: int,
        alive_interval_s: float,
    ) -> None:
        self._config = config
        self._rounds = rounds
        self._admission = admission
        self._workers = workers
        self._alive_interval_s = alive_interval_s
        self._passed = ""
        self._is_suspect = False
        self._number = 0

    def note_cause(self, cause: Cause | None) -> None:
        """Check the links again before the next cycle if workers have failed because of the network."""
        self._is_suspect |= cause is not None and cause.fault_class is FaultClass.NETWORK

    def state(self) -> str:
        """Return the `LinkState` of this node, for `refusal` on all nodes; nothing if links are not checked."""
        if not self._config.network_check:
            return ""
        gpus = min(self._gpus, self._workers)
        check = uuid.uuid4().hex[:12]
        here = socket.gethostname(), os.getpid()
        return json.dumps(asdict(LinkState(*here, max(1, gpus), gpus > 0, check, self._passed, self._is_suspect)))

    def refusal(self, meeting: Meeting, states: Sequence[str], cycle: int) -> str | None:
        """Check the links of the nodes of this meeting, unless that was done; return why this node may not take part.

        MeetingError if the nodes must meet again, because one has left or does not answer. Returns within the limits of
        the stages, whatever hangs. A signal handler may raise meanwhile.
        """
        if meeting.nodes == 1 or meeting.is_late or not self._config.network_check:
            return None
        address = self._rounds.store_address
        if not all(states) or address is None:
            _log.warning("links are not checked: --ft-network-check must be given on all nodes, with a store over TCP")
            return None
        nodes = [LinkState(**json.loads(state)) for state in states]
        if nodes[0].passed and len({node.passed for node in nodes}) == 1 and not any(node.is_suspect for node in nodes):
            _log.info("links are not checked again: these nodes have passed together")
            return None
        _log.info("the links of %d nodes are checked", meeting.nodes)
        stages = _Stages(self._config, meeting, nodes, address)
        try:
            stages.run()
        finally:
            stages.probe.close()
        self._is_suspect = False
        self._admission.pardon()
        verdict = judge(meeting.nodes, stages.times, self._config.network_check_factor)
        stages.log(verdict)
        reason = self._act(meeting, stages, verdict, cycle)
        self._passed = nodes[0].check
        return reason

    def _act(self, meeting: Meeting, stages: _Stages, verdict: LinkVerdict, cycle: int) -> str | None:
        """Leave, or have the nodes meet again because others leave; None if this round goes on."""
        me = meeting.node
        if me in verdict.broken:
            return self._admission.condemn(CheckResult("network", FAILED, stages.why_broken(me)), cycle)
        if verdict.broken:
            raise MeetingError(f"{stages.named(verdict.broken)} cannot take part: the link is broken")
        if not verdict.slow:
            return None
        slowest = verdict.slow[0]
        is_leaving = me == slowest and self._has_spare()
        answers = meeting.gather("links/leaves", str(int(is_leaving)), self._alive_interval_s + _GRACE_S)
        if me in verdict.slow:
            result = CheckResult("network", FAILED, stages.why_slow(me, verdict.reference_s))
            if is_leaving:
                return self._admission.condemn(result, cycle)
            self._admission.tolerate(result, cycle, may_leave=me == slowest)
        if answers[slowest] == "1":
            raise MeetingError(f"{stages.named([slowest])} leaves: the link is slow, and a spare waits")
        _log.error("%s: the link is slow, and no spare is seen to run: the node goes on", stages.named([slowest]))
        return None

    def _has_spare(self) -> bool:
        deadline = time.monotonic() + self._alive_interval_s + 1
        while not self._rounds.has_spare():
            if time.monotonic() > deadline:
                return False
            time.sleep(_SPARE_POLL_S)
        return True

    @functools.cached_property
    def _gpus(self) -> int:
        """How many GPUs there are. CUDA is not initialized in this process: torch asks NVML."""
        if not is_nccl_available():
            return 0
        try:
            return bounded_call(torch.cuda.device_count, _DRIVER_S, "counting GPUs")
        except TimeoutError:
            return 0


class _Stages:
    """The stages of one check, with the `times` of all pairs. In each, pairs of nodes transfer at the same time."""

    def __init__(
        self, config: FaultToleranceConfig, meeting: Meeting, nodes: Sequence[LinkState], address: tuple[str, int]
    ) -> None:
        self.probe = LinkProbe(nodes[meeting.node].processes)
        self.times: dict[Pair, float] = {}
        self._errors: dict[int, str] = {}  # of the last transfer of a node
        self._config = config
        self._meeting = meeting
        self._nodes = nodes
        self._address = address
        self._began = time.monotonic()
        self._stages = 0

    def run(self) -> None:
        """Transfer until the times tell which nodes are bad."""
        meeting, limit_s = self._meeting, self._config.network_check_timeout
        while self._stages < _MOST_STAGES:
            pairs = next_pairs(meeting.nodes, self.times, self._config.network_check_factor)
            if not pairs:
                return
            pair = next((pair for pair in pairs if meeting.node in pair), None)
            own, deadline = TransferTime(math.inf), Deadline(_START_S + _GRACE_S)
            if pair is not None or self._stages == 0:  # a node that waits in the first stage starts its processes
                own = TransferTime(math.inf, self.probe.prepare(_START_S))
            name = f"links/{self._stages}"
            self._stages += 1
            meeting.gather(f"{name}/ready", "", deadline.left_s)
            if pair is not None and not own.why:
                own = self.probe.measure(self._requests(pair), limit_s)
            found = meeting.gather(f"{name}/time", json.dumps(asdict(own)), limit_s + _GRACE_S)
            self._enter(pairs, [TransferTime(**json.loads(text)) for text in found])

    def _enter(self, pairs: Sequence[Pair], found: Sequence[TransferTime]) -> None:
        for pair in pairs:
            self.times[pair] = max(found[node].seconds for node in pair)
            for node in pair:
                if found[node].why:
                    self._errors[node] = found[node].why

    def _requests(self, pair: Pair) -> list[MeasureTransfer]:
        """Return the request of each process of this node. Ranks are numbered from the smaller node of the pair on."""
        nodes, config = self._nodes, self._config
        first, second = (nodes[node].processes for node in pair)
        start = 0 if self._meeting.node == pair[0] else first
        host, port = self._address
        return [
            MeasureTransfer(
                number=self._stages,
                host=host,
                port=port,
                prefix=f"network_check/{nodes[0].check}/{self._stages}/{pair[0]}",
                rank=start + device,
                world_size=first + second,
                backend="nccl" if all(node.has_gpus for node in nodes) else "gloo",
                device=device,
                size_bytes=int(config.network_check_mb * 1e6),
                repeats=_REPEATS,
                limit_s=config.network_check_timeout,
            )
            for device in range(self.probe.count)
        ]

    # -- texts ---------------------------------------------------------------------------------------------------------

    def named(self, nodes: Sequence[int]) -> str:
        """Return nodes by number, host, and process id of the launcher."""
        return ", ".join(f"node {node} ({self._nodes[node].host}, launcher {self._nodes[node].pid})" for node in nodes)

    def why_broken(self, node: int) -> str:
        """Return why a node counts as broken."""
        error = self._errors.get(node, "")
        return f"no transfer with {self._partners(node)} has worked{f': {error}' if error else ''}"

    def why_slow(self, node: int, reference_s: float) -> str:
        """Return why a node counts as slow."""
        best_s = min(time_s for pair, time_s in self.times.items() if node in pair)
        return (
            f"transfers with {self._partners(node)} took {self._rate(best_s)} at best, those of other nodes "
            f"{self._rate(reference_s)}"
        )

    def log(self, verdict: LinkVerdict) -> None:
        """Log the result: the same on all nodes."""
        size = f"{self._config.network_check_mb:g} MB"
        taken_s = time.monotonic() - self._began
        what = f"the network check of {len(self._nodes)} nodes took {taken_s:.1f} s in {self._stages} stages"
        _log.info("%s; all-reduces of %s took %s in the median", what, size, self._rate(verdict.reference_s))
        for node in verdict.broken:
            _log.error("network check: the link of %s is broken: %s", self.named([node]), self.why_broken(node))
        for node in verdict.slow:
            why = self.why_slow(node, verdict.reference_s)
            _log.error("network check: the link of %s is slow: %s", self.named([node]), why)
        for pair in verdict.apart:
            text = "network check: %s do not reach each other as they reach others: %s"
            _log.error(text, self.named(pair), self._rate(self.times[pair]))
        if verdict.unclear:
            errors = "; ".join(dict.fromkeys(self._errors[node] for node in verdict.unclear if node in self._errors))
            text = "network check: no transfer of %s has worked, and the times do not tell where the fault is: %s"
            _log.error(text, self.named(verdict.unclear), errors)

    def _partners(self, node: int) -> str:
        others = sorted(sum(pair) - node for pair in self.times if node in pair)
        return f"node{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"

    def _rate(self, time_s: float) -> str:
        if time_s == math.inf:
            return f"more than {self._config.network_check_timeout:g} s"
        return f"{time_s:.4f} s ({8e-3 * self._config.network_check_mb / max(time_s, 1e-9):.3g} Gbit/s)"
