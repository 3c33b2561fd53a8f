"""The table of the nodes of a cycle, in the store of its rendezvous.

    joined       the numbers of the nodes that have joined after the cycle had begun
    node/<n>     what node n says of its workers; only node n writes it
    silent/<n>   1 while the others count node n as lost because it does not answer; node n itself writes 0
    revision     incremented after each change: a node that sees it finds the change

The number of workers that are left is computed from the table, never counted by several nodes. So a node that was given
up and comes back is counted once, whatever has become of its workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class WorkersOfNode:
    """The workers of a node: how many there are, how many are lost, and whether all others have ended with 0."""

    workers: int
    lost: int = 0
    is_done: bool = False


class NodeTable:
    """The table, as node `node` of `nodes` uses it. `ask(method, *arguments)` asks the store. One thread.

    Each of the `nodes` calls `enter` before any node reads. Others may `join` then.
    """

    def __init__(self, ask: Callable[..., Any], node: int, nodes: int) -> None:
        self._ask = ask
        self._node = node
        self._nodes = nodes
        self._own = WorkersOfNode(0)
        self._revision = -1  # of what follows
        self._rows: dict[int, WorkersOfNode] = {}
        self._silent: set[int] = set()

    def enter(self, workers: int) -> None:
        """Write the first row of this node."""
        self._ask("set", f"silent/{self._node}", "0")
        self.report(WorkersOfNode(workers))

    def join(self, workers: int) -> None:
        """Add this node. Its workers are lost until they have joined those of the others."""
        self._ask("set", f"silent/{self._node}", "0")
        self._ask("set", f"node/{self._node}", json.dumps(asdict(WorkersOfNode(workers, lost=workers))))
        self._ask("append", "joined", f"{self._node} ")  # after the values: a node that sees the number finds them
        self.report(WorkersOfNode(workers, lost=workers))

    @property
    def own(self) -> WorkersOfNode:
        """The last report of this node."""
        return self._own

    def report(self, own: WorkersOfNode) -> None:
        """Replace the row of this node."""
        self._own = own
        self._ask("set", f"node/{self._node}", json.dumps(asdict(own)))
        self._ask("add", "revision", 1)

    def left(self) -> int:
        """Return how many workers of all nodes run or have ended with 0. Nodes that do not answer have none."""
        self._read()
        return sum(row.workers - row.lost for node, row in self._rows.items() if node not in self._silent)

    def answering(self) -> int:
        """Return how many nodes there are, without those that do not answer."""
        self._read()
        return len(self._rows.keys() - self._silent)

    def all_over(self) -> bool:
        """Whether each node is done or does not answer. One round trip if nothing has changed."""
        return not self.waited_for()

    def waited_for(self) -> list[int]:
        """Return the nodes that are not done and count as alive."""
        self._read()
        return [node for node, row in self._rows.items() if not row.is_done and node not in self._silent]

    def has_work(self) -> bool:
        """Return whether there is a node that is waited for and has workers that are not lost."""
        return any(self._rows[node].lost < self._rows[node].workers for node in self.waited_for())

    def give_up(self, node: int) -> None:
        """Count a node that does not answer as lost."""
        self._ask("set", f"silent/{node}", "1")
        self._ask("add", "revision", 1)

    def come_back(self) -> bool:
        """Count this node again if the others have given it up; return whether they had."""
        self._read()
        if self._node not in self._silent:
            return False
        self._ask("set", f"silent/{self._node}", "0")
        self._ask("add", "revision", 1)
        return True

    def _read(self) -> None:
        revision = int(self._ask("add", "revision", 0))
        if revision == self._revision:
            return
        joined = self._ask("get", "joined").split() if self._ask("check", ["joined"]) else []
        nodes = [*range(self._nodes), *map(int, joined)]
        values = self._ask("multi_get", [f"{name}/{node}" for name in ("node", "silent") for node in nodes])
        rows, silent = values[: len(nodes)], values[len(nodes) :]
        self._rows = {node: WorkersOfNode(**json.loads(row)) for node, row in zip(nodes, rows, strict=True)}
        self._silent = {node for node, value in zip(nodes, silent, strict=True) if value == b"1"}
        self._revision = revision  # read before the rows: a change meanwhile is read again
