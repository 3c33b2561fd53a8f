"""Gives work to the ranks that can do it, evenly."""

from __future__ import annotations

import heapq

__all__ = ["Balance"]


class Balance:
    """Gives work to the least loaded of a set of ranks; `loads` is shared between sets, so a heap entry may be out of
    date."""

    def __init__(self, loads: list[int]) -> None:
        self._loads = loads
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def give(self, holders: tuple[int, ...], nbytes: int) -> int:
        """Give work of `nbytes` to one of `holders`, and return which."""
        heap = self._heaps.get(holders)
        if heap is None:
            heap = self._heaps[holders] = [(self._loads[rank], rank) for rank in holders]
            heapq.heapify(heap)
        while heap[0][0] != self._loads[heap[0][1]]:
            heapq.heapreplace(heap, (self._loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        self._loads[rank] += nbytes
        heapq.heapreplace(heap, (self._loads[rank], rank))
        return rank
