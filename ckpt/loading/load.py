"""Restore a published step into the state of a running program, in place.

    choose a step (the coordinator's view, told to all) -> match names, shapes, dtypes -> all ranks agree -> read into
    the tensors -> all ranks agree -> put back values, let stateful objects load

Nothing is written to the state before every rank has found that everything fits. Runs in the trainer; collective.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    FormatVersionError,
    StateError,
    StateMismatchError,
    StorageError,
)
from ckpt.loading.fetch import Fetch, Wanted
from ckpt.loading.index import CheckpointIndex, StoredTensor, read_index
from ckpt.loading.optimizers import fill_fresh_optimizer, keep_dtypes
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import FlatState, TensorLeaf, flatten
from ckpt.ranks import Ranks
from ckpt.storage.commit import CheckpointRoot
from ckpt.storage.dtypes import stored
from ckpt.storage.locks import lock_shared

__all__ = ["restore"]

_log = logging.getLogger("ckpt")
_SHOWN = 20
_DEVICE_BATCH_BYTES = 256 << 20


def restore(root: CheckpointRoot, state: Any, step: int | None, strict: bool, ranks: Ranks) -> int | None:
    """Put the newest published step (or `step`) into `state`. See `Checkpointer.restore`."""
    candidates = _candidates(root, step, ranks)
    damaged: CheckpointError | None = None
    for candidate in candidates:
        try:
            _restore_step(root, state, candidate, strict, ranks)
        except CheckpointCorruptError as error:
            if step is not None:
                raise
            damaged = error
            _log.warning("step %d cannot be restored, going back to the step before: %s", candidate, error)
            continue
        return candidate
    if damaged is not None:
        raise damaged
    return None


def _candidates(root: CheckpointRoot, step: int | None, ranks: Ranks) -> list[int]:
    """The steps to try, best first: what the coordinator sees, so that all ranks try the same."""
    payload = b""
    if ranks.rank == 0:
        try:
            payload = json.dumps(root.steps()).encode()
        except CheckpointError as error:
            payload = json.dumps(str(error)).encode()
    steps = json.loads(ranks(payload)[0])
    if isinstance(steps, str):
        raise CheckpointError(steps)
    if step is None:
        return sorted(steps, reverse=True)
    if step not in steps:
        raise CheckpointNotFoundError(f"{root.path} has no published step {step}; it has {steps or 'none'}", step=step)
    return [step]


def _restore_step(root: CheckpointRoot, state: Any, step: int, strict: bool, ranks: Ranks) -> None:
    path = root.step_path(step)
    attempt = _Attempt(ranks, step)
    try:
        with attempt.together("look at"):
            attempt.lock = lock_shared(path)
            attempt.index = read_index(path)
        with attempt.together("match"):
            attempt.match(state)
        with attempt.together("fit"):
            attempt.check(strict)
        with attempt.together("read"):
            attempt.read()
        with attempt.together("load"):
            attempt.finish()
    finally:
        attempt.close()


@dataclass
class _Match:
    """What to do, and what does not fit. `unknown` are the stored names that this rank's state does not have; another
    rank's may have them."""

    reads: list[tuple[str, StoredTensor, TensorLeaf]] = field(default_factory=list)
    assignments: list[Callable[[], None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[Path] = field(default_factory=list)


class _Attempt:
    """One try to restore one step; every phase ends with the ranks telling each other whether it worked."""

    def __init__(self, ranks: Ranks, step: int) -> None:
        self._ranks = ranks
        self._step = step
        self.index: CheckpointIndex
        self.lock: Any = None
        self._flat: FlatState
        self._match: _Match

    def together(self, what: str) -> _Together:
        return _Together(self._ranks, self._step, what)

    def match(self, state: Any) -> None:
        """Flatten the state and pair every leaf with what is stored."""
        self._flat = flatten(state, expand=partial(fill_fresh_optimizer, self.index, self._ranks.rank))
        self._match = _match(self.index, self._flat, self._ranks.rank)

    def check(self, strict: bool) -> None:
        """Raise StateMismatchError listing all that does not fit; log it if not `strict`. Collective."""
        unexpected = _known_to_nobody(self._match.unknown, self._ranks)
        problems = [*self._match.problems, *(f"unexpected: {display(path)}" for path in unexpected)]
        if not problems:
            return
        problems.sort(key=lambda problem: (problem.split(":")[0], problem))
        listed = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        text = f"{len(problems)} name(s) of the state do not fit step {self._step}:\n  {listed}{more}"
        if strict:
            raise StateMismatchError(text + "\nNothing was restored; strict=False restores what fits", step=self._step)
        _log.warning("%s\nrestored without these", text)

    def read(self) -> None:
        """Fill the tensors."""
        fetch = Fetch(self.index)
        direct: list[Wanted] = []
        for name, tensor, leaf in self._match.reads:
            for box, at in leaf.boxes:
                target = leaf.local[Box(at, box.shape).slices((0,) * len(at))]
                if target.is_cpu and not target.is_conj() and not target.is_neg():
                    direct.append(Wanted(name, tensor, box, _as_numpy(target)))
                else:
                    _read_to_device(fetch, name, tensor, box, target)
        fetch.read(direct)

    def finish(self) -> None:
        """Put the values in place and have stateful objects load."""
        for _, _, leaf in self._match.reads:
            if leaf.after is not None:
                leaf.after()
        for assign in self._match.assignments:
            assign()
        self._flat.load_owners()
        for _, owner, state_dict in self._flat.owners:
            keep_dtypes(owner, state_dict)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


class _Together:
    """A phase that fails on all ranks if it fails on one, everywhere with the same kind of error.

    The first rank that failed decides the kind; a rank that failed in that way raises its own error.
    """

    def __init__(self, ranks: Ranks, step: int, what: str) -> None:
        self._ranks = ranks
        self._step = step
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        own = b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
        reports = self._ranks(own)
        if not any(reports):
            return
        rank, report = next((rank, report) for rank, report in enumerate(reports) if report)
        name, text = json.loads(report)
        if error is not None and type(error).__name__ == name:
            return
        message = f"rank {rank} could not {self._what} step {self._step}: {name}: {text}"
        raise _SAID.get(name, CheckpointError)(message, rank=rank, step=self._step) from error


_SAID: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointCorruptError,
        CheckpointNotFoundError,
        CheckpointTimeoutError,
        FormatVersionError,
        StateError,
        StateMismatchError,
        StorageError,
    )
}


