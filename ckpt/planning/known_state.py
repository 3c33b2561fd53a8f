"""The state of the save before: whether the next one has the same leaves, so that they need not be named again.

    look at the state --> structure and metadata as before, no new aliases --> the leaves known, over the tensors of now
                      --> else: flatten it, and know it from now on

Names, specs, boxes and aliases of leaves follow from three things alone: the structure of the state, the metadata of
each tensor, and which tensors have the same memory. All three are read anew for each save, and compared. So it does
not matter which objects there are: tensors that were replaced, or made anew by each `state_dict()`, at other addresses
or at those of others that were freed. Nothing here keeps a tensor, an object of the user, or memory. Values are encoded
anew for each save. Where anything is in doubt, the state is flattened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ckpt.collection import without_collection
from ckpt.errors import CheckpointError
from ckpt.paths import Path
from ckpt.planning.boxes import Sharding
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.state_dict import FlatState, TensorLeaf, flatten, flatten_parts, state_dict_of
from ckpt.planning.state_look import Names, StateLook
from ckpt.planning.tensor_records import TensorRecords
from ckpt.planning.tensors import DTensors, LocalBox, without_graph

Array = np.ndarray[Any, np.dtype[Any]]
_FEW = 64  # tensors that take less time to name again
_TRIES = 3


class KnownStates:
    """Flattens the states of successive saves. For one thread."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._description: StateDescription | None = None  # the last one
        self._tries = _TRIES  # that are left to know a state, which may be of a kind that cannot be known

    def flatten(self, state: Any) -> FlatState:
        """Return what `flatten` returns for this state. StateError, naming the path, for what cannot be stored.

        If the leaves are those of the last call, `describe` of both returns the same object.
        """
        if isinstance(state, FlatState):
            return state
        asked = _StateDicts()
        with without_collection(), torch.no_grad():
            known, self._known = self._known, None  # nothing, if this is interrupted
            flat = None if known is None else known.again(state, asked)
            if flat is not None:
                self._known = known
                return flat
            flat = flatten(state, ask=asked)
            if flat.describe() == self._description:
                flat.described = self._description
            self._description = flat.describe()
            if self._tries and len(flat.tensors) > _FEW:
                self._known = _Known.of(flat, StateLook(state, asked), asked)
                self._tries = self._tries - 1 if self._known is None else _TRIES
        return flat

    def forget(self) -> None:
        """Flatten the next state as the first one."""
        self._known, self._description, self._tries = None, None, _TRIES


