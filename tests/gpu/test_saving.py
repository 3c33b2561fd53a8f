"""Saves from a GPU. Skipped, cleanly, where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.staging.arena import Arena

pytestmark = pytest.mark.gpu


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
    with ckpt.Checkpointer(tmp_path / "root", staging=ckpt.Staging(overlap=overlap)) as checkpointer:
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
    arena = Arena(1, pin=True)
    try:
        arena.resize(1 << 20)
        slot = arena.acquire(1, lambda: pytest.fail("a new arena has a free slot"))
        assert slot.tensor.is_pinned()
    finally:
        arena.close()


def every_kind_of_tensor() -> dict[str, torch.Tensor]:
    """Of all element sizes, with odd numbers of pieces, and views that are no run of memory."""
    torch.manual_seed(3)
    base = torch.randn(37, 53, 19)
    complexes = torch.randn(24, 36, dtype=torch.complex64)
    tensors = {str(dtype): base.to(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8)}
    views = {
        "transposed": base[:, :, 0].t(),
        "every_second": base[::2, 1::2],
        "conjugate": complexes.conj(),
        "negative": complexes.conj().imag,
        "expanded": base[:1].expand(9, 53, 19),
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "complex32": complexes.to(torch.complex32),
        "small": base[0, 0, :3],
        "wide": torch.randn(3, 20_000),
        "tall": torch.randn(20_000, 3),
    }
    return {**tensors, **views}


def on_gpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same kinds of views: moving a view would make a plain tensor of it."""
    moved = {name: tensor.cuda() for name, tensor in state.items()}
    base, complexes = state["torch.float32"].cuda(), state["conjugate"].conj().cuda()
    moved |= {
        "transposed": base[:, :, 0].t(),
        "every_second": base[::2, 1::2],
        "conjugate": complexes.conj(),
        "negative": complexes.conj().imag,
        "expanded": base[:1].expand(9, 53, 19),
        "small": base[0, 0, :3],
    }
    assert moved["conjugate"].is_conj()
    assert not moved["transposed"].is_contiguous()
    return moved


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_files_are_those_of_a_save_from_the_cpu(tmp_path: Path, overlap: bool) -> None:
    state = every_kind_of_tensor()
    written = {}
    for name, saved in (("cpu", state), ("cuda", on_gpu(state))):
        root = tmp_path / name
        staging = ckpt.Staging(file_bytes=40_000, inner_bytes=3_000, overlap=overlap)
        with ckpt.Checkpointer(root, staging=staging) as checkpointer:
            for step in (1, 2, 3):  # the slots are used again
                checkpointer.save(saved, step)
        written[name] = {
            str(path.relative_to(root)): path.read_bytes()
            for path in root.glob("step_*/packs/*/rank_*")
            if path.is_file()
        }
    assert len(written["cpu"]) > 3
    assert written["cuda"] == written["cpu"]


def test_parts_of_a_state_on_the_cpu(tmp_path: Path) -> None:
    state = {"gpu": torch.randn(300, 70, device="cuda"), "cpu": torch.randn(70, 300), "step": 3}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1)
        restored = {"gpu": torch.zeros(300, 70, device="cuda"), "cpu": torch.zeros(70, 300), "step": 0}
        assert checkpointer.restore(restored) == 1
    assert torch.equal(restored["gpu"], state["gpu"])
    assert torch.equal(restored["cpu"], state["cpu"])
    assert restored["step"] == 3


def test_ten_thousand_small_tensors(tmp_path: Path) -> None:
    state = {f"{number}": torch.full((7 + number % 5,), number, device="cuda") for number in range(10_000)}
    restored = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1)
        assert checkpointer.restore(restored) == 1
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())
