"""The description of a rank's state, without its bytes: names, shapes, dtypes, shardings.

Ranks that hold the same names in the same global shapes have *equal* descriptions, whatever shards they hold. So
planning compares digests, and exchanges descriptions only if they differ (pipeline parallelism).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Placement, Sharding

__all__ = ["Gather", "StateDescription", "TensorSpec", "check_agreement", "exchange"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the whole job sees it. Without `sharding`, every rank that has the name has the whole tensor.

    A tensor that is `per_rank` belongs to one rank; other ranks may have one of the same name in another shape.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    sharding: Sharding | None = None
    per_rank: bool = False


@dataclass(frozen=True)
class StateDescription:
    """What planning needs to know of one rank's state.

    `values` maps the path of each leaf that is not a tensor to whether it is per rank. `aliases` maps the path of a
    tensor with the same memory as an earlier one to that one's path. Tensors in `from_lowest` are written by the lowest
    rank that has them, even if others have different ones.
    """

    tensors: Mapping[Path, TensorSpec] = field(default_factory=dict)
    values: Mapping[Path, bool] = field(default_factory=dict)
    aliases: Mapping[Path, Path] = field(default_factory=dict)
    from_lowest: frozenset[Path] = frozenset()

    def to_bytes(self) -> bytes:
        """Return a canonical JSON form: equal descriptions have equal bytes."""
        shardings: dict[Sharding, int] = {}
        tensors = []
        for path, spec in self.tensors.items():
            which = None if spec.sharding is None else shardings.setdefault(spec.sharding, len(shardings))
            tensors.append([path, spec.dtype, spec.itemsize, spec.shape, which, spec.per_rank])
        document = {
            "tensors": tensors,
            "shardings": [[s.mesh_shape, s.ranks, [[p.dim, p.split_factor] for p in s.placements]] for s in shardings],
            "values": list(self.values.items()),
            "aliases": list(self.aliases.items()),
            "from_lowest": [path for path in self.tensors if path in self.from_lowest],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StateDescription:
        """Return the description that `to_bytes` has encoded."""
        document = json.loads(data)
        shardings = [
            Sharding(tuple(mesh), tuple(ranks), tuple(Placement(dim, factor) for dim, factor in placements))
            for mesh, ranks, placements in document["shardings"]
        ]
        tensors = {
            tuple(path): TensorSpec(dtype, itemsize, tuple(shape), None if w is None else shardings[w], per_rank)
            for path, dtype, itemsize, shape, w, per_rank in document["tensors"]
        }
        values = {tuple(path): per_rank for path, per_rank in document["values"]}
        aliases = {tuple(path): tuple(target) for path, target in document["aliases"]}
        return cls(tensors, values, aliases, frozenset(map(tuple, document["from_lowest"])))

    @cached_property
    def digest(self) -> bytes:
        """A digest of 16 bytes."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).digest()


class Gather(Protocol):
    """An all-gather over the ranks of the job: returns the bytes of all ranks, by rank. See `ckpt.ranks.Ranks`."""

    @property
    def rank(self) -> int: ...

    def __call__(self, payload: bytes) -> list[bytes]: ...


def exchange(own: StateDescription, gather: Gather) -> list[StateDescription]:
    """Return every rank's description, by rank; equal ones are one object. Collective.

    One all-gather if all descriptions are equal; otherwise a second one, in which only the first rank with each
    description sends it. Raises StateError, the same on all ranks, if they disagree about a tensor.
    """
    digests = gather(own.digest)
    first_rank = {digest: digests.index(digest) for digest in digests}
    if len(first_rank) == 1:
        return [own] * len(digests)
    sent = gather(own.to_bytes() if first_rank[own.digest] == gather.rank else b"")
    known = {digest: StateDescription.from_bytes(sent[rank]) for digest, rank in first_rank.items()}
    descriptions = [known[digest] for digest in digests]
    check_agreement(descriptions)
    return descriptions


def check_agreement(descriptions: list[StateDescription]) -> None:
    """Raise StateError unless ranks with a tensor of one name (not per rank) agree on dtype, shape and sharding."""
    first: dict[Path, tuple[int, TensorSpec]] = {}
    problems = []
    seen: set[int] = set()
    for rank, description in enumerate(descriptions):
        if id(description) in seen:
            continue
        seen.add(id(description))
        for path, spec in description.tensors.items():
            other_rank, other = first.setdefault(path, (rank, spec))
            if _agreed_properties(other) != _agreed_properties(spec) and not (other.per_rank and spec.per_rank):
                problems.append(f"{display(path)}: {_shown(other)} on rank {other_rank}, {_shown(spec)} on rank {rank}")
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise StateError(
            f"ranks disagree about {len(problems)} tensor(s), nothing was written: {shown}. "
            "A tensor of one name must be the same everywhere, a DTensor, or wrapped in ckpt.PerRank"
        )


def _agreed_properties(spec: TensorSpec) -> tuple[object, ...]:
    """Return what ranks must agree on: not the mesh, since pipeline stages may each hold a tensor on their own mesh."""
    mesh = None if spec.sharding is None else (spec.sharding.mesh_shape, spec.sharding.placements)
    return spec.dtype, spec.shape, spec.per_rank, mesh


def _shown(spec: TensorSpec) -> str:
    how = (
        "per rank"
        if spec.per_rank
        else "replicated"
        if spec.sharding is None
        else f"sharded {spec.sharding.placements}"
    )
    return f"{spec.dtype}{list(spec.shape)} {how}"
