"""safetensors: one file, by rank 0 of what all ranks have, by each rank of its shards. Training waits."""

import os

from safetensors import safe_open
from safetensors.torch import save_file

from tools.bench.state import State
from tools.bench.systems.base import Place, commit_directory, hidden_path
from tools.bench.workloads.transformer import local_state

__all__ = ["Safetensors"]


class Safetensors:
    """Files are synced, and the directory gets its name when all are there: the library does neither."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def prepare(self, state: State) -> None:
        """There is nothing to prepare."""

    def save(self, state: State, step: int) -> None:
        folder = hidden_path(self._place, step)
        folder.mkdir(exist_ok=True)
        if self._place.sharded or self._place.rank == 0:
            path = folder / self._name()
            save_file({f"{p}/{n}": t for p, named in local_state(state).items() for n, t in named.items()}, path)
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        commit_directory(self._place, step)

    def poll(self) -> bool:
        return True

    def load(self, state: State, step: int) -> None:
        with safe_open(self._place.path(step) / self._name(), framework="pt", device=self._place.device) as stored:
            for part, named in local_state(state).items():
                for name, tensor in named.items():
                    tensor.copy_(stored.get_tensor(f"{part}/{name}"))

    def close(self) -> None:
        """There is nothing to close."""

    def _name(self) -> str:
        return f"rank_{self._place.rank if self._place.sharded else 0}.safetensors"
