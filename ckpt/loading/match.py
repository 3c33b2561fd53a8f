"""Pair every leaf of a state with what is stored under its name, and report what does not fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.errors import CheckpointNotFoundError
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.options import RestoreOptions
from ckpt.loading.stored_tree import StoredTree, described
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import FlatState, TensorLeaf, ValueLeaf
from ckpt.ranks.group import Alone, Group
from ckpt.storage.dtypes import torch_dtype
from ckpt.values.codec import encode_value, resolve, unregistered_in
from ckpt.values.containers import Container

_DEFAULT = RestoreOptions()
_SAVE_BYTES, _KNOWN_BYTES = 8, 16

Read = tuple[Path, StoredTensor, TensorLeaf]
"""A tensor to be read: its name, what is stored, and the leaf to fill."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A mismatch. `text` begins with its kind and names the path; `remedy` is its kind of remedy, or empty."""

    path: Path
    text: str
    remedy: str = ""

    @property
    def kind(self) -> str:
        """What kind of mismatch this is, such as "missing" or "shape"."""
        return self.text.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value to be assigned in place of the one in `leaf`."""

    path: Path
    leaf: ValueLeaf
    value: Any


@dataclass
class Match:
    """What to restore, and what does not fit.

    `names` are the stored names that belong to no single rank, in the order of the index, which is the same on all
    ranks; `known` has a byte for each, 1 if this rank's state has it or ignores it, else 0. `left_out` are names that
    would fit but are restored only together with one that does not. `same` are values that are equal already; `cast`
    and `resized` tensors are among the reads. Of the names of one memory, the checkpoint need have only one. `separate`
    are names with the memory of another one, of which the checkpoint has two tensors: that of the other name is
    restored.
    """

    reads: list[Read] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    names: tuple[Path, ...] = ()
    known: bytes = b""
    left_out: list[Path] = field(default_factory=list)
    same: list[Path] = field(default_factory=list)
    cast: list[Path] = field(default_factory=list)
    resized: list[Path] = field(default_factory=list)
    separate: list[tuple[Path, Path]] = field(default_factory=list)


def match_state(
    index: CheckpointIndex,
    flat: FlatState,
    rank: int,
    ignored: Collection[Path] = (),
    options: RestoreOptions = _DEFAULT,
) -> Match:
    """Compare names, shapes, dtypes and types. Changes nothing.

    Paths in or below `ignored`, and those that `options` do not select, are skipped.
    """
    match = Match()
    present = _Present(index, rank)
    all_count = not ignored and options.only is None  # so `skipped` need not be called for each of ten thousand

    def skipped(path: Path) -> bool:
        return (bool(ignored) and is_below(path, ignored)) or (options.only is not None and not options.selects(path))

    other_names: dict[Path, list[Path]] = {}
    for path, target in flat.aliases.items():
        if not skipped(path):
            other_names.setdefault(target, []).append(path)
    for path, leaf in flat.tensors.items():
        if not all_count and skipped(path):
            continue
        stored, spec = index.tensors.get(path), leaf.spec
        fits = stored is not None and stored.dtype == spec.dtype and stored.shape == spec.shape
        if stored is not None and fits and leaf.writeable and not spec.per_rank and path not in index.aliases:
            match.reads.append((path, stored, leaf))  # most of them
        else:
            _match_tensor(match, index, present, path, leaf, rank, options, other_names.get(path, ()))
    for path, value in flat.values.items():
        if not skipped(path):
            _match_value(match, index, present, path, value, rank)
    read = {path: tensor for path, tensor, _ in match.reads} if flat.aliases else {}
    for path, target in flat.aliases.items():
        if skipped(path):
            continue
        if skipped(target):  # this name alone is restored, into the memory that both have
            _match_tensor(match, index, present, path, flat.tensors[target], rank, options)
            continue
        own = index.tensor(path)
        if own is not None and target in read and own is not read[target]:
            match.separate.append((path, target))
        elif own is None and target not in read and index.tensor(target) is None:
            match.mismatches.append(Mismatch(path, f"missing: {display(path)}"))
    for path, (container, of_rank) in flat.containers.items():
        if container.kind == "tensor" and not skipped(path):
            inside = index.per_rank_containers.get(path, {}).get(rank) if of_rank else index.containers.get(path)
            _match_subclass(match, index, path, container, inside)
    known = flat.tensors.keys() | flat.values.keys() | flat.aliases.keys()
    match.names = index.names()
    if all_count and not index.moved:
        match.known = bytes(map(known.__contains__, match.names))
    else:
        names = (index.moved.get(name, (name,)) for name in match.names)
        match.known = bytes([all(path in known or skipped(path) for path in here) for here in names])
    match.mismatches += [
        Mismatch(path, f"unexpected: {display(path)} (of this rank)")
        for path in _names_of_rank(index, rank)
        if path not in known and not skipped(path)
    ]
    return match


def _names_of_rank(index: CheckpointIndex, rank: int) -> set[Path]:
    return {path for own in (index.per_rank_tensors, index.per_rank_values) for path in own if rank in own[path]}


class _Present:
    """Words for what a step has at a name in another form than the state."""

    def __init__(self, index: CheckpointIndex, rank: int) -> None:
        self._index = index
        self._rank = rank
        self._trees: dict[bool, StoredTree] = {}

    def instead(self, path: Path, per_rank: bool, own: str) -> str | None:
        """Return a text for a mismatch of a leaf of the state, which is `own`; None if the step has nothing there."""
        for of_rank in (per_rank, not per_rank):
            if of_rank not in self._trees:
                self._trees[of_rank] = StoredTree(self._index, self._rank if of_rank else None)
            tree = self._trees[of_rank]
            scope = " of this rank" if of_rank else " of all ranks"
            whose = ("", "") if of_rank is per_rank else (scope, " of all ranks" if of_rank else " of this rank")
            for at in (path, *(path[:length] for length in range(len(path) - 1, 0, -1))):
                form = tree.form(at)
                if form is not None and (at == path or form in ("tensor", "value")):
                    inside = own if at == path else f"a container of {display(path)}"
                    stored = tree.described(at)
                    return (
                        f"form: {display(at)} is {stored}{whose[0]} in the checkpoint, {inside}{whose[1]} in the state"
                    )
        return None


def is_below(path: Path, prefixes: Collection[Path]) -> bool:
    """Return whether `path` is one of the `prefixes`, or below one."""
    return bool(prefixes) and any(path[:length] in prefixes for length in range(len(path) + 1))


def lacking(match: Match, unexpected: Iterable[Path], options: RestoreOptions) -> list[str]:
    """Return the names in `only` of which nothing is restored, because nothing of it fits."""
    restored = [*(path for path, _, _ in match.reads), *(each.path for each in match.assignments), *match.same]
    misfits = [*(problem.path for problem in match.mismatches), *unexpected]
    found = []
    for name in options.only or ():
        one = replace(options, only=(name,))
        if any(map(one.reaches, misfits)) and not any(map(one.selects, restored)):
            found.append(name)
    return found


def known_names(match: Match, save: str) -> bytes:
    """Return what a rank tells the others, for `unknown_on_all_ranks`: digests of its `save`, and of what it knows."""
    return _digest(save.encode(), _SAVE_BYTES) + _digest(match.known, _KNOWN_BYTES)


def unknown_on_all_ranks(match: Match, answers: Sequence[bytes], ranks: Group) -> list[Path]:
    """Return the names that no rank's state has, given the `known_names` of all ranks.

    If ranks know different names they find the maximum of `known`: a byte for each name, however many ranks there are.
    Collective then. A rank that is `Alone` cannot know: it returns none.

    CheckpointNotFoundError, on all ranks, if they have not opened the same save: the step was replaced meanwhile.
    """
    if isinstance(ranks, Alone):
        return []
    if len({answer[:_SAVE_BYTES] for answer in answers}) > 1:
        raise CheckpointNotFoundError("the step was replaced by another save while ranks opened it")
    known = match.known if len(set(answers)) == 1 else ranks.maximum(match.known)
    return [path for path, is_known in zip(match.names, known, strict=True) if not is_known]


def _digest(data: bytes, nbytes: int) -> bytes:
    return hashlib.blake2b(data, digest_size=nbytes).digest()


def _match_tensor(
    match: Match,
    index: CheckpointIndex,
    present: _Present,
    path: Path,
    leaf: TensorLeaf,
    rank: int,
    options: RestoreOptions,
    other_names: Sequence[Path] = (),
) -> None:
    """Compare a tensor with what is stored under its name or, if there is nothing, under another name that it has."""
    spec = leaf.spec
    if spec.per_rank and rank >= index.world_size:
        return  # fewer ranks wrote the checkpoint; this one keeps its tensor
    of_rank = rank if spec.per_rank else None
    tensor = index.tensor(path, of_rank)
    if tensor is None and other_names:
        found = (index.tensor(name, of_rank) for name in other_names)
        tensor = next((tensor for tensor in found if tensor is not None), None)
    problem, remedy = None, ""
    if tensor is None:
        own = f"{spec.dtype}{list(spec.shape)}"
        problem = present.instead(path, spec.per_rank, f"a tensor, {own}") or f"missing: {display(path)} ({own})"
    elif tensor.dtype != spec.dtype and not (options.cast and _can_cast(tensor.dtype, leaf)):
        problem = f"dtype: {display(path)} is {tensor.dtype} in the checkpoint, {spec.dtype} in the state"
        remedy = "cast" if _can_cast(tensor.dtype, leaf) else "dtype"
    elif tensor.shape != spec.shape and not (options.resize and _have_common(tensor.shape, spec.shape)):
        problem = f"shape: {display(path)} is {list(tensor.shape)} in the checkpoint, {list(spec.shape)} in the state"
        remedy = "resize" if _have_common(tensor.shape, spec.shape) else "shape"
    elif not leaf.writeable:
        problem = f"read-only: {display(path)} is read-only or expanded, and cannot be written to"
    else:
        if tensor.dtype != spec.dtype:
            match.cast.append(path)
        if tensor.shape != spec.shape:
            match.resized.append(path)
            leaf = _common(leaf, Box.whole(tensor.shape))
        match.reads.append((path, tensor, leaf))
    if problem is not None:
        match.mismatches.append(Mismatch(path, problem, remedy))


def _can_cast(stored: str, leaf: TensorLeaf) -> bool:
    dtype, own = torch_dtype(stored), leaf.local.dtype
    return (dtype.is_floating_point and own.is_floating_point) or (dtype.is_complex and own.is_complex)


def _have_common(stored: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Return whether tensors of two shapes have elements in common, or neither has any."""
    is_empty = 0 in stored, 0 in own
    return len(stored) == len(own) and (not any(is_empty) or all(is_empty))


