"""Assign values and have objects load their state, first in a trial that can be undone.

    trial:  small tensors of objects that may refuse (the old ones are kept) -> values, containers -> those objects load
    read:   all tensors
    finish: all objects load, in the order of the state

An object's own `load_state_dict` may raise. So objects that may refuse are tried before the large tensors, of which
there is no second copy, are overwritten. Modules and optimizers that load by PyTorch's code alone cannot refuse: names
and shapes fit by then (`own_loading`). Runs in the trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ckpt.errors import StateError
from ckpt.loading.bounce_buffer import overwrite
from ckpt.loading.handover import Handover
from ckpt.loading.match import Assignment, Match, Read, is_below
from ckpt.loading.optimizers import keep_dtypes
from ckpt.loading.own_loading import may_refuse
from ckpt.loading.structure import ContainerUpdate, Structure
from ckpt.paths import Path, display
from ckpt.planning.state_dict import Owner, RngState

_KEPT_BYTES = 64 << 20
"""Tensors of objects that may refuse are read for the trial if they have at most this size together.

Their old content is copied, which takes as much memory."""


class StateUpdate:
    """The part of a restore besides reading. Random number generators are set last: loading may use them."""

    def __init__(
        self, match: Match, owners: list[Owner], structure: Structure, handovers: Mapping[Path, Handover]
    ) -> None:
        self._match = match
        self._handovers = handovers
        self._changes = structure.changes
        self._owners = sorted(owners, key=lambda owner: isinstance(owner.stateful, RngState))
        self._may_refuse = [owner for owner in self._owners if may_refuse(owner)]
        below = {owner.path for owner in self._may_refuse}
        reads = [read for read in match.reads if is_below(read[0], below)] if below else []
        new = set(structure.new)
        old = [read for read in reads if not is_below(read[0], new)]
        self._old = old if sum(_nbytes(read) for read in old) <= _KEPT_BYTES else []
        # Without the new ones, which the state does not have yet, the objects could not be tried.
        self._early = [*self._old, *(read for read in reads if is_below(read[0], new))]
        self._kept: list[tuple[Read, torch.Tensor]] = []
        self._assigned: list[Assignment] = []
        self._changed: list[ContainerUpdate] = []
        self._tried: list[Owner] = []

    @property
    def tries(self) -> bool:
        """Whether the trial does anything."""
        return bool(self._early or self._match.assignments or self._changes or self._may_refuse)

    @property
    def finishes(self) -> bool:
        """Whether `finish` does anything."""
        return bool(self._owners) or any(leaf.after is not None for _, _, leaf in self._match.reads)

    def try_objects(self, read: Callable[[list[Read]], object]) -> None:
        """Assign values, give containers their items, and have the objects load that may refuse. `read` fills tensors.

        Raises StateError or StateMismatchError, naming the object. Call `roll_back` then, as after any other failure.
        """
        with torch.no_grad():
            self._kept = [(early, early[2].local.clone()) for early in self._old]
        if self._early:
            read(self._early)
            _written(self._early)
        for assignment in self._match.assignments:
            self._assigned.append(assignment)
            _assign(assignment, assignment.value)
        for change in self._changes:
            self._changed.append(change)
            change.apply()
        for owner in self._may_refuse:
            self._tried.append(owner)
            handover = self._handovers.get(owner.path)
            if handover is not None:
                handover.keep(owner)
            try:
                owner.load(_copied(owner.state_dict))  # it may modify the state dict
            except StateError as error:
                if handover is None:
                    raise
                handover.take_back(owner, error)
                owner.load(_copied(owner.state_dict))

    def roll_back(self) -> list[str]:
        """Undo the trial, and return messages about what could not be undone."""
        for (_, _, leaf), kept in self._kept:
            overwrite(leaf.local, kept)
        _written([early for early, _ in self._kept])
        undo: list[Callable[[], object]] = [change.undo for change in reversed(self._changed)]
        undo += [partial(_assign, each, each.leaf.value) for each in reversed(self._assigned)]
        undo += [partial(owner.load, owner.before) for owner in self._tried]
        failed = []
        for step in undo:
            try:
                step()
            except StateError as error:
                failed.append(str(error))
        self._kept, self._assigned, self._changed, self._tried = [], [], [], []
        return failed

    def finish(self) -> None:
        """Have all objects load; the tensors are filled. StateError says what has been restored and what has not."""
        _written(self._match.reads)
        for handover in self._handovers.values():
            handover.fill_common()
        for number, owner in enumerate(self._owners):
            try:
                owner.load(owner.state_dict)
            except StateError as error:
                left = ", ".join(display(other.path) for other in self._owners[number + 1 :]) or "none"
                raise StateError(
                    f"{error}. All tensors, values and the objects before it have been restored; it may be "
                    f"partly changed. Objects after it that have not loaded: {left}"
                ) from error.__cause__
            keep_dtypes(owner.stateful, owner.state_dict)


def _nbytes(read: Read) -> int:
    return read[2].local.numel() * read[2].local.element_size()


def _written(reads: list[Read]) -> None:
    for _, _, leaf in reads:
        if leaf.after is not None:
            leaf.after()


def _assign(assignment: Assignment, value: Any) -> None:
    assert assignment.leaf.assign is not None
    try:
        assignment.leaf.assign(value)
    except Exception as error:
        raise StateError(
            f"{display(assignment.path)}: the container does not accept {value!r:.100}: {error!r}"
        ) from error


def _copied(node: Any) -> Any:
    """Copy the containers of a tree, not its leaves."""
    if isinstance(node, dict):
        copied = copy.copy(node)
        for key, item in node.items():
            copied[key] = _copied(item)
        return copied
    if type(node) is list or type(node) is tuple:
        return type(node)(map(_copied, node))
    return node
