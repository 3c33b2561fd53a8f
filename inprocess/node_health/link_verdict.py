"""Which nodes have a bad link, from the times of transfers between pairs of them. Pure functions.

Nodes are numbers, a pair is two of them, the smaller first. All pairs of a stage transfer at once, so a node is in one
of them. First each node transfers with both of its neighbours in the ring. A pair that is slow, or does not work, does
not tell which of its nodes is to blame, so nodes without a good pair transfer with others that have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Pair = tuple[int, int]

_LEAST_DELAY_S = 0.005  # less is noise of the scheduler, whatever the factor
_WITNESSES = 2  # sound nodes with which a node must have failed: a link between two nodes may be broken by itself


@dataclass(frozen=True)
class LinkVerdict:
    """Which nodes have a bad link.

    `broken` nodes could transfer with none of several sound nodes, `slow` ones with all of them slower than `factor`
    times `reference_s`, the slowest first. `unclear` are nodes with bad pairs whose part in these is not known. `apart`
    are bad pairs of sound nodes. `reference_s` is the median over nodes of their fastest transfer; infinite if no
    transfer has worked.
    """

    reference_s: float
    broken: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    unclear: tuple[int, ...] = ()
    apart: tuple[Pair, ...] = ()


def pair_of(one: int, other: int) -> Pair:
    """Return two nodes as a pair."""
    return min(one, other), max(one, other)


def next_pairs(nodes: int, times: Mapping[Pair, float], factor: float) -> list[Pair]:
    """Return the pairs of the next stage, after those with these times; none if it would tell nothing more.

    No pair comes a second time.
    """
    found = _matching(_ring(nodes), times)
    if found:
        return found
    fastest = _best(nodes, times)
    # Compared with the fastest node here: while sound nodes have bad neighbours only, a median may be that of bad ones.
    sound = _sound(fastest, min(fastest, default=math.inf), factor)
    suspects = [node for node in range(nodes) if node not in sound and not _is_proved(node, sound, times)]
    partners = sorted(sound) or suspects
    wanted = (pair_of(node, other) for other in partners for node in suspects if node != other)
    return _matching(_spread(wanted, nodes), times)


def judge(nodes: int, times: Mapping[Pair, float], factor: float) -> LinkVerdict:
    """Return the verdict on `nodes` nodes. A pair that could not transfer has an infinite time.

    One node, or two, of which none can be compared with others, are never blamed.
    """
    best = _best(nodes, times)
    working = sorted(each for each in best if each < math.inf)
    reference_s = working[(len(working) - 1) // 2] if working else math.inf
    sound = _sound(best, reference_s, factor)
    bad = [node for node in range(nodes) if node not in sound]
    proved = [node for node in bad if _is_proved(node, sound, times)]
    return LinkVerdict(
        reference_s,
        broken=tuple(node for node in proved if best[node] == math.inf),
        slow=tuple(sorted((node for node in proved if best[node] < math.inf), key=lambda node: -best[node])),
        unclear=tuple(node for node in bad if node not in proved),
        apart=tuple(
            pair
            for pair, time_s in sorted(times.items())
            if sound.issuperset(pair) and _is_bad(time_s, reference_s, factor)
        ),
    )


def _is_bad(time_s: float, reference_s: float, factor: float) -> bool:
    return time_s == math.inf or time_s > max(factor * reference_s, reference_s + _LEAST_DELAY_S)


def _best(nodes: int, times: Mapping[Pair, float]) -> list[float]:
    """Return the fastest transfer of each node."""
    return [min((time_s for pair, time_s in times.items() if node in pair), default=math.inf) for node in range(nodes)]


def _sound(best: list[float], reference_s: float, factor: float) -> set[int]:
    return {node for node, time_s in enumerate(best) if not _is_bad(time_s, reference_s, factor)}


def _is_proved(node: int, sound: set[int], times: Mapping[Pair, float]) -> bool:
    """Whether a node without a good pair has had enough of them with sound nodes."""
    witnesses = sum(pair_of(node, other) in times for other in sound)
    return witnesses > 0 and witnesses >= min(_WITNESSES, len(sound))


def _ring(nodes: int) -> list[Pair]:
    return [pair_of(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]


def _matching(pairs: Iterable[Pair], times: Mapping[Pair, float]) -> list[Pair]:
    """Return those of the pairs that have no time yet, the first of each node."""
    found: list[Pair] = []
    busy: set[int] = set()
    for pair in pairs:
        if pair not in times and busy.isdisjoint(pair):
            found.append(pair)
            busy.update(pair)
    return found


def _spread(pairs: Iterable[Pair], nodes: int) -> Iterator[Pair]:
    """Yield the pairs, near neighbours first."""
    yield from sorted(set(pairs), key=lambda pair: (min(pair[1] - pair[0], nodes - pair[1] + pair[0]), pair))
