"""The state of a rendezvous of nodes that come and go, which all nodes share; see `dynamic_rounds`."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from inprocess.rank_assignment.node_choice import LauncherNode


@dataclass(frozen=True)
class RoundState:
    """The rendezvous of a job. `members` are the nodes of round `number`, by group rank; those in `running` are in it.

    `joined` are the nodes that have joined the round since. `trained` are the addresses of all nodes that were in a
    round. Round 0 has none. `lost` names the nodes of the round before that were silent.
    """

    number: int = 0
    members: tuple[LauncherNode, ...] = ()
    joined: tuple[LauncherNode, ...] = ()
    running: frozenset[str] = frozenset()
    candidates: tuple[LauncherNode, ...] = ()
    trained: frozenset[str] = frozenset()
    lost: tuple[str, ...] = ()
    is_closed: bool = False

    @classmethod
    def from_json(cls, text: str | bytes) -> RoundState:
        """Read what `to_json` has written."""
        values = json.loads(text)
        for name in ("members", "joined", "candidates"):
            values[name] = tuple(LauncherNode(**each) for each in values[name])
        for name in ("running", "trained"):
            values[name] = frozenset(values[name])
        return cls(**{**values, "lost": tuple(values["lost"])})

    def to_json(self) -> str:
        """Return the state as text."""
        values = asdict(self)
        for name in ("running", "trained"):
            values[name] = sorted(values[name])
        return json.dumps(values)

    def place_of(self, node: LauncherNode) -> int | None:
        """Return the group rank of a node that is in the round; None if it is not."""
        return self.nodes.index(node) if node.key in self.running else None

    @property
    def nodes(self) -> tuple[LauncherNode, ...]:
        """All nodes that were in the round."""
        return self.members + self.joined

    def segment_of(self, node: LauncherNode) -> int:
        """Return the number of a node's segment: they are counted in the order of the nodes of the round."""
        return list(dict.fromkeys(each.segment for each in self.nodes)).index(node.segment)

    def without(self, keys: Collection[str]) -> RoundState:
        """Return the state when these nodes are neither in the round nor candidates."""
        others = tuple(node for node in self.candidates if node.key not in keys)
        return replace(self, running=self.running.difference(keys), candidates=others)

    def with_candidate(self, node: LauncherNode) -> RoundState:
        """Return the state when a node wants to be in the next round."""
        others = self.without({node.key})
        return replace(others, candidates=(*others.candidates, node))

    def join(self, node: LauncherNode) -> RoundState:
        """Return the state when a candidate has joined the round."""
        others = self.without({node.key})
        trained = self.trained | {node.address}
        return replace(others, joined=(*self.joined, node), running=others.running | {node.key}, trained=trained)

    def begin(self, members: list[LauncherNode], silent: frozenset[str] = frozenset()) -> RoundState:
        """Return the state when the next round has begun, without the nodes that are silent."""
        keys = frozenset(node.key for node in members)
        lost = [f"{rank} ({node.address})" for rank, node in enumerate(self.nodes) if node.key in self.running & silent]
        return replace(
            self.without(keys | silent),
            number=self.number + 1,
            members=tuple(members),
            joined=(),
            running=keys,
            trained=self.trained | {node.address for node in members},
            lost=tuple(lost),
        )
