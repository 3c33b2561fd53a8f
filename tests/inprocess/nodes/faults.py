"""Faults of a laboratory as data: what is done, which ranks it concerns, and which cannot reach the server.

The server of a job is a process that initial rank 0 has started, on node 0; it is stopped with that rank. A job whose
store is in etcd has none: a rank that cannot reach the other members of the cluster has no store.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tests.inprocess.nodes.job import Job
from tests.inprocess.nodes.lab import Lab


class Kind(enum.Enum):
    """What is done to a node, or to a rank."""

    CUT = "cut"  # all packets of a node are lost
    LOSE_TO = "lose-to"  # all packets to a node are lost
    LOSE_FROM = "lose-from"  # all packets from a node are lost
    LOSS = "loss"  # 5 % of the packets of a node are lost
    SLOW = "slow"  # a node sends and receives 400 kbit/s
    DELAY = "delay"  # packets of a node arrive 100 ms late
    FREEZE_NODE = "freeze-node"  # all processes of a node are stopped
    KILL_NODE = "kill-node"  # all processes of a node are killed
    POWER_OFF = "power-off"  # so, and no connection is closed
    REBOOT = "reboot"  # so, and the node is back without processes
    FREEZE_RANK = "freeze-rank"  # a rank and its monitor process are stopped
    KILL_RANK = "kill-rank"  # the process of a rank is killed
    KILL_MONITOR = "kill-monitor"  # the monitor process of a rank is killed
    KILL_SERVER = "kill-server"  # the process that serves the coordination store is killed, whatever `at` is
    EXCEPTION = "exception"  # the function of a rank raises


_OF_A_RANK = {Kind.FREEZE_RANK, Kind.KILL_RANK, Kind.KILL_MONITOR, Kind.KILL_SERVER, Kind.EXCEPTION}
_LOSS_PERCENT, _SLOW_KILOBITS, _DELAY_S = 5.0, 400, 0.1
_NO_WAY_TO = {Kind.CUT, Kind.LOSE_TO, Kind.LOSE_FROM}
_FREEZES = {Kind.FREEZE_NODE, Kind.FREEZE_RANK}
_ENDS = {Kind.KILL_NODE, Kind.POWER_OFF, Kind.REBOOT}


@dataclass(frozen=True)
class Fault:
    """A fault of the node or rank `at`.

    It begins `begin_s` after all ranks have made a step, or, with `during`, when the first rank is in that phase of a
    restart. It ends after `lasts_s`; None: never.
    """

    kind: Kind
    at: int
    begin_s: float = 0.3
    lasts_s: float | None = None
    during: str | None = None

    def __str__(self) -> str:
        where = f"rank {self.at}" if self.is_of_rank else f"node {self.at}"
        when = f"in {self.during}" if self.during is not None else f"at {self.begin_s:.2f} s"
        return f"{self.kind.value} of {where} {when}" + ("" if self.lasts_s is None else f" for {self.lasts_s:.2f} s")

    @property
    def is_of_rank(self) -> bool:
        """Whether `at` is a rank, not a node."""
        return self.kind in _OF_A_RANK

    @property
    def is_of_link(self) -> bool:
        """Whether packets are lost, delayed or held up; no process is harmed."""
        return self.kind in _NO_WAY_TO | {Kind.LOSS, Kind.SLOW, Kind.DELAY}

    @property
    def can_end(self) -> bool:
        """Whether the fault can be undone."""
        return self.is_of_link or self.kind in _FREEZES

    def begin(self, lab: Lab, job: Job) -> None:
        """Begin the fault."""
        match self.kind:
            case Kind.CUT:
                lab.cut(self.at)
            case Kind.LOSE_TO:
                lab.network.lose_to(self.at)
            case Kind.LOSE_FROM:
                lab.network.lose_from(self.at)
            case Kind.LOSS:
                lab.network.lose(self.at, _LOSS_PERCENT)
            case Kind.SLOW:
                lab.network.slow(self.at, _SLOW_KILOBITS)
            case Kind.DELAY:
                lab.network.delay(self.at, _DELAY_S)
            case Kind.FREEZE_NODE:
                lab.freeze(self.at)
            case Kind.KILL_NODE:
                lab.kill_node(self.at)
            case Kind.POWER_OFF:
                lab.power_off(self.at)
            case Kind.REBOOT:
                lab.reboot(self.at)
            case Kind.FREEZE_RANK:
                job.freeze_rank(self.at)
            case Kind.KILL_RANK:
                job.kill_rank(self.at)
            case Kind.KILL_MONITOR:
                job.kill_monitor(self.at)
            case Kind.KILL_SERVER:
                job.kill_server()
            case Kind.EXCEPTION:
                job.fail(self.at)

    def end(self, lab: Lab, job: Job) -> None:
        """End the fault."""
        assert self.can_end, self
        if self.is_of_link:
            lab.heal(self.at)
        elif self.kind is Kind.FREEZE_NODE:
            lab.thaw(self.at)
        else:
            job.thaw_rank(self.at)

    # -- ranks concerned -----------------------------------------------------------------------------------------------

    def _at_it(self, job: Job) -> frozenset[int]:
        return frozenset([self.at] if self.is_of_rank else job.ranks_of(self.at))

    def _is_of_server(self, job: Job) -> bool:
        if job.server_rank is None:
            return False
        return self.kind is Kind.KILL_SERVER or job.server_rank in self._at_it(job)

    def stopped(self, job: Job) -> frozenset[int]:
        """The initial ranks that do not run meanwhile."""
        return self._at_it(job) if self.kind in _FREEZES else frozenset()

    def without_server(self, job: Job) -> frozenset[int]:
        """The initial ranks that cannot reach the server meanwhile."""
        everyone = frozenset(job.pids)
        if self.kind in _ENDS or self.kind is Kind.KILL_SERVER:
            return everyone if self._is_of_server(job) else frozenset()
        if self.kind in _FREEZES:
            return everyone - self._at_it(job) if self._is_of_server(job) else frozenset()
        if self.kind in _NO_WAY_TO:
            return everyone - self._at_it(job) if self._is_of_server(job) else self._at_it(job)
        return frozenset()

    def may_cost(self, job: Job) -> frozenset[int]:
        """The initial ranks that need not complete the function after this fault."""
        everyone = frozenset(job.pids)
        if self.kind in (Kind.EXCEPTION, Kind.KILL_MONITOR):
            return frozenset()
        if self._is_of_server(job) and self.is_of_link:
            return everyone - self._at_it(job)
        if self._is_of_server(job) and self.kind is not Kind.KILL_RANK:
            return everyone
        return self._at_it(job)
