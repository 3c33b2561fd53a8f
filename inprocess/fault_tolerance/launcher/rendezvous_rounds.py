"""Rounds of a rendezvous: each is the nodes of one cycle, with the store in which they meet.

`StaticRounds` are here: node k is always node k. Nodes that come and go have `DynamicRounds`. Torch's loop over cycles
is not used, so neither has what only that asks for.

All that these ask the store has a limit (see `bounded_store`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # by its documented name
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from inprocess.fault_tolerance.launcher.bounded_store import BoundedStore, interruptible
from inprocess.fault_tolerance.launcher.meeting import Meeting, StoreLost
from inprocess.node_layout import NodeLayout

MEETING_PREFIX = "inprocess.fault_tolerance"
_POLL_S = 0.1


class Rounds(RendezvousHandler):
    """A handler for torch's agent, with the `meeting` of the latest round; None before the first. One thread."""

    def __init__(self, backend: str, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id
        self.meeting: Meeting | None = None

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self._backend

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether the job is over; False where it is not known."""
        return False

    def set_closed(self) -> None:
        """Do nothing; not used."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nodes that wait make themselves known in the meeting."""
        return 0

    def shutdown(self) -> bool:
        """Let no node join any more. False if the store does not answer."""
        return True

    def leave(self) -> None:
        """Make room for a spare, now. The job goes on."""

    def least_cycle(self) -> int:
        """Return the least number of the next cycle: one more than the last, which this node may not know."""
        return 0

    def record_cycle(self, cycle: int) -> None:
        """Record the number of the cycle that begins, on any of its nodes, for `least_cycle`."""

    @property
    def job_store(self) -> Any:
        """The store of the rendezvous for what all rounds have in common; None if it is not known (yet)."""
        return None

    @property
    def store_address(self) -> tuple[str, int] | None:
        """Host and port of the store of the rendezvous, by which other processes reach it; None if it has none."""
        return None

    def has_spare(self) -> bool:
        """Whether a node waits that could take the place of this one."""
        return False

    def hosts_store(self) -> bool:
        """Whether this process hosts the store, so that the others end with it."""
        return False

    def layout(self) -> NodeLayout | None:
        """Return the first nodes of the round, for spare nodes to join it; None if they cannot."""
        return None

    def first_rank(self) -> int:
        """Return the first initial rank of this node, which has joined the round after it had begun."""
        raise NotImplementedError

    def is_deserted(self) -> bool:
        """Whether no node is in the rendezvous or waits for it."""
        return False


class StaticRounds(Rounds):
    """Rounds of a `StaticTCPRendezvous`: node k is always node k.

    A launcher that replaces one that has died joins the round after the present one, and asks the others to join it,
    too. `timeout_s` is how long a node waits for the others, `bounded` makes the store that is asked of torch's.
    """

    def __init__(self, inner: StaticTCPRendezvous, timeout_s: float, bounded: Callable[[Any], BoundedStore]) -> None:
        super().__init__(inner.get_backend(), inner.get_run_id())
        self._inner = inner
        self._timeout_s = timeout_s
        self._bounded = bounded
        self._base: BoundedStore | None = None
        self._next = 0

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use a store that a launcher hosts."""
        return bool(self._inner.use_agent_store)

    @property
    def store_address(self) -> tuple[str, int] | None:
        """See base class."""
        return None if self._base is None else self._base.address

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round when all nodes have joined.

        RendezvousClosedError if the job has ended meanwhile, RendezvousTimeoutError if a node does not join, StoreLost
        if node 0 does not answer.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            # Node 0 waits for the others here, and they wait for node 0.
            first = interruptible(self._inner.next_rendezvous, "launcher-rendezvous")
            base = self._base = self._base or self._bounded(first.store)
            earlier = self.meeting
            while True:
                number = max(self._next, self._current(base))
                self._next = number + 1
                store = PrefixStore(f"round_{number}", base)
                meeting = Meeting(PrefixStore(MEETING_PREFIX, store), first.rank, first.world_size)
                if meeting.nodes == 1 or self._join(base, meeting, number, earlier, deadline):
                    break
        except RuntimeError as error:
            raise StoreLost(str(error)) from error
        self.meeting = meeting
        return RendezvousInfo(store, first.rank, first.world_size, _store_info(first))

    def _current(self, store: Any) -> int:
        key = f"{MEETING_PREFIX}/round"
        return int(store.get(key)) if store.check([key]) else 0

    def _join(self, base: Any, meeting: Meeting, number: int, earlier: Meeting | None, deadline: float) -> bool:
        """Wait for all nodes. False if this round is not for this launcher: one that it replaces was in it."""
        if meeting.store.add(f"joined/{meeting.node}", 1) > 1:
            meeting.ask_restart(f"node {meeting.node} has been started again")
            return False
        if number > self._current(base):
            base.set(f"{MEETING_PREFIX}/round", str(number))
        keys = [f"joined/{node}" for node in range(meeting.nodes)]
        while not meeting.store.check(keys):
            if meeting.has_words():
                return False
            if earlier is not None and earlier.stopped() is not None:
                raise RendezvousClosedError
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"not all {meeting.nodes} nodes have joined")
            time.sleep(_POLL_S)
        return not meeting.has_words()


def _store_info(info: RendezvousInfo) -> RendezvousStoreInfo:
    found = info.bootstrap_store_info
    assert found is not None, "the static rendezvous names the store for workers"
    return found
