"""What ranks of a large job with different names tell each other, when a save is planned and when a step is restored.

One process plays all ranks in turn, and measures one of them: its CPU time, and the bytes that it would send and
receive. The network is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ckpt.loading.match import Match, known_names, unknown_on_all_ranks
from ckpt.planning.boxes import Placement, Sharding
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.exchange import Exchange
from ckpt.ranks.collectives import moved_bytes
from ckpt.ranks.group import Group

_SHARED = 2000  # tensors that each rank has, beside its experts


def measure_agreement(state: str, names: int, ranks: int, repeats: int) -> dict[str, list[float]]:
    """Return what one rank of `STATES[state]` takes, in seconds of CPU time, and bytes that it moves.

    "exchange" is what a plan needs, "restore" what a restore does.
    """
    descriptions = STATES[state](names, ranks)
    rounds = _rounds_of(descriptions)
    found: dict[str, list[float]] = {"exchange": [], "restore": []}
    group: _OneOf
    for _ in range(repeats):
        group = _OneOf(ranks // 2, rounds)
        begin = time.process_time()
        _exchange(descriptions[group.rank], group)
        found["exchange"].append(time.process_time() - begin)
    found["exchange_bytes"] = [float(group.moved_bytes)]

    stored = tuple(dict.fromkeys(path for each in _distinct(descriptions) for path in each.tensors))
    known = {id(each): bytes(path in each.tensors for path in stored) for each in _distinct(descriptions)}
    most = np.max([np.frombuffer(each, np.uint8) for each in known.values()], axis=0).tobytes()
    answers = [known_names(Match(names=stored, known=known[id(each)]), "save") for each in _distinct(descriptions)]
    by_rank = dict(zip(known, answers, strict=True))
    for _ in range(repeats):
        group = _OneOf(ranks // 2, [[by_rank[id(each)] for each in descriptions]], most)
        own = descriptions[group.rank].tensors
        begin = time.process_time()
        match = Match(names=stored, known=bytes(path in own for path in stored))
        assert unknown_on_all_ranks(match, group(known_names(match, "save")), group) == []
        found["restore"].append(time.process_time() - begin)
    found["restore_bytes"] = [float(group.moved_bytes)]
    return found


class _NextRound(Exception):
    """Ends a rank's part at a round for which the payloads of the others are not known yet."""


class _OneOf(Group):
    """One rank among all, with known results of the collectives. `sent` is its payload in the first unknown round."""

    def __init__(self, rank: int, rounds: list[list[bytes]], most: bytes = b"") -> None:
        super().__init__(rank, len(rounds[0]) if rounds else 0)
        self.sent = b""
        self.moved_bytes = 0
        self._rounds = iter(rounds)
        self._most = most

    def __call__(self, payload: bytes) -> list[bytes]:
        answers = next(self._rounds, None)
        if answers is None:
            self.sent = payload
            raise _NextRound
        self.moved_bytes += moved_bytes([len(answer) for answer in answers])
        return answers

    def maximum(self, payload: bytes) -> bytes:
        self.moved_bytes += moved_bytes([0] * self.world_size) + 2 * len(payload)  # sizes are told first
        return self._most


def _exchange(own: StateDescription, group: _OneOf) -> None:
    exchange = Exchange(own)
    exchange.finish(group(exchange.told), group)


def _distinct(descriptions: list[StateDescription]) -> list[StateDescription]:
    return list({id(each): each for each in descriptions}.values())


def _rounds_of(descriptions: list[StateDescription]) -> list[list[bytes]]:
    """Return the payloads of all ranks in each round of an exchange. Of ranks with equal ones, the first sends them."""
    first: dict[int, int] = {}
    for rank, description in enumerate(descriptions):
        first.setdefault(id(description), rank)
    rounds: list[list[bytes]] = []
    while True:
        payloads: dict[int, bytes] = {}
        for rank in first.values():
            group = _OneOf(rank, rounds)
            try:
                _exchange(descriptions[rank], group)
            except _NextRound:
                payloads[rank] = group.sent
            else:
                return rounds
        firsts = [first[id(description)] for description in descriptions]
        rounds.append([payloads[of] if of == rank or not rounds else b"" for rank, of in enumerate(firsts)])


def _tensors(prefix: str, count: int, sharding: Sharding | None) -> dict[tuple[str | int, ...], TensorSpec]:
    shapes = [(8192, 1024 * columns) for columns in (1, 2, 3, 4)]
    names = (f"{prefix}.{number // 12}.block.{number % 12}.weight" for number in range(count))
    return {("model", name): TensorSpec("bfloat16", 2, shapes[n % 4], sharding) for n, name in enumerate(names)}


def _pipeline(names: int, ranks: int) -> list[StateDescription]:
    """16 stages, each on a mesh of 8 replicas and the ranks of a tensor-parallel group."""
    size = max(ranks // 16, 1)
    stages = -(-ranks // size)
    made = []
    for stage in range(stages):
        members = tuple(range(stage * size, min((stage + 1) * size, ranks)))
        sharding = Sharding((len(members),), members, (Placement(0),))
        made.append(StateDescription(_tensors(f"stages.{stage}", names // stages, sharding), {("step",): False}))
    return [made[rank // size] for rank in range(ranks)]


def _replicas(names: int, ranks: int) -> list[StateDescription]:
    """16 stages, of which each replica of 8 ranks has a mesh of its own."""
    size = max(ranks // 16, 1)
    stages = -(-ranks // size)
    made: dict[int, StateDescription] = {}
    for rank in range(ranks):
        members = tuple(range(rank // 8 * 8, min(rank // 8 * 8 + 8, ranks)))
        if members[0] == rank or rank % size == 0:
            sharding = Sharding((len(members),), members, (Placement(0),))
            tensors = _tensors(f"stages.{rank // size}", names // stages, sharding)
            made[rank] = StateDescription(tensors, {("step",): False})
        else:
            made[rank] = made[rank - 1]
    return list(made.values())


def _experts(names: int, ranks: int) -> list[StateDescription]:
    """Tensors that all ranks share, and experts that only one rank has."""
    shared = min(_SHARED, names // 2)
    own = max((names - shared) // ranks, 1)
    common = _tensors("layers", shared, Sharding((ranks,), tuple(range(ranks)), (Placement(0),)))
    return [
        StateDescription({**common, **_tensors(f"experts.{rank}", own, None)}, {("step",): False})
        for rank in range(ranks)
    ]


STATES: Mapping[str, Callable[[int, int], list[StateDescription]]] = MappingProxyType(
    {"pipeline": _pipeline, "replicas": _replicas, "experts": _experts}
)
"""States with so many names in all, on so many ranks."""
