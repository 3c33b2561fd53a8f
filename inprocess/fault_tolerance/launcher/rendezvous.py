"""Torch's rendezvous handlers, made fit for restarts of the whole job.

`DynamicRounds` wraps the dynamic ones (c10d, etcd-v2). With as many nodes as the job needs in a round, torch keeps the
others waiting without disturbing the round, and lets them in when one of the round leaves or its heartbeat stops: these
are the hot spares. `StaticRounds` wraps the static one, which knows one round only, and lets all nodes meet again.
"""

from __future__ import annotations

import contextlib
import time
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

from inprocess.fault_tolerance.launcher.meeting import Meeting, StoreLost

__all__ = ["DynamicRounds", "Rounds", "StaticRounds", "rounds_over"]

_PREFIX = "inprocess.fault_tolerance"
_POLL_S = 0.1
_SILENCE_S = 15.0
_SPARES_NOTICE_S = 2.5  # they look every second


class Rounds(RendezvousHandler):
    """A handler of torch's that leaves the `meeting` of the round it has made; None before the first. One thread."""

    def __init__(self, inner: RendezvousHandler) -> None:
        self.inner = inner
        self.meeting: Meeting | None = None
        self.silence_s = _SILENCE_S  # a node that has not answered for so long is gone

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use a store that a launcher hosts."""
        return bool(self.inner.use_agent_store)

    def is_closed(self) -> bool:
        """Whether nobody is let in any more."""
        return bool(self.inner.is_closed())

    def set_closed(self) -> None:
        """Let nobody in any more."""
        self.inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round because one of this round is gone."""
        return int(self.inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        """Let nobody in any more, and stop heartbeats. False if the backend is gone."""
        return bool(self.inner.shutdown())

    def leave(self) -> None:
        """Make room for a spare, now. The job goes on."""


class DynamicRounds(Rounds):
    """Over `DynamicRendezvousHandler`."""

    def __init__(self, inner: RendezvousHandler, has_spares: bool) -> None:
        super().__init__(inner)
        self._has_spares = has_spares

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round when there are enough nodes. Raises what torch raises; a spare may wait for long."""
        # Torch keeps the address of the first round's store for workers, even when another node has become the first,
        # and the address is that of a machine that is gone.
        if hasattr(self.inner, "_bootstrap_store_info"):
            self.inner._bootstrap_store_info = None
        info = self.inner.next_rendezvous()
        self.meeting = Meeting(PrefixStore(_PREFIX, info.store), info.rank, info.world_size)
        return info

    def shutdown(self) -> bool:
        """See base class. Where spares may wait, stays until they have seen it: the store may be hosted here."""
        ended = super().shutdown()
        if ended and self._has_spares:
            time.sleep(_SPARES_NOTICE_S)
        return ended

    def leave(self) -> None:
        """See base class. If torch's handler has changed, room is made when the heartbeat has been missed."""
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

        inner: Any = self.inner
        with contextlib.suppress(AttributeError):
            inner._stop_heartbeats()
            inner._op_executor.run(torchs._RendezvousExitOp(), time.monotonic() + _SPARES_NOTICE_S)


class StaticRounds(Rounds):
    """Over `StaticTCPRendezvous`: node k is always node k.

    A launcher that was started again in the place of one that has died joins the round after the current one, and asks
    the others to come there. `timeout_s` is how long a node waits for the others.
    """

    def __init__(self, inner: StaticTCPRendezvous, timeout_s: float) -> None:
        super().__init__(inner)
        self._timeout_s = timeout_s
        self._next = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round when all nodes have come.

        RendezvousClosedError when the job has ended meanwhile, RendezvousTimeoutError when a node does not come,
        StoreLost when node 0 is gone.
        """
        first = self.inner.next_rendezvous()
        deadline = time.monotonic() + self._timeout_s
        earlier = self.meeting
        while True:
            number = max(self._next, self._current(first.store))
            self._next = number + 1
            store = PrefixStore(f"round_{number}", first.store)
            meeting = Meeting(PrefixStore(_PREFIX, store), first.rank, first.world_size)
            try:
                if meeting.nodes == 1 or self._join(first.store, meeting, number, earlier, deadline):
                    break
            except RuntimeError as error:
                raise StoreLost(str(error)) from error
        self.meeting = meeting
        return RendezvousInfo(store, first.rank, first.world_size, _store_info(first))

    def _current(self, store: Any) -> int:
        key = f"{_PREFIX}/round"
        return int(store.get(key)) if store.check([key]) else 0

    def _join(self, base: Any, meeting: Meeting, number: int, earlier: Meeting | None, deadline: float) -> bool:
        """Wait for all. False if this round is not for us: a predecessor of this launcher was in it."""
        if meeting.store.add(f"joined/{meeting.node}", 1) > 1:
            meeting.ask_restart(f"node {meeting.node} has been started again")
            return False
        if number > self._current(base):
            base.set(f"{_PREFIX}/round", str(number))
        keys = [f"joined/{node}" for node in range(meeting.nodes)]
        while not meeting.store.check(keys):
            if meeting.has_words():
                return False
            if earlier is not None and earlier.stopped() is not None:
                raise RendezvousClosedError
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"not all of {meeting.nodes} nodes come")
            time.sleep(_POLL_S)
        return not meeting.has_words()


def _store_info(info: RendezvousInfo) -> RendezvousStoreInfo:
    found = info.bootstrap_store_info
    assert found is not None, "the static rendezvous names the store for workers"
    return found


def rounds_over(handler: RendezvousHandler, has_spares: bool, timeout_s: float) -> Rounds:
    """Return the rounds for a handler of torch's."""
    if isinstance(handler, StaticTCPRendezvous):
        return StaticRounds(handler, timeout_s)
    return DynamicRounds(handler, has_spares)
