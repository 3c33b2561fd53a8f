"""A GPT model and the distributed optimizer of Megatron-core, on CPUs: steps that are loaded with another TP and PP."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import ckpt
from tests.support import run_ranks
from tests.support.frameworks import MEGATRON

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

IMPORTS = (
    *MEGATRON,
    "ckpt.integrations.megatron",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
)
FORMATS = ("fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter")


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that Megatron makes on a GPU, whatever the program says."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1:  # Megatron asks for the names of classes on a GPU
            return f"torch.cuda.{str(args[0].dtype)[6:].replace('float32', 'Float')}Tensor"
        return function(*args, **kwargs)


def _without_cuda() -> contextlib.AbstractContextManager[Any]:
    """Let Megatron run in a process without CUDA, in which it does all that it does but its kernels."""
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.set_device = lambda *given: None
    cuda.get_rng_state = lambda *given: torch.get_rng_state()
    cuda.is_current_stream_capturing = lambda: False
    cuda.FloatTensor = torch.FloatTensor
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *given, **named: self  # type: ignore[assignment,method-assign]
    random.CudaRNGStatesTracker.fork = lambda self, *given: contextlib.nullcontext()
    return _OnCpu()


def _gpt(tp: int, pp: int, seed: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        gated_linear_unit=True,  # its weight is made by a factory, of two parts
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=8, pre_process=first, post_process=last)


def _folder(path: Path) -> str:
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(path)


def _model(rank: int, world_size: int, root: Path) -> None:
    with _without_cuda():
        from megatron.core import dist_checkpointing as core

        from ckpt.integrations.megatron import CkptLoadStrategy, CkptSaveStrategy

        with CkptSaveStrategy(timeout=60) as strategy:
            first = _folder(root / "first")
            core.save(_gpt(2, 1, seed=1).sharded_state_dict(metadata={}), first, strategy)
            for number, (tp, pp) in enumerate([(1, 2), (1, 1)]):
                model = _gpt(tp, pp, seed=2)
                loaded = core.load(model.sharded_state_dict(metadata={}), first, CkptLoadStrategy())
                model.load_state_dict(loaded)
                core.save(model.sharded_state_dict(metadata={}), _folder(root / str(number)), strategy)


def _same_tensors(one: Path, other: Path) -> list[str]:
    with ckpt.open(one) as a, ckpt.open(other) as b:
        assert list(a) == list(b)
        assert all((a[name].read() == b[name].read()).all() for name in a)
        return list(a)


def test_a_gpt_model_is_loaded_with_another_tp_and_pp(tmp_path: Path) -> None:
    run_ranks(_model, 2, tmp_path, timeout=150, imports=IMPORTS)
    names = _same_tensors(tmp_path / "first", tmp_path / "0")
    assert names == _same_tensors(tmp_path / "first", tmp_path / "1")
    assert {"embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc1.weight"} <= set(names)


def _trained(tp: int, pp: int, seed: int, steps: int) -> tuple[Any, Any]:
    """Return a model and its distributed optimizer after some steps."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = _gpt(tp, pp, seed)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    parallel = DistributedDataParallel(model.config, config, model)
    options = OptimizerConfig(optimizer="adam", lr=0.01, min_lr=0.001, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(options, [parallel])
    for _ in range(steps):
        parallel.zero_grad_buffer()
        for number, parameter in enumerate(model.parameters()):
            parameter.main_grad.copy_(torch.full_like(parameter, 0.01 * (number + seed)))
        parallel.finish_grad_sync()
        optimizer.step()
    return model, optimizer


def _moments(optimizer: Any) -> list[Any]:
    inner = [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]
    states = [each.state.get(p, {}) for each in inner for group in each.param_groups for p in group["params"]]
    return [state[key].tolist() for state in states for key in ("exp_avg", "exp_avg_sq") if key in state]


def _load(model: Any, optimizer: Any, loaded: dict[str, Any]) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        """Torch's AdamW has a step in each state; the Adam of Apex and its like, for which this is, have none there."""
        put(self, parameter, {"step": torch.zeros(())} | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    with torch.no_grad():  # parameters in float32 are their own main parameters
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    DistributedOptimizer._set_main_param_and_optimizer_states = put


def _optimizer(rank: int, world_size: int, root: Path, form: str) -> None:
    with _without_cuda():
        from megatron.core import dist_checkpointing as core

        from ckpt.integrations.megatron import CkptLoadStrategy, CkptSaveStrategy

        def sharded(model: Any, optimizer: Any, is_loading: bool = False) -> dict[str, Any]:
            metadata = {"distrib_optim_sharding_type": form, "distrib_optim_fully_reshardable_mem_efficient": False}
            of_model = model.sharded_state_dict(metadata=metadata)
            of_optimizer = optimizer.sharded_state_dict(of_model, is_loading=is_loading, metadata=metadata)
            return {"model": of_model, "optimizer": of_optimizer}

        model, optimizer = _trained(1, 1, seed=1, steps=2)
        folder = _folder(root / "iter_0000002")
        with CkptSaveStrategy(timeout=60) as strategy:
            core.save(sharded(model, optimizer), folder, strategy)
            wanted = _moments(optimizer)
            assert wanted
            model, optimizer = _trained(1, 1, seed=2, steps=1)
            loaded = core.load(sharded(model, optimizer, is_loading=True), folder, CkptLoadStrategy())
            _load(model, optimizer, loaded)
            assert _moments(optimizer) == wanted
            if form == "fully_reshardable":  # the only one for another TP
                model, optimizer = _trained(2, 1, seed=2, steps=1)
                loaded = core.load(sharded(model, optimizer, is_loading=True), folder, CkptLoadStrategy())
                _load(model, optimizer, loaded)
                core.save(sharded(model, optimizer), _folder(root / "again"), strategy)


@pytest.mark.parametrize("form", FORMATS)
def test_the_distributed_optimizer(tmp_path: Path, form: str) -> None:
    run_ranks(_optimizer, 2, tmp_path, form, timeout=150, imports=IMPORTS)
    if form == "fully_reshardable":
        names = _same_tensors(tmp_path / "iter_0000002", tmp_path / "again")
        assert "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight" in names
