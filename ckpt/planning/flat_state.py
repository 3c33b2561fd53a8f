"""A state as leaves by path, and the objects that they belong to. Imports torch.

See `ckpt.planning.state_dict`, which makes it of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.data_loaders import loadable
from ckpt.planning.description import StateDescription
from ckpt.planning.tensor_leaves import TensorLeaf
from ckpt.values.containers import Container

Array = np.ndarray[Any, np.dtype[Any]]

Assign = Callable[[Any], None]
"""Replaces a value in the state."""


@dataclass(slots=True)
class ValueLeaf:
    """A leaf that is not a tensor, with its JSON form; `assign` is None if it cannot be replaced."""

    value: Any
    per_rank: bool
    assign: Assign | None
    encoded: Any


@dataclass(slots=True)
class Owner:
    """A stateful object: `before` is the state dict that it returned, `state_dict` the one to load.

    The leaves of `state_dict` are those of the flat state.
    """

    path: Path
    stateful: Any
    before: Any
    state_dict: Any

    def load(self, state_dict: Any) -> None:
        """Have the object load a state dict. StateError if it raises."""
        try:
            self.stateful.load_state_dict(state_dict)
        except Exception as error:
            kind = type(self.stateful).__name__
            raise StateError(f"{display(self.path)}: {kind}.load_state_dict failed: {error!r}") from error


@dataclass(slots=True)
class DataLoaderOwner(Owner):
    """A data loader. `state_dict` is None unless the checkpoint has a state of this rank."""

    def load(self, state_dict: Any) -> None:
        """Have the loader load a state and start its iterator, if there is a state. StateError if it raises.

        The iterator would otherwise start later, and draw from a random number generator that has been restored.
        """
        if state_dict is None:
            return
        try:
            self.stateful.load_state_dict(loadable(state_dict))
            self.stateful.state_dict()
        except Exception as error:
            kind = type(self.stateful).__name__
            raise StateError(
                f"{display(self.path)}: the {kind} does not continue from the checkpoint: {error!r}. It needs the "
                "dataset, the sampler and the number of workers that it had when it was saved"
            ) from error


@dataclass(slots=True)
class FlatState:
    """The leaves of a state by path. `owners` are its stateful objects, innermost first.

    `containers` are those that are not plain dicts, and whether each is per rank. `structure` is a text that changes,
    on all ranks, when the leaves of any rank change: set it where those of other ranks can change alone, so that all
    ranks plan anew together.
    """

    tensors: Mapping[Path, TensorLeaf] = field(default_factory=dict)
    values: dict[Path, ValueLeaf] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    containers: dict[Path, tuple[Container, bool]] = field(default_factory=dict)
    owners: list[Owner] = field(default_factory=list)
    structure: str = ""
    described: StateDescription | None = None

    def names(self) -> Iterator[Path]:
        """Yield the paths of all leaves."""
        return chain(self.tensors, self.values, self.aliases)

    def describe(self) -> StateDescription:
        """Return the description of the state, made when this is first called."""
        if self.described is None:
            self.described = StateDescription(
                {path: leaf.spec for path, leaf in self.tensors.items()},
                {path: leaf.per_rank for path, leaf in self.values.items()},
                dict(self.aliases),
                dict(self.containers),
                structure=self.structure,
            )
        return self.described

    def local_tensors(self) -> Mapping[Path, torch.Tensor]:
        """Return the memory of this rank for each tensor."""
        return {path: leaf.local for path, leaf in self.tensors.items()}

    def outside_cpu(self) -> list[torch.Tensor]:
        """Return the tensors that are not on the CPU."""
        return [leaf.local for leaf in self.tensors.values() if not leaf.local.is_cpu]

    def memory_of(self, paths: tuple[Path, ...]) -> tuple[Array, Array, Array] | None:
        """Return the addresses of tensors, and which have their elements in C order, and are on the CPU, if known."""
        return None
