"""The rendezvous of nodes that come and go: which of them train, and which are spares.

In the store of the job, below `rendezvous/<id of the job>`:

    state          a `RoundState` as JSON; changed by compare-and-set only
    revision       incremented after each change
    cycle          the number of the next cycle, at least: its nodes may all be new
    alive/<key>    incremented by the node with this key while its launcher runs
    round_<n>/...  the store of round n: torch's, and that of its `Meeting`

A node that wants to train is a candidate. A round begins when no node of the round before runs any more (all have come
again, have left, or are silent) and the candidates suffice; any of them may begin it, with the nodes of `choose_nodes`.
The others stay candidates: they are the spares. A spare that sees a silent node, and can fill its place with the other
candidates, asks the nodes of the round to meet again. With --ft-hot-spares, spares join the running round instead.

Clocks of nodes are not compared: a node is silent if its count does not change while the observer's clock goes on.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # by their documented names
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from inprocess.fault_tolerance.launcher.count_watch import CountWatch
from inprocess.fault_tolerance.launcher.meeting import Meeting
from inprocess.fault_tolerance.launcher.rendezvous_rounds import MEETING_PREFIX, Rounds
from inprocess.fault_tolerance.launcher.round_state import RoundState
from inprocess.fault_tolerance.launcher.worker_causes import cause_of_node
from inprocess.node_layout import MOST_NODES, NodeLayout
from inprocess.rank_assignment.node_choice import LauncherNode, choose_nodes

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_SPARES_NOTICE_S = 2.5
_POLL_OF_MANY_S = _RETRY_S = 0.001  # per node: what all nodes ask of the store must not grow with their square
_NODES_PER_LOOK = 200  # each candidate looks for silent nodes once a second; with more nodes, less often


@dataclass(frozen=True)
class RoundRules:
    """The rules of a rendezvous, the same on all nodes: how many train, in blocks of how many from one segment.

    A node that is silent for `silence_s` is lost. `join_timeout_s` is how long candidates wait while no node trains.
    `is_mended`: a spare makes the nodes of a round meet again if one of them is lost. A round may have `most_nodes`, if
    these are more than `nodes`: the others join it after it has begun, as spares.
    """

    nodes: int
    block: int
    join_timeout_s: float
    alive_interval_s: float
    silence_s: float
    is_mended: bool
    most_nodes: int = 0

    @property
    def grows(self) -> bool:
        """Whether nodes may join a round after it has begun."""
        return self.most_nodes > self.nodes


def this_node(local_addr: str | None, segment: str, processes: int = 1) -> LauncherNode:
    """Return this launcher as a node; SLURM's number of the process gives the order, if there is one."""
    order = os.environ.get("SLURM_PROCID", "")
    address = local_addr or socket.getfqdn()
    number = int(order) if order.isdecimal() else 0
    return LauncherNode(uuid.uuid4().hex[:12], address, os.getpid(), segment, number, processes)


