"""Torch's rendezvous handlers, adapted for restarts of the whole job.

`DynamicRounds` wraps the dynamic ones (c10d, etcd-v2). When a round has as many nodes as the job needs, torch keeps the
others waiting without disturbing the round, and admits them when a node leaves or its heartbeat stops: these are the
hot spares. `StaticRounds` wraps the static one, which has only one round, and lets all nodes meet again.

All that these ask the store has a limit (see `bounded_store`), in the main thread and in that of torch's heartbeats.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # by its documented name
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from inprocess.exception import TimeoutError
from inprocess.fault_tolerance.launcher.bounded_store import BoundedStore, interruptible
from inprocess.fault_tolerance.launcher.meeting import Meeting, StoreLost

__all__ = ["DynamicRounds", "Rounds", "StaticRounds", "rounds_of"]

_PREFIX = "inprocess.fault_tolerance"
_POLL_S = 0.1
_CONNECT_S = 60  # torch's default
_SPARES_NOTICE_S = 2.5  # they check every second


class Rounds(RendezvousHandler):
    """A handler of torch's with the `meeting` of its latest round; None before the first. One thread."""

    def __init__(self, inner: RendezvousHandler) -> None:
        self.inner = inner
        self.meeting: Meeting | None = None

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use a store that a launcher hosts."""
        return bool(self.inner.use_agent_store)

    def is_closed(self) -> bool:
        """Whether no node may join any more."""
        return bool(self.inner.is_closed())

    def set_closed(self) -> None:
        """Let no node join any more."""
        self.inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round because a node of this round has left."""
        return int(self.inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        """Let no node join any more, and stop heartbeats. False if the backend does not answer."""
        return bool(self.inner.shutdown())

    def leave(self) -> None:
        """Make room for a spare, now. The job goes on."""

    @property
    def job_store(self) -> Any:
        """The store of the rendezvous for what all rounds have in common; None if it is not known (yet)."""
        return None

    def has_spare(self) -> bool:
        """Whether a node waits that could take the place of this one."""
        return False

    def hosts_store(self) -> bool:
        """Whether this process hosts the store, so that the others end with it."""
        return False

    def is_deserted(self) -> bool:
        """Whether no node is in the rendezvous or waits for it."""
        return False


class DynamicRounds(Rounds):
    """Rounds of a `DynamicRendezvousHandler`."""

    def __init__(self, inner: RendezvousHandler, has_spares: bool) -> None:
        super().__init__(inner)
        self._has_spares = has_spares

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round when there are enough nodes. Torch's errors. A spare may wait indefinitely."""
        # Torch keeps the address of the first round's store for workers, even if another node is the first one now and
        # the address is that of a node that has failed.
        if hasattr(self.inner, "_bootstrap_store_info"):
            self.inner._bootstrap_store_info = None
        info = self.inner.next_rendezvous()
        self.meeting = Meeting(PrefixStore(_PREFIX, info.store), info.rank, info.world_size)
        return info

    def shutdown(self) -> bool:
        """See base class. If spares may wait, it returns when they have noticed: the store may be hosted here."""
        ended = super().shutdown()
        if ended and self._has_spares:
            time.sleep(_SPARES_NOTICE_S)
        return ended

    @property
    def job_store(self) -> Any:
        """See base class."""
        store = getattr(self.inner, "_store", None)
        return None if store is None else PrefixStore(f"{_PREFIX}.{self.get_run_id()}", store)

    def has_spare(self) -> bool:
        """See base class."""
        return self.num_nodes_waiting() > 0 or bool(self._nodes("redundancy_list"))

    def hosts_store(self) -> bool:
        """See base class."""
        port = getattr(getattr(self.inner, "_store", None), "port", None)
        if port is None:
            return False
        process: Any = psutil.Process()
        ask = getattr(process, "net_connections", None) or process.connections  # its name before psutil 6
        return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in ask("tcp"))

    def is_deserted(self) -> bool:
        """See base class."""
        self.num_nodes_waiting()  # asks the store
        return not any(map(self._nodes, ("participants", "wait_list", "redundancy_list")))

    def _nodes(self, name: str) -> Any:
        holder = getattr(self.inner, "_state_holder", None)
        return getattr(getattr(holder, "state", None), name, ())

    def leave(self) -> None:
        """See base class. Without torch's internals, the spare is admitted when the heartbeat has been missed."""
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

        inner: Any = self.inner
        with contextlib.suppress(AttributeError, RendezvousError):
            inner._stop_heartbeats()
            inner._op_executor.run(torchs._RendezvousExitOp(), time.monotonic() + _SPARES_NOTICE_S)


