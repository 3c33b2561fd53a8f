"""Which rank holds the replica of which: on another node, each as many as the others. Pure functions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["buddies"]


def buddies(places: Sequence[Hashable]) -> list[int | None]:
    """Return for each rank the one that holds its replica, never one at the same place; None for all at one place.

    `places` says where each rank is: its node, or what else fails as a whole, such as its rack. The ranks are put into
    a ring, place by place in the order of their first ranks, and a rank's buddy is as many ranks further as the largest
    place has. So each rank holds exactly one replica, with nodes of one size those of the node before. Where one
    place has more than half of all ranks, the others hold their replicas evenly.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, place in enumerate(places):
        members.setdefault(place, []).append(rank)
    if len(members) < 2:
        return [None] * len(places)
    ring = [rank for ranks in members.values() for rank in ranks]
    largest = max(members.values(), key=len)
    result: list[int | None] = [None] * len(places)
    if 2 * len(largest) <= len(ring):
        for position, rank in enumerate(ring):
            result[rank] = ring[(position + len(largest)) % len(ring)]
        return result
    others = [rank for rank in ring if places[rank] != places[largest[0]]]
    for position, rank in enumerate(largest):
        result[rank] = others[position % len(others)]
    for position, rank in enumerate(others):
        result[rank] = largest[position]
    return result
