"""Pair every leaf of a state with what is stored under its name, and say what does not fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.sources import Alone, Gather
from ckpt.paths import Path, display
from ckpt.planning.state_dict import FlatState, TensorLeaf

__all__ = ["Match", "known_to_nobody", "match_state"]


@dataclass
class Match:
    """What to do, and what does not fit. `unknown` are the stored names that this rank's state does not have; another
    rank's may have them."""

    reads: list[tuple[Path, StoredTensor, TensorLeaf]] = field(default_factory=list)
    assignments: list[Callable[[], None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[Path] = field(default_factory=list)


def match_state(index: CheckpointIndex, flat: FlatState, rank: int) -> Match:
    match = Match()
    for path, leaf in flat.tensors.items():
        _match_tensor(match, index, path, leaf, rank)
    for path, value in flat.values.items():
        if value.per_rank:
            own = index.per_rank_values.get(path, {})
            if rank in own:
                match.assignments.append(_assignment(value.assign, own[rank]))
            elif rank < index.world_size:
                match.problems.append(f"missing: {display(path)} (a value of this rank)")
        elif path in index.values:
            match.assignments.append(_assignment(value.assign, index.values[path]))
        else:
            match.problems.append(f"missing: {display(path)} (a value)")
    for path in flat.aliases:
        if index.tensor(path) is None and path not in index.per_rank_tensors:
            match.problems.append(f"missing: {display(path)}")
    known = flat.tensors.keys() | flat.values.keys() | flat.aliases.keys()
    names = index.tensors.keys() | index.values.keys() | index.aliases.keys()
    match.unknown = sorted((path for path in names if path not in known), key=repr)
    own_names = {path for own in (index.per_rank_tensors, index.per_rank_values) for path in own if rank in own[path]}
    match.problems += [f"unexpected: {display(path)} (of this rank)" for path in own_names if path not in known]
    return match


def known_to_nobody(unknown: list[Path], ranks: Gather) -> list[Path]:
    """Those of the names a rank does not know that no other rank knows either. Collective.

    A rank alone cannot tell: none.
    """
    if isinstance(ranks, Alone):
        return []
    own = json.dumps(unknown).encode()
    digests = ranks(hashlib.blake2b(own, digest_size=16).digest())
    if len(set(digests)) == 1:
        return unknown
    lists = [{tuple(path) for path in json.loads(data)} for data in ranks(own)]
    return [path for path in unknown if all(path in others for others in lists)]


def _match_tensor(match: Match, index: CheckpointIndex, path: Path, leaf: TensorLeaf, rank: int) -> None:
    spec = leaf.spec
    if spec.per_rank and rank >= index.world_size:
        return  # the checkpoint is of fewer ranks; this one keeps what it has
    tensor = index.tensor(path, rank if spec.per_rank else None)
    if tensor is None:
        match.problems.append(f"missing: {display(path)} ({spec.dtype}{list(spec.shape)})")
    elif tensor.dtype != spec.dtype:
        match.problems.append(f"dtype: {display(path)} is {tensor.dtype} in the checkpoint, {spec.dtype} in the state")
    elif tensor.shape != spec.shape:
        match.problems.append(
            f"shape: {display(path)} is {list(tensor.shape)} in the checkpoint, {list(spec.shape)} in the state"
        )
    elif not leaf.writeable:
        match.problems.append(f"read-only: {display(path)} is read-only or expanded, and cannot be written to")
    else:
        match.reads.append((path, tensor, leaf))


def _assignment(assign: Callable[[Any], None], value: Any) -> Callable[[], None]:
    return lambda: assign(value)
