"""The table of the nodes of a cycle, in the store of its rendezvous.

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

    Every node calls `enter` before any node reads.
    """

    def __init__(self, ask: Callable[..., Any], node: int, nodes: int) -> None:
        self._ask = ask
        self._node = node
        self._nodes = nodes
        self._own = WorkersOfNode(0)
        self._revision = -1  # of what follows
        self._rows: list[WorkersOfNode] = []
        self._silent: list[bool] = []

    def enter(self, workers: int) -> None:
        """Write the first row of this node."""
        self._ask("set", f"silent/{self._node}", "0")
        self.report(WorkersOfNode(workers))

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
        return sum(row.workers - row.lost for row, silent in zip(self._rows, self._silent, strict=True) if not silent)

    def all_over(self) -> bool:
        """Whether each node is done or does not answer. One round trip if nothing has changed."""
        return not self.waited_for()

    def waited_for(self) -> list[int]:
        """Return the nodes that are not done and count as alive."""
        self._read()
        return [node for node in range(self._nodes) if not self._rows[node].is_done and not self._silent[node]]

    def give_up(self, node: int) -> None:
        """Count a node that does not answer as lost."""
        self._ask("set", f"silent/{node}", "1")
        self._ask("add", "revision", 1)

    def come_back(self) -> bool:
        """Count this node again if the others have given it up; return whether they had."""
        self._read()
        if not self._silent[self._node]:
            return False
        self._ask("set", f"silent/{self._node}", "0")
        self._ask("add", "revision", 1)
        return True

    def _read(self) -> None:
        revision = int(self._ask("add", "revision", 0))
        if revision == self._revision:
            return
        keys = [f"{name}/{node}" for name in ("node", "silent") for node in range(self._nodes)]
        values = self._ask("multi_get", keys)
        self._rows = [WorkersOfNode(**json.loads(value)) for value in values[: self._nodes]]
        self._silent = [value == b"1" for value in values[self._nodes :]]
        self._revision = revision  # read before the rows: a change meanwhile is read again
