"""Tensor subclasses are saved by their parts: one of our own, and those of torchao if it is installed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer, StateError, StateMismatchError
from tests.support import run_ranks
from tests.support.saves import save_here
from tests.support.template import quick_python


class Scaled(torch.Tensor):
    """A matrix of int8 codes with a scale for each row, a list of `levels`, and a number."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor, bits: int) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor, bits: int) -> None:
        self.codes, self.scale, self.levels, self.bits = codes, scale, levels, bits

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "levels"], {"bits": self.bits, "shape": self.shape}

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Any], context: Any, size: Any, stride: Any) -> Scaled:
        assert tuple(size) == tuple(context["shape"]) == tuple(parts["codes"].shape)
        return cls(parts["codes"], parts["scale"], parts["levels"], context["bits"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale, args[0].levels, args[0].bits)
        raise NotImplementedError(str(function))


def scaled(rows: int, first: int = 0, bits: int = 4) -> Scaled:
    codes = (torch.arange(rows * 3, dtype=torch.int8) + 3 * first).reshape(rows, 3)
    return Scaled(codes, torch.arange(rows, dtype=torch.float32)[:, None] + first, torch.arange(5.0), bits)


def parts(tensor: Any) -> list[Any]:
    return [getattr(tensor, name).tolist() for name in tensor.__tensor_flatten__()[0]]


@pytest.fixture
def registered() -> Any:
    ckpt.register_tensor_subclass(Scaled, {"levels": "whole"})


def test_a_class_that_nobody_registered_is_refused(tmp_path: Path) -> None:
    class Unknown(Scaled):
        pass

    tensor = Unknown(*(torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2, 1), torch.zeros(5), 4))
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(StateError, match=r"Unknown; .*\.register_tensor_subclass"),
    ):
        save_here(checkpointer, {"w": tensor}, 1)
    with pytest.raises(TypeError, match="__tensor_flatten__"):
        ckpt.register_tensor_subclass(torch.Tensor)
    with pytest.raises(ValueError, match="must be one of shape, elements, whole"):
        ckpt.register_tensor_subclass(Unknown, {"codes": "rows"})  # type: ignore[dict-item]


@pytest.mark.usefixtures("registered")
def test_it_is_restored_in_place_and_loaded_without_a_template(tmp_path: Path) -> None:
    saved = scaled(4, first=1)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"w": saved, "again": saved}, 1)
    state = {"w": scaled(4), "again": scaled(4)}
    memory = state["w"].codes.data_ptr()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state)
    assert parts(state["w"]) == parts(state["again"]) == parts(saved)
    assert state["w"].codes.data_ptr() == memory
    loaded = ckpt.load(tmp_path, dtype=torch.float64)
    assert type(loaded["w"]) is Scaled
    assert (loaded["w"].bits, loaded["w"].scale.dtype) == (4, torch.float32)
    assert parts(loaded["w"]) == parts(loaded["again"]) == parts(saved)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(StateMismatchError, match=r"class: w is made with .*4.* in the checkpoint, with .*8"):
            checkpointer.restore({"w": scaled(4, bits=8), "again": scaled(4)})
        with pytest.raises(
            StateMismatchError, match=r"form: w is a \w[\w.]*Scaled in the checkpoint, a tensor, float32"
        ):
            checkpointer.restore({"w": torch.zeros(4, 3), "again": scaled(4)})


@pytest.mark.usefixtures("registered")
def test_a_plain_tensor_of_the_step_does_not_fit_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"w": torch.zeros(4, 3)}, 1)
        with pytest.raises(StateMismatchError, match=r"class: w is a plain tensor in the checkpoint, a .*Scaled"):
            checkpointer.restore({"w": scaled(4)})


