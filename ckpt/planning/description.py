"""What a rank's state looks like, without its bytes: names, shapes, dtypes, shardings.

Ranks that hold the same names in the same global shapes have *equal* descriptions, whatever shards they hold: so
planning compares a digest of each, and exchanges a description only when there is more than one (pipeline parallelism).
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
    """One tensor as the whole job sees it. `sharding` None: every rank that has the name has all of it.

    `per_rank`: the tensor belongs to one rank alone, other ranks may have one of the same name in another shape.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    sharding: Sharding | None = None
    per_rank: bool = False


@dataclass(frozen=True)
class StateDescription:
    """All that planning needs to know of one rank's state.

    `values` maps the path of each leaf that is not a tensor to whether it is per rank; `aliases` maps the path of a
    tensor that is the same memory as an earlier one to that one's path. Tensors in `from_lowest` are written by the
    lowest rank that has them, whatever others have.
    """

    tensors: Mapping[Path, TensorSpec] = field(default_factory=dict)
    values: Mapping[Path, bool] = field(default_factory=dict)
    aliases: Mapping[Path, Path] = field(default_factory=dict)
    from_lowest: frozenset[Path] = frozenset()

    def to_bytes(self) -> bytes:
        """A canonical JSON form; equal descriptions have equal bytes."""
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
        """The description that `to_bytes` turned into `data`."""
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
        """16 bytes that differ for different descriptions."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).digest()


class Gather(Protocol):
    """A collective over the ranks of the job: gives every rank the bytes of all ranks, by rank."""

    @property
    def rank(self) -> int: ...

    def __call__(self, payload: bytes) -> list[bytes]: ...


def exchange(own: StateDescription, gather: Gather) -> list[StateDescription]:
    """Every rank's description, by rank; equal ones are one object.

    One collective when all descriptions are equal; else a second one, in which only the first rank of each kind sends
    its own. Raises StateError, the same on all ranks, when ranks contradict each other.
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
    """Raise StateError unless ranks that have a tensor of one name (not per rank) agree on its dtype, shape and
    sharding."""
    first: dict[Path, tuple[int, TensorSpec]] = {}
    problems = []
    seen: set[int] = set()
    for rank, description in enumerate(descriptions):
        if id(description) in seen:
            continue
        seen.add(id(description))
        for path, spec in description.tensors.items():
            other_rank, other = first.setdefault(path, (rank, spec))
            if _essence(other) != _essence(spec) and not (other.per_rank and spec.per_rank):
                problems.append(f"{display(path)}: {_said(other)} on rank {other_rank}, {_said(spec)} on rank {rank}")
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise StateError(
            f"ranks disagree about {len(problems)} tensor(s), nothing was written: {shown}. "
            "A tensor of one name must be the same everywhere, a DTensor, or wrapped in ckpt.PerRank"
        )


def _essence(spec: TensorSpec) -> tuple[object, ...]:
    """What ranks must agree on: not the ranks of the mesh, for pipeline stages may hold one tensor on a mesh each."""
    mesh = None if spec.sharding is None else (spec.sharding.mesh_shape, spec.sharding.placements)
    return spec.dtype, spec.shape, spec.per_rank, mesh


def _said(spec: TensorSpec) -> str:
    how = (
        "per rank"
        if spec.per_rank
        else "replicated"
        if spec.sharding is None
        else f"sharded {spec.sharding.placements}"
    )
    return f"{spec.dtype}{list(spec.shape)} {how}"
