"""orbax-checkpoint on one rank: it is told of numpy arrays over the same memory, and writes in a thread."""

from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch

from tools.bench.state import State
from tools.bench.systems.base import Background, Place, sync_tree
from tools.bench.workloads.transformer import local_state

__all__ = ["Orbax"]


class Orbax:
    """Several ranks would need a distributed JAX. It syncs nothing: that is done when it says it is done."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._background = Background()
        self._checkpointer: Any = None

    def prepare(self, state: State) -> None:
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, state: State, step: int) -> None:
        self._checkpointer.save(self._place.path(step), args=ocp.args.PyTreeSave(_arrays(state)))
        self._background.begin(
            self._checkpointer.wait_until_finished, lambda: sync_tree(self._place.path(step), self._place.threads)
        )

    def poll(self) -> bool:
        return self._background.poll()

    def load(self, state: State, step: int) -> None:
        into = _arrays(state)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restore_args = ocp.checkpoint_utils.construct_restore_args(into)
            loaded = checkpointer.restore(
                self._place.path(step), args=ocp.args.PyTreeRestore(item=into, restore_args=restore_args)
            )
        for part, named in into.items():
            for name, array in named.items():
                np.copyto(array, loaded[part][name])

    def close(self) -> None:
        self._background.close()
        if self._checkpointer is not None:
            self._checkpointer.close()


def _arrays(state: State) -> dict[str, dict[str, Any]]:
    return {part: {n: _array(t) for n, t in named.items()} for part, named in local_state(state).items()}


def _array(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
