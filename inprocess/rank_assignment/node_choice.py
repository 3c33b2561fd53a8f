"""The choice of the nodes of a round, and their group ranks, from the nodes that are present.

Group ranks come in blocks of `--ft-segment` nodes; each block lies within one segment (NVLink domain). Without segments
all nodes are in one, and blocks have one node. Functions of their arguments: each launcher would choose the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherNode:
    """A launcher that takes part in a rendezvous. `key` is its own; another one in its place has the same `address`.

    Nodes are ordered by `order` (that of the scheduler), then by address and process id. `processes` is how many
    workers the launcher starts.
    """

    key: str
    address: str
    pid: int = 0
    segment: str = ""
    order: int = 0
    processes: int = 1

    @property
    def sort_key(self) -> tuple[int, str, int, str]:
        """The key by which nodes are ordered."""
        return self.order, self.address, self.pid, self.key


def choose_nodes(
    present: Iterable[LauncherNode], earlier: Sequence[LauncherNode], trained: Collection[str], count: int, size: int
) -> list[LauncherNode] | None:
    """Choose `count` of the nodes that are present, in the order of their group ranks; None if that is not possible.

    `earlier` are the nodes of the round before, by group rank: those that are present keep their ranks, also if their
    launcher was started again. The gap of a lost node is filled from its segment; if there is no other node, the whole
    block is replaced by one of another segment, and what is left of it is not used. Addresses in `trained` are
    preferred to others. Blocks have `size` nodes; `count` is a multiple.
    """
    rest = sorted(present, key=lambda node: node.sort_key)
    seats = _kept_seats(rest, earlier, count)
    pools: dict[str, list[LauncherNode]] = {}

    def add_to_pool(nodes: list[LauncherNode]) -> None:
        for node in nodes:
            pools.setdefault(node.segment, []).append(node)
        for segment in {node.segment for node in nodes}:
            pools[segment].sort(key=lambda node: (node.address not in trained, node.sort_key))

    seated = {node.key for node in seats if node is not None}
    add_to_pool([node for node in rest if node.key not in seated])
    blocks = [seats[start : start + size] for start in range(0, count, size)]
    for block in blocks:
        kept = [node for node in block if node is not None]
        if kept and len(kept) < size:
            pool = pools.get(kept[0].segment, [])
            if len(pool) < size - len(kept):
                block[:] = [None] * size
                add_to_pool(kept)
            else:
                block[:] = [pool.pop(0) if node is None else node for node in block]
    return _fill_blocks(blocks, pools, trained, size)


def _kept_seats(
    present: Sequence[LauncherNode], earlier: Sequence[LauncherNode], count: int
) -> list[LauncherNode | None]:
    """Return the nodes of the round before that are present, or another launcher in their place, by group rank."""
    if len(earlier) != count:
        return [None] * count
    by_key = {node.key: node for node in present}
    seats = [by_key.pop(node.key, None) for node in earlier]
    by_place = {(node.address, node.segment): node for node in reversed(by_key.values())}  # the first, if several
    return [
        by_place.pop((node.address, node.segment), None) if seat is None else seat
        for node, seat in zip(earlier, seats, strict=True)
    ]


def _fill_blocks(
    blocks: list[list[LauncherNode | None]], pools: dict[str, list[LauncherNode]], trained: Collection[str], size: int
) -> list[LauncherNode] | None:
    """Fill empty blocks, each from one segment, preferably with trained nodes, then from that of the block before."""
    chosen: list[LauncherNode] = []
    for block in blocks:
        nodes = [node for node in block if node is not None]
        if not nodes:
            enough = [pool for pool in pools.values() if len(pool) >= size]
            if not enough:
                return None
            before = chosen[-1].segment if chosen else None
            pool = min(
                enough,
                key=lambda pool: (
                    sum(node.address not in trained for node in pool[:size]),
                    pool[0].segment != before,
                    min(node.sort_key for node in pool),
                ),
            )
            nodes, pool[:size] = pool[:size], []
        chosen += nodes
    return chosen
