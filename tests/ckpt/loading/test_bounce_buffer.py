"""Tensors that are not plain CPU memory are filled through a bounce buffer, whatever their size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer, Staging
from tests.support.saves import save_here


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_more_than_is_read_at_once(tmp_path: Path, compression: str | None) -> None:
    """Some rows of a tensor at a time, a row larger than the buffer, and many small tensors together."""
    generator = torch.Generator().manual_seed(4)
    shapes: dict[str, tuple[int, ...]] = {"rows": (701, 7001), "row": (1, 4_300_007), "run": (4_300_007,)}
    shapes |= {"number": (), "empty": (0, 3)} | {f"small {n}": (n + 1, 3) for n in range(50)}
    state = {name: torch.randint(9, shape, generator=generator).to(torch.complex64) for name, shape in shapes.items()}
    state |= {"plain": torch.randn(100, 3)}
    with Checkpointer(tmp_path, staging=Staging(compression=compression)) as checkpointer:
        save_here(checkpointer, state, 1)
    target = {name: torch.zeros(shape, dtype=torch.complex64).conj() for name, shape in shapes.items()}
    target |= {"plain": torch.zeros(100, 3)}
    with Checkpointer(tmp_path, staging=Staging(compression=compression)) as checkpointer:
        assert checkpointer.restore(target) == 1
        report = checkpointer.last_restore
    assert report is not None
    assert report.storage_bytes == sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
