"""What the ranks tell each other before a plan is made: the description of each rank's state.

Each distinct thing is sent once, by the first rank that has it, compressed:

    1    every rank                                      digest of its entries, digest of its shardings
    2    rank 0; the first rank with each shardings      the entries of rank 0; shardings
    3    the first rank with each of the other entries   which entries of rank 0 it has, and its further ones

Ranks that hold the same names in the same global shapes have equal entries, whatever shards they hold: then 1 is all.
A rank that knows all descriptions from before, by 1, sends what others need, and reads nothing.
Replicas of a pipeline stage differ in their shardings alone, since each is on its own mesh. Ranks with experts of their
own have most entries in common with rank 0.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, OwnBoxes, Placement, Sharding
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.ranks.group import Group
from ckpt.values.containers import Container

_DIGEST_BYTES = 16
_SHOWN = 20


class Exchange:
    """The exchange of the descriptions of all ranks, by one rank."""

    def __init__(self, own: StateDescription) -> None:
        self._own = own
        self._entries, self._shardings = _encoded(own)
        self.told = _digest(_json(self._entries)) + _digest(self._shardings)
        """What this rank tells all others first. The descriptions of all ranks follow from what they have told."""

    def finish(self, told: Sequence[bytes], ranks: Group) -> list[StateDescription]:
        """Return every rank's description, by rank; equal ones are one object, and so are equal specs.

        `told` is by rank. Collective, unless all have told the same. The descriptions, with the order of their entries,
        are the same on all ranks. Raises StateError, the same on all ranks, if they disagree about a tensor.
        """
        return [self._own] * len(told) if len(set(told)) == 1 else self._exchange(told, ranks, reads=True)

    def help(self, told: Sequence[bytes], ranks: Group) -> None:
        """Take part in `finish` of other ranks: for a rank that knows the descriptions. Collective, as that is."""
        if len(set(told)) > 1:
            self._exchange(told, ranks, reads=False)

    def _exchange(self, told: Sequence[bytes], ranks: Group, *, reads: bool) -> list[StateDescription]:
        """Send what this rank is the first to have. Return the descriptions; none to a rank that does not read."""
        entries = self._entries
        first_with = _first_ranks([answer[:_DIGEST_BYTES] for answer in told])
        first_on = _first_ranks([answer[_DIGEST_BYTES:] for answer in told])

        leads = ranks.rank == 0
        shardings = self._shardings if ranks.rank in first_on.values() else None
        sent = ranks(_packed(entries if leads else None, shardings))
        differs = not leads and ranks.rank in first_with.values()
        base: list[_Entries] = _unpacked(sent[0])[0] if reads or differs else []
        more = ranks(_packed(*map(_difference, base, entries)) if differs else b"")
        if not reads:
            return []

        tables = {digest: _unpacked(sent[rank])[1] for digest, rank in first_on.items()}
        decoder = _Decoder(base)
        differences = {digest: _unpacked(more[rank]) for digest, rank in first_with.items() if rank > 0}
        items = {digest: decoder.items(differences.get(digest)) for digest in first_with}
        known = {
            answer: decoder.description(items[answer[:_DIGEST_BYTES]], tables[answer[_DIGEST_BYTES:]])
            for answer in dict.fromkeys(told)
        }
        descriptions = [known[answer] for answer in told]
        check_agreement(descriptions)
        return descriptions


def _first_ranks(digests: Iterable[bytes]) -> dict[bytes, int]:
    first: dict[bytes, int] = {}
    for rank, digest in enumerate(digests):
        first.setdefault(digest, rank)
    return first


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _packed(*items: Any) -> bytes:
    """Return items as compressed JSON; nothing if all are None."""
    return zlib.compress(_json(items).encode(), 1) if any(item is not None for item in items) else b""


def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


_json = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder for each of many entries


# -- a description as entries ------------------------------------------------------------------------------------------

_Entries = list[str]
"""One member of a description (its tensors, its values, ...): a JSON list for each path, [path, what is said of it]."""

_Difference = tuple[list[tuple[int, int]], _Entries]
"""What makes entries of those of rank 0: the ranges of these to be taken, and further entries."""

_Items = list[tuple[Path, int]]
"""Entries as read: the path, and the number of what is said of it."""


def _encoded(description: StateDescription) -> tuple[list[_Entries], str]:
    """Return the entries of each member of a description, and its shardings; the same for equal descriptions.

    An entry names a sharding by its number, so that entries of tensors on different meshes are equal.
    """
    shardings: dict[Sharding | OwnBoxes, int] = {}
    tensors = []
    for path, spec in description.tensors.items():
        which = None if spec.sharding is None else shardings.setdefault(spec.sharding, len(shardings))
        lowest = path in description.from_lowest
        tensors.append(_json((path, (lowest, which, spec.dtype, spec.itemsize, spec.shape, spec.per_rank))))
    containers = {path: (each.to_document(), own) for path, (each, own) in description.containers.items()}
    others = [
        [_json(entry) for entry in each.items()] for each in (description.values, description.aliases, containers)
    ]
    return [tensors, *others], _json([_encoded_sharding(sharding) for sharding in shardings])


def _encoded_sharding(sharding: Sharding | OwnBoxes) -> Any:
    if isinstance(sharding, OwnBoxes):
        return {"boxes": [(box.offset, box.shape) for box in sharding.boxes]}
    return sharding.mesh_shape, sharding.ranks, [(p.dim, p.split_factor) for p in sharding.placements]


def _decoded_sharding(encoded: Any) -> Sharding | OwnBoxes:
    if isinstance(encoded, dict):
        return OwnBoxes(tuple(Box(tuple(offset), tuple(shape)) for offset, shape in encoded["boxes"]))
    mesh, ranks, placements = encoded
    return Sharding(tuple(mesh), tuple(ranks), tuple(Placement(dim, factor) for dim, factor in placements))


def _difference(base: _Entries, entries: _Entries) -> _Difference:
    own, known = set(entries), set(base)
    ranges: list[tuple[int, int]] = []
    for number, entry in enumerate(base):
        if entry in own:
            first = ranges.pop()[0] if ranges and ranges[-1][1] == number else number
            ranges.append((first, number + 1))
    return ranges, [entry for entry in entries if entry not in known]


class _Decoder:
    """Makes descriptions of the entries of rank 0 and of differences to these. Makes equal specs one object."""

    def __init__(self, base: list[_Entries]) -> None:
        self._numbers: dict[str, int] = {}  # of what is said in entries, by its JSON
        self._said: list[Any] = []
        self._lowest: set[int] = set()
        self._known: dict[str, tuple[Path, int]] = {}
        self._shardings: dict[Sharding | OwnBoxes, Sharding | OwnBoxes] = {}
        self._specs: dict[TensorSpec, TensorSpec] = {}
        self._base = [self._read(entries) for entries in base]

    def items(self, differences: list[_Difference] | None) -> list[_Items]:
        """Return the items of each member: those of rank 0 if there are no differences."""
        if differences is None:
            return self._base
        return [
            [item for first, end in ranges for item in base[first:end]] + self._read(more)
            for base, (ranges, more) in zip(self._base, differences, strict=True)
        ]

    def description(self, items: list[_Items], table: str) -> StateDescription:
        """Return the description with these items, whose shardings are in `table`."""
        tensors, values, aliases, containers = items
        shardings = [_decoded_sharding(encoded) for encoded in json.loads(table)]
        shardings = [self._shardings.setdefault(sharding, sharding) for sharding in shardings]
        specs = {number: self._spec(self._said[number], shardings) for number in {number for _, number in tensors}}
        lowest = self._lowest & specs.keys()
        return StateDescription(
            {path: specs[number] for path, number in tensors},
            {path: self._said[number] for path, number in values},
            {path: tuple(self._said[number]) for path, number in aliases},
            {
                path: (Container.from_document(self._said[number][0]), self._said[number][1])
                for path, number in containers
            },
            frozenset(path for path, number in tensors if number in lowest) if lowest else frozenset(),
        )

    def _read(self, entries: _Entries) -> _Items:
        return [self._known.get(entry) or self._read_entry(entry) for entry in entries]

    def _read_entry(self, entry: str) -> tuple[Path, int]:
        path, said = json.loads(entry)
        number = self._numbers.setdefault(_json(said), len(self._said))
        if number == len(self._said):
            self._said.append(said)
            if isinstance(said, list) and said and said[0] is True:
                self._lowest.add(number)
        item = self._known[entry] = tuple(path), number
        return item

    def _container(self, number: int) -> tuple[Container, bool]:
        document, per_rank = self._said[number]
        return Container.from_document(document), per_rank

    def _spec(self, said: list[Any], shardings: list[Sharding | OwnBoxes]) -> TensorSpec:
        _, which, dtype, itemsize, shape, per_rank = said
        spec = TensorSpec(dtype, itemsize, tuple(shape), None if which is None else shardings[which], per_rank)
        return self._specs.setdefault(spec, spec)


# -- agreement ---------------------------------------------------------------------------------------------------------


def check_agreement(descriptions: list[StateDescription]) -> None:
    """Raise StateError unless ranks with a tensor of one name (not per rank) agree on dtype, shape and sharding."""
    first: dict[Path, TensorSpec] = {}
    differing: list[tuple[Path, TensorSpec]] = []
    agreeing: set[tuple[int, int]] = (
        set()
    )  # pairs of specs: thousands of ranks have thousands of tensors of a few specs
    for description in {id(each): each for each in descriptions}.values():
        for path, spec in description.tensors.items():
            other = first.setdefault(path, spec)
            if other is spec or (id(other), id(spec)) in agreeing:
                continue
            if _agreed_properties(other) == _agreed_properties(spec) or (other.per_rank and spec.per_rank):
                agreeing.add((id(other), id(spec)))
            else:
                differing.append((path, spec))
    problems = [
        f"{display(path)}: {_shown(first[path])} on rank {_rank_with(path, first[path], descriptions)}, "
        f"{_shown(spec)} on rank {_rank_with(path, spec, descriptions)}"
        for path, spec in differing[:_SHOWN]
    ]
    if problems:
        shown = "; ".join(problems) + (f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else "")
        raise StateError(
            f"ranks disagree about {len(differing)} tensor(s), nothing was written: {shown}. "
            "A tensor of one name must be the same everywhere, a DTensor, or wrapped in ckpt.PerRank"
        )


def _rank_with(path: Path, spec: TensorSpec, descriptions: Sequence[StateDescription]) -> int:
    return next(rank for rank, description in enumerate(descriptions) if description.tensors.get(path) is spec)


def _agreed_properties(spec: TensorSpec) -> tuple[object, ...]:
    """Return what ranks must agree on: not the mesh, since pipeline stages may each hold a tensor on their own mesh."""
    mesh: object = None
    if isinstance(spec.sharding, OwnBoxes):
        mesh = OwnBoxes
    elif spec.sharding is not None:
        mesh = spec.sharding.mesh_shape, spec.sharding.placements
    return spec.dtype, spec.shape, spec.per_rank, mesh


def _shown(spec: TensorSpec) -> str:
    how = (
        "per rank"
        if spec.per_rank
        else "replicated"
        if spec.sharding is None
        else "in boxes"
        if isinstance(spec.sharding, OwnBoxes)
        else f"sharded {spec.sharding.placements}"
    )
    return f"{spec.dtype}{list(spec.shape)} {how}"