def test_a_program_that_does_not_know_the_class_gets_its_parts(tmp_path: Path) -> None:
    ckpt.register_tensor_subclass(Scaled, {"levels": "whole"})
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"w": scaled(4)}, 1)
    code = "import sys, ckpt; w = ckpt.load(sys.argv[1])['w']; print(sorted(w), w['codes'].shape)"
    answer = subprocess.run(
        [quick_python(), "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=50, check=True
    )
    assert answer.stdout == "['codes', 'levels', 'scale'] torch.Size([4, 3])\n"


def _sharded(world_size: int, rank: int, make: Callable[[int, int], Any], rows: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    own = rows // world_size
    local = make(own, own * rank)
    mesh = init_device_mesh("cpu", (world_size,))
    shape = torch.Size((rows, *local.shape[1:]))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=local.stride())


def _save_sharded(rank: int, world_size: int, root: Path) -> None:
    ckpt.register_tensor_subclass(Scaled, {"levels": "whole"})
    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, {"w": _sharded(world_size, rank, scaled, 8)}, 1)


def _restore_sharded(rank: int, world_size: int, root: Path) -> bool:
    ckpt.register_tensor_subclass(Scaled, {"levels": "whole"})
    state = {"w": _sharded(world_size, rank, lambda rows, first: scaled(rows), 8)}
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(state)
    rows = 8 // world_size
    return parts(state["w"].to_local()) == parts(scaled(rows, rows * rank))


def test_a_sharded_one_is_restored_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, tmp_path / "root")
    assert all(result.value for result in run_ranks(_restore_sharded, 4, tmp_path / "root"))
    ckpt.register_tensor_subclass(Scaled, {"levels": "whole"})
    assert parts(ckpt.load(tmp_path / "root")["w"]) == parts(scaled(8))


# -- torchao -----------------------------------------------------------------------------------------------------------

