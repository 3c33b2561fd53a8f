"""Staging from a GPU. Skipped, cleanly, where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.staging.arena import Arena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model_and_optimizer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def copies(state: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    moments = [t for entry in optimizer.state.values() for t in entry.values()]
    return [t.detach().cpu().clone() for t in (*model.state_dict().values(), *moments)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_save_holds_the_state_of_its_step_while_training_goes_on(tmp_path: Path, overlap: bool) -> None:
    model, optimizer = model_and_optimizer(0)
    state = {"model": model, "optimizer": optimizer}
    expected = copies(state)
    with ckpt.Checkpointer(tmp_path / "root", overlap=overlap) as checkpointer:
        checkpointer.warmup(state)
        checkpointer.async_save(state, 1)
        for _ in range(3):
            step(model, optimizer)  # changes every tensor in place, on the current stream
        assert checkpointer.maybe_finalize(blocking=True) == [1]
        assert not all(torch.equal(a, b) for a, b in zip(expected, copies(state), strict=True))

    other_model, other_optimizer = model_and_optimizer(1)
    restored = {"model": other_model, "optimizer": other_optimizer}
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.restore(restored) == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, copies(restored), strict=True))


def test_the_arena_is_pinned() -> None:
    arena = Arena(1, None, pin=True)
    try:
        arena.resize(1 << 20)
        slot = arena.acquire(1, lambda: pytest.fail("a new arena has a free slot"))
        assert slot.tensor.is_pinned()
    finally:
        arena.close()


def test_strided_and_special_tensors_come_back(tmp_path: Path) -> None:
    base = torch.randn(64, 48, device="cuda")
    state = {
        "t": base.t(),
        "conj": torch.randn(1000, dtype=torch.complex64, device="cuda").conj(),
        "bf16": base.bfloat16(),
    }
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    with ckpt.Checkpointer(tmp_path / "root", overlap=True, pack_below_bytes=0) as checkpointer:
        checkpointer.save(state, 1)
        restored = {name: torch.zeros(t.shape, dtype=t.dtype, device="cuda") for name, t in expected.items()}
        assert checkpointer.restore(restored) == 1
    for name, tensor in expected.items():
        assert torch.equal(restored[name].cpu(), tensor)
