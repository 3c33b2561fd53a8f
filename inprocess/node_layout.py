"""Nodes and initial ranks of a job that spare nodes may join.

    node    0, 1, ... for the first nodes of the job, in the order of their ranks; larger numbers for those that join,
            each used once: a node that was lost and comes back has another one
    seat    what a node has in the job: as many active ranks as it has processes. The numbers of the seats are the order
            of the active ranks; which node has which is decided at each restart, by `rank_assignment.WholeNodes`

    initial rank = ((process << 24) + (segment << 12) + node) * processes per node + local rank

`process` counts the processes that the launcher has started in the place of others. `segment` is 0 for the first nodes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

__all__ = ["LAYOUT", "MOST_NODES", "NodeLayout"]

LAYOUT = "INPROCESS_NODES"
"""The environment variable by which a launcher describes the nodes to its workers: a `NodeLayout` as JSON."""
MOST_NODES = 1 << 12
_MOST_SEGMENTS = 1 << 12


@dataclass(frozen=True)
class NodeLayout:
    """The first nodes of a job: `processes` on each, and the number of each one's segment (NVLink domain).

    Seats come in blocks of `block`; the nodes of a block are of one segment.
    """

    processes: int
    segments: tuple[int, ...]
    block: int = 1

    @classmethod
    def from_environment(cls) -> NodeLayout | None:
        """Return the layout that the launcher has given; None if no node may join."""
        text = os.environ.get(LAYOUT)
        if text is None:
            return None
        values = json.loads(text)
        return cls(int(values["processes"]), tuple(map(int, values["segments"])), int(values["block"]))

    def environment(self) -> dict[str, str]:
        """Return the environment variable for workers."""
        return {LAYOUT: json.dumps(asdict(self))}

    @property
    def places(self) -> int:
        """How many initial ranks there are without those of processes in the place of others."""
        return MOST_NODES * _MOST_SEGMENTS * self.processes

    def first_rank_of(self, node: int, segment: int) -> int:
        """Return the initial rank of the process with local rank 0 on a node that joins."""
        return ((segment * MOST_NODES) + node) * self.processes

    def place_of(self, initial_rank: int) -> tuple[int, int]:
        """Return a number for the node of a process, the same for all processes there, and its local rank."""
        return divmod(initial_rank % self.places, self.processes)

    def segment_of(self, node: int) -> int:
        """Return the segment of a node, by the number that `place_of` returns."""
        return self.segments[node] if node < len(self.segments) else node // MOST_NODES
