"""Compares what is known of a state with what `flatten`, which remembers nothing, finds in it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ckpt.errors import StateError
from ckpt.planning.flat_state import FlatState
from ckpt.planning.known_state import KnownStates
from ckpt.planning.state_dict import flatten


def seen(flat: FlatState) -> dict[str, Any]:
    """Return everything that a save uses of a state."""
    paths = tuple(flat.tensors)
    locals_ = [flat.tensors[path].local for path in paths]
    fresh = [int(local.data_ptr()) for local in locals_]
    known = flat.memory_of(paths)
    if known is not None:
        assert known[0].tolist() == fresh
        assert known[1].tolist() == [t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in locals_]
        assert known[2].tolist() == [local.is_cpu for local in locals_]
    ours = flat.local_tensors()
    assert [ours[path].data_ptr() for path in paths] == fresh
    per_rank = {path for path, leaf in flat.tensors.items() if leaf.spec.per_rank}
    return {
        "tensors": {
            path: (
                0 if path in per_rank else leaf.local.data_ptr(),  # a state dict may have a new one
                tuple(leaf.local.shape),
                leaf.local.stride(),
                leaf.local.dtype,
                leaf.local.is_neg(),
                leaf.local.requires_grad,
                leaf.spec,
                leaf.boxes,
                leaf.writeable,
                leaf.local.resolve_neg().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            )
            for path, leaf in flat.tensors.items()
        },
        "values": {path: (leaf.encoded, leaf.per_rank) for path, leaf in flat.values.items()},
        "aliases": flat.aliases,
        "containers": flat.containers,
        "owners": {owner.path: owner.stateful for owner in flat.owners},
        "description": flat.describe(),
    }


def is_known(states: KnownStates, state: Any) -> bool:
    """Flatten a state, compare the result, and return whether it was recognised."""
    try:
        expected = seen(flatten(state))
    except StateError as error:
        with pytest.raises(StateError, match=re.escape(str(error))):
            states.flatten(state)
        return False
    flat = states.flatten(state)
    assert seen(flat) == expected
    return type(flat) is not FlatState


def known_states(state: Any) -> KnownStates:
    """Return the `KnownStates` that have seen this state."""
    states = KnownStates()
    assert not is_known(states, state)
    assert is_known(states, state)
    return states
