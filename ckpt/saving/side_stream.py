"""Copies from a GPU run beside training: on a stream of their own, and optimizers wait for them."""

from __future__ import annotations

from typing import Any

import torch

from ckpt.planning.state_dict import FlatState
from ckpt.staging.copy import Staged, only_gpu

__all__ = ["SideStream"]


class SideStream:
    """The stream for copies, and the copies of the last save as long as they are under way. Belongs to one thread."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._hooked: set[int] = set()
        self._under_way: Staged | None = None

    def stream_for(self, flat: FlatState) -> torch.cuda.Stream | None:
        """The stream when the state is on one GPU; from several they are copied one after the other."""
        device = only_gpu(leaf.local for leaf in flat.tensors.values())
        if device is None:
            return None
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def hook_optimizers(self, flat: FlatState) -> None:
        """Have every optimizer of the state wait, on its stream, for copies still under way before it changes
        anything."""
        for stateful in (owner.stateful for owner in flat.owners):
            if isinstance(stateful, torch.optim.Optimizer) and id(stateful) not in self._hooked:
                self._hooked.add(id(stateful))
                stateful.register_step_pre_hook(self._before_optimizer_step)

    def note(self, staged: Staged) -> None:
        """These are the copies of the newest save."""
        self._under_way = None if staged.done else staged

    def forget(self) -> None:
        """Nobody needs the copies any more."""
        self._under_way = None

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._under_way is not None:
            self._under_way.order_before(torch.cuda.current_stream())
            self._under_way = None