_WARNS = pytest.mark.filterwarnings("ignore")
_KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def _quantized(kind: str, sharded: bool = False, world_size: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torchao import optim

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model, getattr(optim, kind)(model.parameters(), lr=0.1)


def _stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(4)
    model(torch.randn(8, 64)).square().sum().backward()
    with torch.compiler.set_stance("force_eager"):  # torchao compiles the step; not for a test
        optimizer.step()
    optimizer.zero_grad()


def _flat(optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            local = state[key].to_local() if hasattr(state[key], "to_local") else state[key]
            found.append(parts(local) if hasattr(local, "__tensor_flatten__") else local.tolist())
    return found


@_WARNS
@pytest.mark.parametrize("kind", _KINDS)
def test_quantized_optimizer_state_of_torchao(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    model, optimizer = _quantized(kind)
    _stepped(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": model, "optimizer": optimizer}, 1)
    expected = _flat(optimizer)
    _stepped(model, optimizer)
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for steps in (0, 1):  # a new optimizer, and one that has its state
        other, restored = _quantized(kind)
        for _ in range(steps):
            _stepped(other, restored)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore({"model": other, "optimizer": restored})
        assert _flat(restored) == expected
        state = restored.state[next(iter(other.parameters()))]["exp_avg"]
        assert type(state).__name__.startswith("OptimState")
        _stepped(other, restored)
        assert all(torch.equal(tensor, after[name]) for name, tensor in other.state_dict().items())
    loaded = ckpt.load(tmp_path, prefix="optimizer/state/0/exp_avg")
    assert type(loaded).__name__.startswith("OptimState")
    assert loaded.dequantize().shape == (128, 64)


def _fsdp_save(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Save each kind after a step, and return its weights after another step."""
    after = {}
    for kind in _KINDS:
        model, optimizer = _quantized(kind, True, world_size)
        _stepped(model, optimizer)
        with Checkpointer(folder / kind) as checkpointer:
            save_here(checkpointer, {"model": model, "optimizer": optimizer}, 1)
        _stepped(model, optimizer)
        after[kind] = {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}
    return after


def _fsdp_restore(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Restore each kind, and return its weights after a step."""
    after = {}
    for kind in _KINDS:
        model, optimizer = _quantized(kind, True, world_size)
        with Checkpointer(folder / kind) as checkpointer:
            checkpointer.restore({"model": model, "optimizer": optimizer})
        if world_size == 1:
            own = optimizer.state[next(iter(model.parameters()))]["exp_avg"].to_local()
            assert parts(own) == parts(ckpt.load(folder / kind, prefix="optimizer/state/0/exp_avg")), kind
        _stepped(model, optimizer)
        after[kind] = {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}
    return after


@_WARNS
@pytest.mark.timeout(120)
def test_quantized_optimizer_state_under_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    expected = run_ranks(_fsdp_save, 2, tmp_path)[0].value
    for ranks in (2, 1):
        found = run_ranks(_fsdp_restore, ranks, tmp_path)
        if ranks == 2:  # on other numbers of ranks, sums of gradients differ in the last bits
            assert all(result.value == expected for result in found)


@_WARNS
def test_quantized_weights_of_torchao(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
        quantize_(model, Int8WeightOnlyConfig(version=2))
        return model

    saved, other = make(1), make(2)
    ones = torch.ones(1, 64)
    assert not torch.equal(saved(ones), other(ones))
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": saved}, 1)
        checkpointer.restore({"model": other})
    assert torch.equal(saved(ones), other(ones))


@_WARNS
def test_nf4_weights_of_torchao(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    torch.manual_seed(1)
    saved, other = (to_nf4(torch.randn(512, 512), 64, 256) for _ in range(2))
    assert not torch.equal(saved.get_original_weight(), other.get_original_weight())
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"w": saved}, 1)
        checkpointer.restore({"w": other})
    assert torch.equal(saved.get_original_weight(), other.get_original_weight())


def _torchao_sharded(kind: str, world_size: int, rank: int, seed: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.manual_seed(seed)
    whole, rows = torch.randn(512, 512), 512 // world_size
    own = whole[rank * rows : (rank + 1) * rows].contiguous()
    if kind == "float8":
        from torchao.quantization import Float8Tensor, PerRow

        local: Any = Float8Tensor.from_hp(own, granularity=PerRow())
    else:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        local = (
            to_nf4(own, 64, 256) if kind == "nf4 of its own" else torch.chunk(to_nf4(whole, 64, 256), world_size)[rank]
        )
    mesh = init_device_mesh("cpu", (world_size,))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def _save_torchao(rank: int, world_size: int, root: Path, *kinds: str) -> str:
    with Checkpointer(root) as checkpointer:
        try:
            save_here(checkpointer, {kind: _torchao_sharded(kind, world_size, rank, seed=1) for kind in kinds}, 1)
        except ckpt.CheckpointError as error:
            return str(error)
    return ""


def _restore_torchao(rank: int, world_size: int, root: Path, *kinds: str) -> dict[str, bool]:
    """Return whether the tensor of each kind has the parts that were saved."""
    state = {kind: _torchao_sharded(kind, world_size, rank, seed=2) for kind in kinds}
    saved = {kind: parts(_torchao_sharded(kind, world_size, rank, seed=1).to_local()) for kind in kinds}
    for kind in kinds:
        assert parts(state[kind].to_local()) != saved[kind], kind
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(state)
    return {kind: parts(state[kind].to_local()) == saved[kind] for kind in kinds}


@_WARNS
def test_sharded_weights_of_torchao_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    saved = run_ranks(_save_torchao, 2, tmp_path / "root", "float8", "nf4")
    assert [result.value for result in saved] == ["", ""]
    for ranks in (4, 2, 1):
        for result in run_ranks(_restore_torchao, ranks, tmp_path / "root", "float8", "nf4"):
            assert result.value == {"float8": True, "nf4": True}, ranks


@_WARNS
def test_a_part_that_all_ranks_share_must_be_the_same_on_all(tmp_path: Path) -> None:
    """Of weights that each rank quantized for itself: the mean of their scales."""
    pytest.importorskip("torchao")
    for result in run_ranks(_save_torchao, 2, tmp_path / "root", "nf4 of its own"):
        assert "nf4 of its own/scaler_mean (rank 1 unlike rank 0)" in result.value
    with Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.all_steps() == []
