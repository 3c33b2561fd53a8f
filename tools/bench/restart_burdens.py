"""Loads of the function of a restart benchmark when the fault comes: workers, a compilation, many objects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

_OBJECTS = 1_000_000  # lists of one number: 100 MB
_LAYERS = 200


@dataclass(frozen=True)
class Burden:
    """`hold` returns what the function keeps in a variable; `work` runs on the ranks that do not fail.

    `prepare` runs before the wrapper is called, and imports what is needed, as docs/restart.md asks for.
    """

    prepare: Callable[[], object] = lambda: None
    hold: Callable[[], Any] = lambda: None
    work: Callable[[], object] = lambda: None


def _iterator(workers: int) -> Any:
    """Return the iterator of a loader whose workers have begun."""
    data = TensorDataset(torch.arange(1_000_000))
    iterator = iter(DataLoader(data, batch_size=8, num_workers=workers, prefetch_factor=2 if workers else None))
    next(iterator)
    return iterator


def _compile(layers: int = _LAYERS) -> None:
    """Compile a function that takes longer than the fault needs to come. The backend needs no compiler of C++."""

    def function(values: torch.Tensor) -> torch.Tensor:
        for number in range(layers):
            values = torch.sin(values) * number + values.square().mean()
        return values

    torch._dynamo.reset()
    torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(8, requires_grad=True))


BURDENS = {
    "0 DataLoader workers": Burden(hold=lambda: _iterator(0)),
    "1 DataLoader worker": Burden(hold=lambda: _iterator(1)),
    "8 DataLoader workers": Burden(hold=lambda: _iterator(8)),
    "torch.compile under way": Burden(prepare=lambda: _compile(layers=1), work=_compile),
    "100 MB of objects": Burden(hold=lambda: [[float(number)] for number in range(_OBJECTS)]),
}