class DynamicRounds(Rounds):
    """The rounds of `node`, by `rules`, in a store whose operations end (see `bounded_store`)."""

    def __init__(self, store: Any, run_id: str, node: LauncherNode, rules: RoundRules) -> None:
        super().__init__("c10d", run_id)
        self._node = node
        self._rules = rules
        self._bounded = store  # torch does not keep it
        self._store = PrefixStore(f"rendezvous/{run_id}", store)
        self._heart = _Heart(functools.partial(self._store.add, f"alive/{node.key}", 1), rules.alive_interval_s)
        self._workers_store: TCPStore | None = None
        self._revision = -1  # of the state
        self._reread_s = 0.0
        self._state = RoundState()
        self._first_counts: dict[str, Any] = {}  # of other nodes, for `has_spare`
        self._all_silent = _SilentNodes(self._ask, rules.silence_s)

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round that this node is in.

        A spare waits as long as others train. RendezvousTimeoutError if no round begins. When the job is over:
        RendezvousGracefulExitError for a spare, RendezvousClosedError for other nodes. Else torch's errors.
        """
        self._ask("compare_set", "state", "", RoundState().to_json())
        self._ask("compare_set", "cycle", "", "0")
        self._heart.start()
        self._wait_for_round()
        state = self._state
        rank = state.place_of(self._node)
        assert rank is not None
        for node in state.lost if rank < len(state.members) else ():
            _log.warning("cause: %s", cause_of_node(node, "lost", f"silent for {self._rules.silence_s:g} s"))
        store = self._store_of(state)
        self.meeting = self._meeting_of(state, rank)
        return RendezvousInfo(store, rank, len(state.members), self._store_for_workers(rank, store))

    def leave(self) -> None:
        """See base class."""
        if not self._heart.is_beating:
            return
        self._heart.stop()
        try:
            self._change(lambda state: state.without({self._node.key}))
        except RendezvousConnectionError as error:
            _log.warning("a spare takes over only when this node has been silent for long enough: %s", error)

    def shutdown(self) -> bool:
        """See base class. It returns when spares have noticed: the store may be hosted here."""
        self._heart.stop()
        try:
            self._change(lambda state: replace(state.without({self._node.key}), is_closed=True))
            deadline = time.monotonic() + _SPARES_NOTICE_S
            while self._read().candidates and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except RendezvousConnectionError as error:
            _log.warning("the rendezvous cannot be closed: %s", error)
            return False
        return True

    def is_closed(self) -> bool:
        """See base class."""
        return self._read().is_closed

    @property
    def job_store(self) -> PrefixStore:
        """See base class."""
        return PrefixStore("job", self._store)

    @property
    def store_address(self) -> tuple[str, int] | None:
        """See base class."""
        address: tuple[str, int] | None = self._bounded.address
        return address

    def has_spare(self) -> bool:
        """See base class. A node counts when its count has changed since the first call: it may have died."""
        try:
            state, rules = self._read(), self._rules
            in_round = [node for node in state.nodes if node.key in state.running and node != self._node]
            others = [*state.candidates, *in_round]
            counts = self._ask("multi_get", [f"alive/{node.key}" for node in others])
        except RendezvousConnectionError:
            return False
        first = {node.key: self._first_counts.get(node.key, count) for node, count in zip(others, counts, strict=True)}
        self._first_counts = first
        present = [node for node, count in zip(others, counts, strict=True) if first[node.key] != count]
        return choose_nodes(present, state.members, state.trained, rules.nodes, rules.block) is not None

    def layout(self) -> NodeLayout | None:
        """See base class. All nodes must have as many processes."""
        return self._layout_of(self._state)

    def _layout_of(self, state: RoundState) -> NodeLayout | None:
        if not self._rules.grows or {node.processes for node in state.members} != {self._node.processes}:
            return None
        return NodeLayout(self._node.processes, tuple(map(state.segment_of, state.members)), self._rules.block)

    def first_rank(self) -> int:
        """See base class."""
        state, layout = self._state, self.layout()
        assert layout is not None
        return layout.first_rank_of(state.nodes.index(self._node), state.segment_of(self._node))

    def hosts_store(self) -> bool:
        """See base class."""
        address = self.store_address
        if address is None:
            return False
        process: Any = psutil.Process()
        ask = getattr(process, "net_connections", None) or process.connections  # its name before psutil 6
        return any(found.status == psutil.CONN_LISTEN and found.laddr.port == address[1] for found in ask("tcp"))

    def is_deserted(self) -> bool:
        """See base class. Nodes that are silent count for nothing."""
        state = self._read()
        keys = [*state.running, *(node.key for node in state.candidates)]
        return not keys or self._all_silent.look(keys).issuperset(keys)

    def least_cycle(self) -> int:
        """See base class."""
        return int(self._ask("get", "cycle"))

    def record_cycle(self, cycle: int) -> None:
        """See base class."""
        text = self._ask("get", "cycle").decode()
        while int(text) <= cycle:
            text = self._ask("compare_set", "cycle", text, str(cycle + 1)).decode()

    def _wait_for_round(self) -> None:
        """Be a candidate until this node is in a round that has begun since."""
        state = self._read()
        left = None if state.place_of(self._node) is None else state.number
        silence = _SilentNodes(self._ask, self._rules.silence_s)
        deadline = time.monotonic() + self._rules.join_timeout_s
        looked_at: tuple[RoundState, frozenset[str]] | None = None
        is_spare, may_join = False, False
        self._change(lambda state: state.with_candidate(self._node))
        while (state := self._read()).place_of(self._node) is None:
            if state.is_closed:
                self._change(lambda state: state.without({self._node.key}))
                raise RendezvousClosedError if state.number == left else RendezvousGracefulExitError
            if self._node not in state.candidates:  # the others have found this node silent
                self._change(lambda state: state.with_candidate(self._node))
                continue
            silent = silence.look([*state.running, *(node.key for node in state.candidates)])
            if (state, silent) != looked_at:
                looked_at = state, silent
                if self._begin_or_mend(state, silent):
                    continue
                may_join = state.number != left and self._has_room(state, silent)
            if may_join and self._meeting_of(state, 0).has_begun():
                may_join = False
                if self._join_round(state):
                    continue
            if state.running.difference(silent):
                if not is_spare and state.number != left:
                    is_spare = True
                    _log.info("this node waits as a spare: %d nodes train", len(state.members))
                deadline = time.monotonic() + self._rules.join_timeout_s
            elif time.monotonic() > deadline:
                self.leave()
                raise RendezvousTimeoutError
            time.sleep(max(_POLL_S, _POLL_OF_MANY_S * self._rules.nodes))

    def _begin_or_mend(self, state: RoundState, silent: frozenset[str]) -> bool:
        """Begin the next round if that is possible; if only some nodes of this one are left, ask those to come, too.

        Returns whether the state has changed.
        """
        rules = self._rules
        present = [node for node in state.candidates if node.key not in silent]
        running = [node for node in state.nodes if node.key in state.running - silent]
        if running and (not rules.is_mended or len(running) == len(state.members)):
            return False
        if len(present) + len(running) < rules.nodes:
            return False
        chosen = choose_nodes([*present, *running], state.members, state.trained, rules.nodes, rules.block)
        if chosen is None:
            return False
        if state.running:  # also those that are silent: they may only have been stopped, and go on
            lost = [f"{rank} ({node.address})" for rank, node in enumerate(state.members) if node not in running]
            self._meeting_of(state, 0).ask_restart(f"a node has left and a spare waits: node {', '.join(lost)}")
        if running:
            return False
        self._change(lambda now: now.begin(chosen, silent) if now == state else now)
        return True

    def _has_room(self, state: RoundState, silent: frozenset[str]) -> bool:
        """Return whether this node could join the round that runs, as a spare."""
        running = state.running - silent
        has_room = 0 < len(running) < self._rules.most_nodes and len(state.nodes) < MOST_NODES
        has_others = sum(node.processes for node in state.members) > 1  # a rank that is alone meets no others
        return self._layout_of(state) is not None and has_room and has_others

    def _join_round(self, state: RoundState) -> bool:
        """Join the round that runs, unless it ends. Returns whether the state has changed."""
        if self._meeting_of(state, 0).has_words():
            return False
        self._change(lambda now: now.join(self._node) if now == state else now)
        return True

    def _meeting_of(self, state: RoundState, rank: int) -> Meeting:
        store = PrefixStore(MEETING_PREFIX, self._store_of(state))
        return Meeting(store, rank, len(state.members), self._rules.grows)

    def _store_of(self, state: RoundState) -> PrefixStore:
        return PrefixStore(f"round_{state.number}", self._store)

    def _store_for_workers(self, rank: int, store: PrefixStore) -> RendezvousStoreInfo:
        """Return the address of the store that workers use. Node 0 hosts it."""
        port = None
        if rank == 0 and self.use_agent_store:
            # A new one for each round: workers would read keys of those before them, as they do not prefix theirs.
            self._workers_store = TCPStore(self._node.address, 0, is_master=True, multi_tenant=True)
            port = self._workers_store.port
        return RendezvousStoreInfo.build(rank, store, local_addr=self._node.address, server_port=port)

    # -- the state -----------------------------------------------------------------------------------------------------

    def _read(self) -> RoundState:
        """Return the state; it is read only if it has changed."""
        revision = int(self._ask("add", "revision", 0))
        # A node that dies right after a change has not counted it.
        if revision != self._revision or time.monotonic() > self._reread_s:
            self._state = RoundState.from_json(self._ask("get", "state"))
            self._revision = revision  # read before the state: a change meanwhile is read again
            self._reread_s = time.monotonic() + self._rules.silence_s
        return self._state

    def _change(self, transition: Callable[[RoundState], RoundState]) -> None:
        while True:
            text = self._ask("get", "state").decode()
            state = RoundState.from_json(text)
            changed = transition(state)
            if changed == state:
                return
            wanted = changed.to_json()
            if self._ask("compare_set", "state", text, wanted).decode() == wanted:
                self._ask("add", "revision", 1)
                return
            time.sleep(random.uniform(0, _RETRY_S * self._rules.nodes))  # all nodes come at once

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:  # torch's errors of stores and the network
            raise RendezvousConnectionError(str(error)) from error


class _SilentNodes:
    """The nodes whose launchers do not run, or are stopped or cut off."""

    def __init__(self, ask: Callable[..., Any], limit_s: float) -> None:
        self._ask = ask
        self._silence: CountWatch[str] = CountWatch(limit_s)
        self._next_s = 0.0
        self._found: frozenset[str] = frozenset()

    def look(self, keys: list[str]) -> frozenset[str]:
        """Return those of these nodes that were silent at the last look."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + max(1.0, len(keys) / _NODES_PER_LOOK)
            counts = self._ask("multi_get", [f"alive/{key}" for key in keys])
            self._found = frozenset(self._silence.observe(dict(zip(keys, counts, strict=True))))
        return self._found


class _Heart:
    """A thread that calls `beat` each `interval_s` from `start` to `stop`. Both may be called several times."""

    def __init__(self, beat: Callable[[], Any], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stopping: threading.Event | None = None

    @property
    def is_beating(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._stopping is not None

    def start(self) -> None:
        """Beat once, and start the thread."""
        if self._stopping is None:
            self._beat()
            self._stopping = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._stopping,), name="launcher-heart", daemon=True)
            thread.start()

    def stop(self) -> None:
        """Have the thread end. It may be in a last beat."""
        if self._stopping is not None:
            self._stopping.set()
            self._stopping = None

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.wait(self._interval_s):
            try:
                self._beat()
            except RuntimeError as error:  # the main thread notices it, too, and decides
                _log.debug("this node cannot say that it is alive: %s", error)