def _match(index: CheckpointIndex, flat: FlatState, rank: int) -> _Match:
    match = _Match()
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


def _known_to_nobody(unknown: list[Path], ranks: Ranks) -> list[Path]:
    """Those of the names a rank does not know that no other rank knows either. Collective."""
    own = json.dumps(unknown).encode()
    digests = ranks(hashlib.blake2b(own, digest_size=16).digest())
    if len(set(digests)) == 1:
        return unknown
    lists = [{tuple(path) for path in json.loads(data)} for data in ranks(own)]
    return [path for path in unknown if all(path in others for others in lists)]


def _match_tensor(match: _Match, index: CheckpointIndex, path: Path, leaf: TensorLeaf, rank: int) -> None:
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
        match.reads.append((display(path), tensor, leaf))


def _assignment(assign: Callable[[Any], None], value: Any) -> Callable[[], None]:
    return lambda: assign(value)


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The memory of a CPU tensor as an array of its stored dtype (with the trailing dimension of raw ones)."""
    how = stored(str(tensor.dtype).removeprefix("torch."))
    if not how.raw and how.numpy_dtype.isbuiltin == 1:
        return tensor.numpy()
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    if how.trailing:
        bits = bits.unsqueeze(-1).view(torch.uint8)
    return bits.numpy().view(how.numpy_dtype)


def _read_to_device(fetch: Fetch, name: str, tensor: StoredTensor, box: Box, target: torch.Tensor) -> None:
    """Read into host memory, some rows at a time, and copy them over."""
    rows = box.shape[0] if box.shape else 1
    per_row = max(1, box.elements // max(rows, 1)) * target.element_size()
    step = max(1, _DEVICE_BATCH_BYTES // per_row)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = Box((box.offset[0] + first, *box.offset[1:]), (count, *box.shape[1:])) if box.shape else box
        host = torch.empty(part.shape, dtype=target.dtype, pin_memory=target.is_cuda)
        fetch.read([Wanted(name, tensor, part, _as_numpy(host))])
        (target[first : first + count] if box.shape else target).copy_(host)
