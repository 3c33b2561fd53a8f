"""`torch.save` of one file: by rank 0 of what all ranks have, by each rank of its shards. Training waits."""

import os

import torch

from tools.bench.state import State
from tools.bench.systems.base import Place, commit_directory, hidden_path
from tools.bench.workloads.transformer import local_state

__all__ = ["TorchSave"]


class TorchSave:
    """Files are synced, and the directory gets its name when all are there: `torch.save` does neither."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def prepare(self, state: State) -> None:
        """There is nothing to prepare."""

    def save(self, state: State, step: int) -> None:
        folder = hidden_path(self._place, step)
        folder.mkdir(exist_ok=True)
        if self._place.sharded or self._place.rank == 0:
            with (folder / self._name()).open("wb") as stream:
                torch.save(local_state(state), stream)
                stream.flush()
                os.fsync(stream.fileno())
        commit_directory(self._place, step)

    def poll(self) -> bool:
        return True

    def load(self, state: State, step: int) -> None:
        """Mapped, not read at once: the faster way that the documentation names."""
        stored = torch.load(self._place.path(step) / self._name(), mmap=True, weights_only=True)
        for part, named in local_state(state).items():
            for name, tensor in named.items():
                tensor.copy_(stored[part][name])

    def close(self) -> None:
        """There is nothing to close."""

    def _name(self) -> str:
        return f"rank_{self._place.rank if self._place.sharded else 0}.pt"
