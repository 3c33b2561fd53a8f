"""Marks and objects that a user puts into a state."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

__all__ = ["PerRank", "RngState"]


@dataclass(slots=True)
class PerRank:
    """A part of the state that belongs to this rank alone, such as its position in the data.

    `value` is anything a state may hold. Each rank saves its own, and gets its own back. A rank that the checkpoint
    does not know, because it was written by fewer ranks, keeps what it has. `value` itself is replaced by a restore if
    it is not a container. For random number generators there is `RngState`.
    """

    value: Any


class RngState:
    """The random number generators of this process, as a part of a state: ``state = {"rng": ckpt.RngState(), ...}``.

    A save takes the state that they have at that moment, a restore sets it: the global generators of Python's `random`,
    of numpy (``numpy.random.seed``), and of torch on the CPU and on all CUDA devices. It is `PerRank` by itself: each
    rank gets its own back, and a rank that the checkpoint does not know keeps what it has. A restore sets the
    generators after all other objects of the state have loaded.

    CUDA's are saved once the process has used CUDA. A process without CUDA keeps what a checkpoint has of them, to save
    it again; devices that are not there are passed over, and those that the checkpoint does not know keep what they
    have. Generators that you have made yourself (`torch.Generator`, `numpy.random.Generator`) are not in it. Use it in
    the thread that trains.
    """

    def __init__(self) -> None:
        self._cuda: list[bytes] = []

    def state_dict(self) -> dict[str, Any]:
        """What the generators are at: of the same structure on every machine, whatever devices it has."""
        import numpy as np
        import torch

        version, numbers, gauss = random.getstate()
        if torch.cuda.is_initialized():
            self._cuda = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
        return {
            "torch": torch.get_rng_state(),
            "cuda": list(self._cuda),
            "numpy": np.random.get_state(legacy=False),
            "python": {"version": version, "numbers": np.array(numbers, np.uint32), "gauss": gauss},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators to what `state_dict` returned, here or in another process."""
        import numpy as np
        import torch

        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        self._cuda = list(state_dict["cuda"])
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for device, state in enumerate(self._cuda[:devices]):
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), device)