def _common(leaf: TensorLeaf, stored: Box) -> TensorLeaf:
    """Return the leaf with what its boxes have in common with the stored tensor."""
    boxes = []
    for box, at in leaf.boxes:
        common = box.intersection(stored)
        if common is not None:
            moved = tuple(a + new - old for a, new, old in zip(at, common.offset, box.offset, strict=True))
            boxes.append((common, moved))
    return replace(leaf, boxes=boxes)


def _match_subclass(match: Match, index: CheckpointIndex, path: Path, own: Container, stored: Container | None) -> None:
    """Compare the class and the context of a tensor that is stored by its parts."""
    if stored is not None and stored.kind == "tensor":
        if (stored.type, stored.fields) != (own.type, own.fields):
            text = (
                f"is a {stored.type} with {list(stored.fields)} in the checkpoint, a {own.type} with {list(own.fields)}"
            )
        elif stored.context and own.context and stored.context != own.context:
            text = f"is made with {stored.context:.200} in the checkpoint, with {own.context:.200}"
        else:
            return
    elif index.tensor(path) is not None:
        text = f"is a plain tensor in the checkpoint, a {own.type}"
    else:
        return  # its parts are missing
    match.mismatches.append(Mismatch(path, f"class: {display(path)} {text} in the state"))


def _match_value(
    match: Match, index: CheckpointIndex, present: _Present, path: Path, leaf: ValueLeaf, rank: int
) -> None:
    values = {rank: index.values[path]} if path in index.values else {}
    if leaf.per_rank:
        values = index.per_rank_values.get(path, {})
        if rank >= index.world_size:
            return
    if rank not in values:
        of_rank = " of this rank" if leaf.per_rank else ""
        problem = present.instead(path, leaf.per_rank, described(leaf.value))
        match.mismatches.append(Mismatch(path, problem or f"missing: {display(path)} (a value{of_rank})"))
        return
    value = resolve(values[rank], leaf.value)
    if _form(encode_value(value)) == _form(leaf.encoded):
        match.same.append(path)
        return
    placeholder = next(unregistered_in(value), None)
    if placeholder is not None:
        match.mismatches.append(
            Mismatch(
                path,
                f"type: {display(path)} holds {placeholder.data!r:.100} of the {placeholder.form} type "
                f"{placeholder.name}, which this program has not registered (see ckpt.register_encoder), or which no "
                "longer has this value",
            )
        )
    elif leaf.assign is None:
        match.mismatches.append(
            Mismatch(path, f"read-only: {display(path)} is in a container whose items cannot be replaced; use a dict")
        )
    else:
        match.assignments.append(Assignment(path, leaf, value))


def _form(encoded: Any) -> str:
    """Return a form that differs even for values that compare equal, such as 1 and True."""
    return json.dumps(encoded, sort_keys=True)
