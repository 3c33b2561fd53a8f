"""The rules of `Tree`, written down as slowly and plainly as possible: lists, and no tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inprocess.rank_assignment import Layer, LayerFlag


@dataclass(eq=False)
class ModelRank:
    """A rank; `path` are its keys from the root down."""

    initial: int
    path: tuple[str, ...]
    rank: int | None = None
    active: int | None = None
    benched: int = 0


@dataclass
class Model:
    """All ranks of a job and what becomes of them."""

    layers: Sequence[Layer]
    paths: Sequence[tuple[str, ...]]
    world_size_filter: Callable[[int], int] | None = None
    ranks: list[ModelRank] = field(init=False)
    benchings: int = 0

    def __post_init__(self) -> None:
        ranks = [ModelRank(initial, path) for initial, path in enumerate(self.paths)]
        # A group stands where its first rank stands.
        self.ranks = sorted(ranks, key=lambda rank: [self.paths.index(q) for q in self._firsts(rank)] + [rank.initial])
        for rank in self.ranks:
            rank.rank = rank.initial
        for rank in self.ranks:
            if self._has_room(rank):
                rank.active = len(self.active())
            else:
                self._bench(rank)
        self._finish()

    def live(self) -> list[ModelRank]:
        return [rank for rank in self.ranks if rank.rank is not None]

    def active(self) -> list[ModelRank]:
        return [rank for rank in self.ranks if rank.active is not None]

    def group(self, path: tuple[str, ...]) -> list[ModelRank]:
        return [rank for rank in self.live() if rank.path[: len(path)] == path]

    def restart(self, terminated: set[int]) -> None:
        holes = []
        for rank in self._lost(terminated):
            if rank.active is not None:
                holes.append((rank.active, rank.path))
            rank.rank = rank.active = None
        for number, path in sorted(holes):
            spare = self._spare_for(path)
            if spare is not None:
                spare.active = number
        for number, path in sorted(holes):
            if number not in [rank.active for rank in self.active()]:
                self._backfill(number, path)
        for number, rank in enumerate(sorted(self.active(), key=lambda rank: rank.active)):
            rank.active = number
        self._finish()

    def _lost(self, terminated: set[int]) -> list[ModelRank]:
        lost = [rank for rank in self.live() if rank.rank in terminated]
        for depth in range(len(self.layers), 0, -1):
            for path in {rank.path[:depth] for rank in self.live()}:
                healthy = [rank for rank in self.group(path) if rank not in lost]
                if len(healthy) < self.layers[depth - 1].min_ranks:
                    lost += healthy
        return lost

    def _spare_for(self, path: tuple[str, ...]) -> ModelRank | None:
        for group in self._groups_with(LayerFlag.RESERVE, path):
            spares = [rank for rank in self.group(group) if rank.active is None and self._has_room(rank)]
            if spares:
                return max(spares, key=lambda rank: rank.benched)
        return None

    def _backfill(self, number: int, path: tuple[str, ...]) -> None:
        groups = self._groups_with(LayerFlag.BACKFILL, path)
        higher = [rank for rank in self.active() if groups and rank in self.group(groups[-1]) and rank.active > number]
        if higher:
            max(higher, key=lambda rank: rank.active).active = number

    def _groups_with(self, flag: LayerFlag, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The groups above a rank from the bottom up, as far as they have the flag."""
        groups = []
        for depth in range(len(self.layers), 0, -1):
            if flag not in (self.layers[depth - 1].flag or LayerFlag(0)):
                break
            groups.append(path[:depth])
        return groups

    def _has_room(self, rank: ModelRank) -> bool:
        for depth, layer in enumerate(self.layers, start=1):
            active = [other for other in self.group(rank.path[:depth]) if other.active is not None]
            if layer.max_ranks is not None and len(active) >= layer.max_ranks:
                return False
        return True

    def _bench(self, rank: ModelRank) -> None:
        self.benchings += 1
        rank.active, rank.benched = None, self.benchings

    def _finish(self) -> None:
        if self.world_size_filter is not None and self.active():
            size = self.world_size_filter(len(self.active()))
            for rank in sorted(self.active(), key=lambda rank: rank.active):
                if rank.active >= size:
                    self._bench(rank)
        for number, rank in enumerate(self.live()):
            rank.rank = number

    def _firsts(self, rank: ModelRank) -> list[tuple[str, ...]]:
        """The paths of the first ranks of the groups that `rank` is in."""
        depths = range(1, len(self.layers) + 1)
        return [next(path for path in self.paths if path[:d] == rank.path[:d]) for d in depths]
