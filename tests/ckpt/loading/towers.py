"""A small model of two parts, for tests of restores."""

from __future__ import annotations

import torch
from torch import nn


class Tower(nn.Module):
    """A model with an encoder and a head."""

    def __init__(self, fill: float, out: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, dtype=dtype)
        self.head = nn.Linear(4, out, dtype=dtype)
        for parameter in self.parameters():
            nn.init.constant_(parameter, fill)