class _StateDicts:
    """The state dicts of objects during one save: each is asked once, as that may be a collective, or run hooks."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # with the object, so that its id is not used again

    def __call__(self, path: Path, stateful: Any) -> Any:
        found = self._known.get(id(stateful))
        if found is None:
            found = self._known[id(stateful)] = stateful, state_dict_of(path, stateful)
        return found[1]


@dataclass(frozen=True, slots=True)
class _KnownLeaf:
    """The leaf at a path without its memory, and the number of its tensor in a look."""

    number: int
    spec: TensorSpec
    boxes: list[LocalBox]
    writeable: bool

    def over(self, tensor: torch.Tensor) -> TensorLeaf:
        """Return the leaf with the memory of a tensor."""
        return TensorLeaf(without_graph(tensor), self.spec, self.boxes, writeable=self.writeable)


@dataclass(slots=True)
class _Known:
    """A state that was flattened, and the look at it. `parts` describes what the look has left to `flatten`."""

    structure: list[Any]
    shardings: list[Sharding | None]
    records: TensorRecords
    are_distinct: bool
    leaves: dict[Path, _KnownLeaf]
    are_contiguous: Array
    on_cpu: Array
    stateful_paths: list[Path]
    part_paths: list[Path]
    parts: StateDescription
    description: StateDescription
    order: _Order | None = None  # of the last table of copies

    @classmethod
    def of(cls, flat: FlatState, look: StateLook, asked: _StateDicts) -> _Known | None:
        """Return the known state. None if the look found other leaves than `flatten`, or later ones could."""
        if not look.is_known:
            return None
        names, records = Names(look.structure), TensorRecords.of(look.tensors, look.dtensors)
        parts = flatten_parts(zip(names.parts, look.parts, strict=True), asked)
        description, of_parts = flat.describe(), parts.describe()
        named, aliases = set(names.tensors), flat.aliases
        if records is None or len(named) != len(names.tensors) or not named.isdisjoint(of_parts.tensors):
            return None
        found = (
            {path: leaf.spec for path, leaf in flat.tensors.items() if path not in named},
            description.values,
            {path: to for path, to in aliases.items() if path not in named or to not in named},
        )
        if found != (of_parts.tensors, of_parts.values, of_parts.aliases):
            return None
        try:
            leaves = [flat.tensors[aliases.get(path, path)] for path in names.tensors]
        except KeyError:
            return None
        if not records.are_equal(TensorRecords.of([leaf.local for leaf in leaves], look.dtensors)):
            return None
        numbered = enumerate(zip(names.tensors, leaves, strict=True))
        return cls(
            look.structure,
            DTensors().shardings_of_specs(look.specs),
            records,
            records.are_distinct,
            {p: _KnownLeaf(n, leaf.spec, leaf.boxes, leaf.writeable) for n, (p, leaf) in numbered if p not in aliases},
            np.fromiter(map(torch.Tensor.is_contiguous, look.tensors), bool, len(leaves)),
            np.fromiter(map(attrgetter("is_cpu"), look.tensors), bool, len(leaves)),
            names.stateful,
            names.parts,
            of_parts,
            description,
        )

    def again(self, state: Any, asked: _StateDicts) -> FlatState | None:
        """Return the flat form of a later state, if its leaves are those that are known."""
        try:
            look = StateLook(state, asked, self.structure)
        except CheckpointError:
            return None  # an object could not be asked, which `flatten` raises with its path
        if not look.is_known:
            return None
        try:
            parts = flatten_parts(zip(self.part_paths, look.parts, strict=True), asked)
        except CheckpointError:
            return None  # `flatten` raises it again, unless another one comes first
        if parts.describe() != self.parts:
            return None
        # Only when all objects have been asked, as one of them may have given tensors of others other memory.
        if DTensors().shardings_of_specs(look.specs) != self.shardings:
            return None
        records = TensorRecords.of(look.tensors, look.dtensors)
        if records is None or not np.array_equal(records.described, self.records.described):
            return None
        if not np.array_equal(records.addresses, self.records.addresses):
            # In other memory, some may have become other names of others, or may be so no more.
            if not self.are_distinct or not records.are_distinct:
                return None
            self.records = records
        if not self._are_apart(parts):
            return None
        return _KnownState(self, look, parts)

    def _are_apart(self, parts: FlatState) -> bool:
        """Whether no tensor of the parts begins where one of the look does, which may be another name of it."""
        others = {leaf.local.data_ptr() for leaf in parts.tensors.values() if not leaf.spec.per_rank}
        return not others or others.isdisjoint(self.records.addresses.tolist())


class _KnownLeaves(Mapping[Path, TensorLeaf]):
    """The leaves known, each made when it is used, and those of the parts."""

    def __init__(
        self, known: Mapping[Path, _KnownLeaf], tensors: list[torch.Tensor], parts: Mapping[Path, TensorLeaf]
    ) -> None:
        self._known = known
        self._tensors = tensors
        self._parts = parts

    def __getitem__(self, path: Path) -> TensorLeaf:
        known = self._known.get(path)
        return self._parts[path] if known is None else known.over(self._tensors[known.number])

    def __iter__(self) -> Iterator[Path]:
        return chain(self._known, self._parts)

    def __len__(self) -> int:
        return len(self._known) + len(self._parts)


class _KnownTensors(Mapping[Path, torch.Tensor]):
    """The memory of leaves."""

    def __init__(self, leaves: Mapping[Path, TensorLeaf]) -> None:
        self._leaves = leaves

    def __getitem__(self, path: Path) -> torch.Tensor:
        return self._leaves[path].local

    def __iter__(self) -> Iterator[Path]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)


@dataclass(frozen=True, slots=True)
class _Order:
    """The numbers of the tensors at some paths. Those of the parts have the number 0, and are listed with positions."""

    paths: tuple[Path, ...]
    numbers: Array
    of_parts: list[tuple[int, Path]]

    @classmethod
    def of(cls, paths: tuple[Path, ...], leaves: Mapping[Path, _KnownLeaf]) -> _Order:
        found = [leaves.get(path) for path in paths]
        numbers = np.array([0 if leaf is None else leaf.number for leaf in found], np.intp)
        return cls(paths, numbers, [(at, paths[at]) for at, leaf in enumerate(found) if leaf is None])


class _KnownState(FlatState):
    """A state whose leaves were known. Its tensors, and those of `parts`, are those of the save that is made."""

    def __init__(self, known: _Known, look: StateLook, parts: FlatState) -> None:
        super().__init__(
            tensors=_KnownLeaves(known.leaves, look.tensors, parts.tensors),
            values=parts.values,
            aliases=dict(known.description.aliases),
            containers=dict(known.description.containers),
            owners=[*look.owners(known.stateful_paths), *parts.owners],
            described=known.description,
        )
        self._known = known
        self._parts = parts
        self._records = known.records

    def local_tensors(self) -> Mapping[Path, torch.Tensor]:
        return _KnownTensors(self.tensors)

    def outside_cpu(self) -> list[torch.Tensor]:
        return self._parts.outside_cpu() if self._known.on_cpu.all() else super().outside_cpu()

    def memory_of(self, paths: tuple[Path, ...]) -> tuple[Array, Array, Array] | None:
        known = self._known
        if known.order is None or known.order.paths is not paths:
            known.order = _Order.of(paths, known.leaves)
        numbers = known.order.numbers
        found = self._records.addresses[numbers], known.are_contiguous[numbers], known.on_cpu[numbers]
        for at, path in known.order.of_parts:
            local = self._parts.tensors[path].local
            is_plain = local.is_contiguous() and not local.is_conj() and not local.is_neg()
            for column, value in zip(found, (local.data_ptr(), is_plain, local.is_cpu), strict=True):
                column[at] = value
        return found
