"""An index with other names for the optimizers of a step, as the state of one rank has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt.loading.index import CheckpointIndex
from ckpt.loading.optimizer_forms import Items
from ckpt.paths import Path


class IndexChanges:
    """Names of an index that change."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._refused: set[tuple[Path, int | None]] = set()
        self._moves: list[tuple[Path, int | None, Path, Items]] = []

    def refuse(self, place: Path, rank: int | None) -> None:
        """Note that an optimizer of the state cannot have what is at a place of the step."""
        self._refused.add((place, rank))

    def move(self, place: Path, rank: int | None, path: Path, items: Items) -> None:
        """Note that an optimizer of the state at `path` gets items of the step at a place."""
        self._moves.append((place, rank, path, items))

    def applied(self) -> CheckpointIndex:
        """Return the index with the changes; it is the same if there are none."""
        if not self._refused and not self._moves:
            return self._index
        places = self._refused | {(place, rank) for place, rank, _, _ in self._moves}
        index = self._index
        for rank in {rank for _, rank in places}:
            index = _without(index, [place for place, of_rank in places if of_rank == rank], rank)
        new: dict[Path, list[Path]] = {}
        for place, rank, path, items in self._moves:
            _add(index, path, items, rank)
            for rest, sources in items.sources.items() if rank is None else ():
                for source in sources:
                    new.setdefault((*place, *source), []).append((*path, *rest))
        moved = {name: tuple(new[name]) if name in new else self._left(name) for name in self._index.names()}
        return replace(index, moved=moved)

    def _left(self, name: Path) -> tuple[Path, ...]:
        """Return the names, instead of one of the step, that no optimizer of the state gets."""
        place = next((place for place, rank, _, _ in self._moves if rank is None and _is_gone(name, [place])), None)
        if any(rank is None and _is_gone(name, [refused]) for refused, rank in self._refused):
            return ()
        # Groups and an empty state are of all parameters; other leaves, of one alone, are unexpected.
        is_common = place is not None and (name[len(place)] == "param_groups" or name[len(place) :] == ("state",))
        return () if is_common else (name,)


def _is_gone(path: Path, places: list[Path]) -> bool:
    """Return whether a path is below an optimizer, in its state or its groups."""
    for place in places:
        if path[: len(place)] == place and len(path) > len(place):
            key = path[len(place)]
            if isinstance(key, str) and key.partition(".")[0] in ("state", "param_groups"):
                return True
    return False


def _without(index: CheckpointIndex, places: list[Path], rank: int | None) -> CheckpointIndex:
    """Return a copy of the index without the state and the groups of some optimizers, of all ranks or of one."""

    def kept(items: Mapping[Path, Any]) -> dict[Path, Any]:
        return {path: item for path, item in items.items() if not _is_gone(path, places)}

    def kept_of_others(items: Mapping[Path, dict[int, Any]]) -> dict[Path, Any]:
        left = {path: {r: each for r, each in own.items() if r != rank} for path, own in items.items()}
        return {path: left[path] if _is_gone(path, places) else dict(own) for path, own in items.items()}

    if rank is not None:
        return replace(
            index,
            per_rank_tensors=kept_of_others(index.per_rank_tensors),
            per_rank_values=kept_of_others(index.per_rank_values),
            per_rank_containers=kept_of_others(index.per_rank_containers),
        )
    # Another name, elsewhere, of a tensor that is taken away here.
    own = {path: index.tensors[target] for path, target in index.aliases.items() if target in index.tensors}
    own = {path: tensor for path, tensor in own.items() if _is_gone(index.aliases[path], places)}
    return replace(
        index,
        tensors=kept({**index.tensors, **own}),
        values=kept(index.values),
        containers=kept(index.containers),
        aliases={path: target for path, target in kept(index.aliases).items() if path not in own},
    )


def _add(index: CheckpointIndex, path: Path, items: Items, rank: int | None) -> None:
    for shared, of_rank, new in (
        (index.tensors, index.per_rank_tensors, items.tensors),
        (index.values, index.per_rank_values, items.values),
        (index.containers, index.per_rank_containers, items.containers),
    ):
        known: Any = shared if rank is None else of_rank
        for rest, item in new.items():
            if rank is None:
                known[*path, *rest] = item
            else:
                known.setdefault((*path, *rest), {})[rank] = item