class StaticRounds(Rounds):
    """Rounds of a `StaticTCPRendezvous`: node k is always node k.

    A launcher that replaces one that has died joins the round after the present one, and asks the others to join it,
    too. `timeout_s` is how long a node waits for the others, `bounded` makes the store that is asked of torch's.
    """

    def __init__(self, inner: StaticTCPRendezvous, timeout_s: float, bounded: Callable[[Any], BoundedStore]) -> None:
        super().__init__(inner)
        self._timeout_s = timeout_s
        self._bounded = bounded
        self._base: BoundedStore | None = None
        self._next = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round when all nodes have joined.

        RendezvousClosedError if the job has ended meanwhile, RendezvousTimeoutError if a node does not join, StoreLost
        if node 0 does not answer.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            # Node 0 waits for the others here, and they wait for node 0.
            first = interruptible(self.inner.next_rendezvous, "launcher-rendezvous")
            base = self._base = self._base or self._bounded(first.store)
            earlier = self.meeting
            while True:
                number = max(self._next, self._current(base))
                self._next = number + 1
                store = PrefixStore(f"round_{number}", base)
                meeting = Meeting(PrefixStore(_PREFIX, store), first.rank, first.world_size)
                if meeting.nodes == 1 or self._join(base, meeting, number, earlier, deadline):
                    break
        except RuntimeError as error:
            raise StoreLost(str(error)) from error
        self.meeting = meeting
        return RendezvousInfo(store, first.rank, first.world_size, _store_info(first))

    def _current(self, store: Any) -> int:
        key = f"{_PREFIX}/round"
        return int(store.get(key)) if store.check([key]) else 0

    def _join(self, base: Any, meeting: Meeting, number: int, earlier: Meeting | None, deadline: float) -> bool:
        """Wait for all nodes. False if this round is not for this launcher: one that it replaces was in it."""
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
                raise RendezvousTimeoutError(f"not all {meeting.nodes} nodes have joined")
            time.sleep(_POLL_S)
        return not meeting.has_words()


def _store_info(info: RendezvousInfo) -> RendezvousStoreInfo:
    found = info.bootstrap_store_info
    assert found is not None, "the static rendezvous names the store for workers"
    return found


def rounds_of(
    parameters: RendezvousParameters,
    *,
    has_spares: bool,
    timeout_s: float,
    silence_s: float,
    has_signal: Callable[[], bool],
) -> Rounds:
    """Return the rounds for the parameters of torch's rendezvous.

    A store that does not answer for `silence_s` is lost; `has_signal` is as in `BoundedStore`. Torch's errors. Main
    thread; may wait for the host for a minute, and signal handlers may raise meanwhile.
    """

    def bounded(store: Any) -> BoundedStore:
        return BoundedStore(store, silence_s, has_signal)

    if parameters.backend != "c10d":
        handler = registry.get_rendezvous_handler(parameters)
        if isinstance(handler, StaticTCPRendezvous):
            return StaticRounds(handler, timeout_s, bounded)
        return DynamicRounds(handler, has_spares)
    limit_s = float(parameters.get_as_int("read_timeout", _CONNECT_S) or _CONNECT_S) + silence_s
    try:
        _, inner = interruptible(lambda: create_backend(parameters), "launcher-rendezvous", limit_s)
    except TimeoutError as error:
        raise RendezvousConnectionError(f"the host of the rendezvous does not answer: {parameters.endpoint}") from error
    store = bounded(inner)
    handler = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    return DynamicRounds(handler, has_spares)
