"""Named scenarios: a job, and what happens to it.

Three nodes with two ranks each, if nothing else is said. The server is on node 0; or there is an etcd cluster, with a
member on each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.inprocess.nodes.faults import Fault, Kind
from tests.inprocess.nodes.program import PHASES, Options

_SHORT_S, _LONG_S, _VERY_LONG_S = 1.0, 6.0, 12.0  # a lost node is noticed after 1.5 heartbeat timeouts of 2 s
_PAUSE_S = 1.0
_WITH_CHECKPOINTS = Options(
    checkpoints=True, step_s=0.2, soft_timeout_s=8.0, hard_timeout_s=12.0, barrier_timeout_s=15.0
)
_WITH_ETCD = Options(etcd=True, heartbeat_timeout_s=4.0, hard_timeout_s=16.0, barrier_timeout_s=20.0)


@dataclass(frozen=True)
class Scenario:
    """`all_finish`: no rank may be lost. `quick`: part of `make test`."""

    name: str
    faults: Sequence[Fault]
    nodes: int = 3
    ranks_per_node: int = 2
    all_finish: bool = False
    quick: bool = False
    options: Options = field(default_factory=Options)

    def __str__(self) -> str:
        return self.name


def _one(name: str, kind: Kind, at: int, lasts_s: float | None = None, **more: bool) -> Scenario:
    return Scenario(name, [Fault(kind, at, lasts_s=lasts_s)], all_finish=more.get("all_finish", False))


def _in_phase(phase: str, kind: Kind, at: int, lasts_s: float | None = None) -> Scenario:
    """Rank 3, on node 1, begins a restart; the second fault occurs in one of its phases."""
    faults = [Fault(Kind.EXCEPTION, 3), Fault(kind, at, during=phase, lasts_s=lasts_s)]
    where = f"rank {at}" if faults[1].is_of_rank else f"node {at}"
    name = f"{kind.value} of {where}" + ("" if lasts_s is None else " and back")
    return Scenario(f"in {phase}: {name}", faults, options=Options(pauses={phase: _PAUSE_S}))


def _with_etcd(name: str, kind: Kind, at: int, lasts_s: float | None = None, *, all_finish: bool = False) -> Scenario:
    return Scenario(f"etcd: {name}", [Fault(kind, at, lasts_s=lasts_s)], all_finish=all_finish, options=_WITH_ETCD)


def _with_checkpoints(name: str, *faults: Fault) -> Scenario:
    return Scenario(f"checkpoints: {name}", faults, ranks_per_node=1, options=_WITH_CHECKPOINTS)


SCENARIOS: Sequence[Scenario] = (
    Scenario("an exception", [Fault(Kind.EXCEPTION, 3)], nodes=2, all_finish=True),
    Scenario("two nodes, one cut off", [Fault(Kind.CUT, 1)], nodes=2, ranks_per_node=1, quick=True),
    _one("cut off", Kind.CUT, 2),
    _one("cut off, node 0", Kind.CUT, 0),
    _one("short blip", Kind.CUT, 2, _SHORT_S, all_finish=True),
    _one("short blip, node 0", Kind.CUT, 0, _SHORT_S, all_finish=True),
    _one("long blip", Kind.CUT, 2, _LONG_S),
    _one("long blip, node 0", Kind.CUT, 0, _LONG_S),
    _one("very long blip", Kind.CUT, 2, _VERY_LONG_S),
    _one("very long blip, node 0", Kind.CUT, 0, _VERY_LONG_S),
    _one("one way: nothing arrives at node 2", Kind.LOSE_TO, 2),
    _one("one way: nothing comes from node 2", Kind.LOSE_FROM, 2),
    _one("one way: nothing arrives at node 0", Kind.LOSE_TO, 0),
    _one("one way: nothing comes from node 0", Kind.LOSE_FROM, 0),
    _one("packet loss", Kind.LOSS, 2, _LONG_S, all_finish=True),
    _one("packet loss, node 0", Kind.LOSS, 0, _LONG_S, all_finish=True),
    _one("slow link", Kind.SLOW, 2, _LONG_S, all_finish=True),
    _one("slow link, node 0", Kind.SLOW, 0, _LONG_S, all_finish=True),
    _one("delay", Kind.DELAY, 2, _LONG_S, all_finish=True),
    _one("delay, node 0", Kind.DELAY, 0, _LONG_S, all_finish=True),
    _one("frozen for a moment, a rank", Kind.FREEZE_RANK, 3, _SHORT_S, all_finish=True),
    _one("frozen and back, a rank", Kind.FREEZE_RANK, 3, _LONG_S),
    _one("frozen and back, rank 0 with the server", Kind.FREEZE_RANK, 0, _LONG_S),
    _one("frozen and back, a node", Kind.FREEZE_NODE, 2, _LONG_S),
    _one("frozen and back, node 0", Kind.FREEZE_NODE, 0, _LONG_S),
    _one("frozen for long and back, a rank", Kind.FREEZE_RANK, 2, _VERY_LONG_S),
    _one("frozen for long and back, rank 0 with the server", Kind.FREEZE_RANK, 0, _VERY_LONG_S),
    _one("frozen for long and back, a node", Kind.FREEZE_NODE, 1, _VERY_LONG_S),
    _one("frozen for long and back, node 0", Kind.FREEZE_NODE, 0, _VERY_LONG_S),
    _one("killed, rank 0", Kind.KILL_RANK, 0),
    _one("killed, a rank", Kind.KILL_RANK, 4),
    _one("killed, a monitor process", Kind.KILL_MONITOR, 3, all_finish=True),
    _one("killed, the monitor process of rank 0", Kind.KILL_MONITOR, 0, all_finish=True),
    _one("killed, the server", Kind.KILL_SERVER, 0),
    _one("killed, a node", Kind.KILL_NODE, 1),
    _one("killed, node 0", Kind.KILL_NODE, 0),
    _one("lost, a node", Kind.POWER_OFF, 1),
    _one("lost, node 0", Kind.POWER_OFF, 0),
    _one("rebooted, a node", Kind.REBOOT, 1),
    _one("rebooted, node 0", Kind.REBOOT, 0),
    Scenario("two nodes lost at once", [Fault(Kind.POWER_OFF, 1), Fault(Kind.POWER_OFF, 2)]),
    Scenario("two nodes cut off at once", [Fault(Kind.CUT, 1), Fault(Kind.CUT, 2, lasts_s=_LONG_S)]),
    Scenario("a node cut off, and rank 0 killed", [Fault(Kind.CUT, 2), Fault(Kind.KILL_RANK, 0)]),
    Scenario(
        "a rank killed, and another frozen", [Fault(Kind.KILL_RANK, 2), Fault(Kind.FREEZE_RANK, 5, lasts_s=_LONG_S)]
    ),
    Scenario("a node lost behind packet loss", [Fault(Kind.LOSS, 0, lasts_s=_LONG_S), Fault(Kind.POWER_OFF, 2, 0.6)]),
    *(_in_phase(phase, Kind.CUT, 2) for phase in PHASES),
    *(_in_phase(phase, Kind.CUT, 2, _LONG_S) for phase in PHASES),
    *(_in_phase(phase, Kind.FREEZE_RANK, 5, _LONG_S) for phase in PHASES),
    *(_in_phase(phase, Kind.KILL_RANK, 0) for phase in PHASES),
    *(_in_phase(phase, Kind.KILL_MONITOR, 0) for phase in PHASES),
    *(_in_phase(phase, Kind.KILL_SERVER, 0) for phase in PHASES),
    *(_in_phase(phase, Kind.POWER_OFF, 0) for phase in PHASES),
    *(_in_phase(phase, Kind.REBOOT, 2) for phase in PHASES),
    _with_etcd("an exception", Kind.EXCEPTION, 3, all_finish=True),
    _with_etcd("short blip, node 0", Kind.CUT, 0, _SHORT_S, all_finish=True),
    _with_etcd("cut off, node 0", Kind.CUT, 0),
    _with_etcd("very long blip, node 0", Kind.CUT, 0, 2 * _VERY_LONG_S),
    _with_etcd("frozen for long and back, node 0", Kind.FREEZE_NODE, 0, 2 * _VERY_LONG_S),
    _with_etcd("killed, rank 0", Kind.KILL_RANK, 0),
    _with_etcd("lost, node 0", Kind.POWER_OFF, 0),
    _with_etcd("rebooted, node 0", Kind.REBOOT, 0),
    _with_checkpoints("an exception", Fault(Kind.EXCEPTION, 1)),
    _with_checkpoints("cut off", Fault(Kind.CUT, 2)),
    _with_checkpoints("long blip, node 0", Fault(Kind.CUT, 0, lasts_s=_LONG_S)),
    _with_checkpoints("frozen and back, a node", Fault(Kind.FREEZE_NODE, 2, lasts_s=_LONG_S)),
    _with_checkpoints("killed, rank 0", Fault(Kind.KILL_RANK, 0)),
    _with_checkpoints("lost, node 0", Fault(Kind.POWER_OFF, 0)),
)
