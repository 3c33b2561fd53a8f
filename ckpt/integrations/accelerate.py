"""Checkpoints for programs that use accelerate: `Checkpoints`, in place of `Accelerator.save_state` and `load_state`.

    accelerator.prepare(...)                             ckpt.Checkpointer
    models, optimizers, schedulers, data loaders, ──▶    one state: "model", "optimizer", "scheduler", ...,
    registered objects, scaler, step                     the random number generators of each rank

The names are those of the files that accelerate writes: the second model is "model_1". Nothing is pickled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from ckpt import Checkpointer, PerRank, RngState

try:
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "ckpt.integrations.accelerate needs accelerate 1.15 or newer: pip install 'ckpt-inprocess[accelerate]'"
    ) from error

__all__ = ["Checkpoints", "check_backend", "model_state"]

_TENSOR = "tensor of a data loader"


class Checkpoints:
    """Saves and restores all that an `Accelerator` has prepared, in the background, whole or absent.

    `root` is a directory, of which as many checkpoints are kept as the project configuration says (`total_limit`); or a
    `ckpt.Checkpointer`, with options of its own, which `close` leaves open. Every process makes one, after
    `accelerator.prepare`, and calls the same methods in the same order, in the thread that trains.

    Of a PEFT model only the adapters are saved, and whatever else is trained. ValueError for DeepSpeed, Megatron-LM,
    XLA and the first version of FSDP, which keep the state in forms of their own.
    """

    def __init__(self, accelerator: Any, root: str | os.PathLike[str] | Checkpointer) -> None:
        check_backend(accelerator)
        self._accelerator = accelerator
        self._owned = not isinstance(root, Checkpointer)
        if isinstance(root, Checkpointer):
            self._checkpointer = root
        else:
            limit = accelerator.project_configuration.total_limit
            self._checkpointer = Checkpointer(root, keep=limit)

    @property
    def checkpointer(self) -> Checkpointer:
        """What saves and restores; for instance `all_steps()` and `resume_step`."""
        return self._checkpointer

    def save_state(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> None:
        """Copy the state and return; it is written in the background, and published by all processes or by none.

        `metrics` are recorded with the step. Call it between optimizer steps: ValueError while gradients are being
        accumulated, since gradients are no part of a checkpoint; and if hooks are registered with
        `register_save_state_pre_hook`, which are for accelerate's own files. Raises what `Checkpointer.save_request`
        raises; `maybe_finalize` raises the errors of the background.
        """
        if not self._accelerator.sync_gradients:
            raise ValueError(
                f"step {step}: save_state was called while gradients are being accumulated, and a checkpoint does not "
                "hold them: call it after an optimizer step, if accelerator.sync_gradients is true"
            )
        self._checkpointer.async_save(self._state(), step, metrics=metrics)

    def maybe_finalize(self, blocking: bool = False) -> list[int]:
        """Return the steps published since the last call; with `blocking` wait for all. Call it in each iteration.

        No collective. Raises the `CheckpointError` of a save that failed, on every process; training can go on.
        """
        return self._checkpointer.maybe_finalize(blocking)

    def load_state(self, step: int | None = None) -> int | None:
        """Restore the newest published step, or `step`, in place, and return it; None if there is none.

        Collective. Any number of processes may have saved it. Raises what `Checkpointer.restore` raises.
        """
        return self._checkpointer.restore(self._state(), step)

    def close(self) -> None:
        """Wait for the saves, and raise the first failure. Before the process group is destroyed. Idempotent."""
        if self._owned:
            self._checkpointer.close()
        else:
            self._checkpointer.maybe_finalize(blocking=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, without waiting: the writers finish what was scheduled by themselves."""
        if error is None:
            self.close()
        elif self._owned:
            self._checkpointer.__exit__(kind, error, trace)

    def _state(self) -> dict[str, Any]:
        accelerator = self._accelerator
        if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
            raise ValueError(
                "hooks of register_save_state_pre_hook and register_load_state_pre_hook are not called, since no files "
                "of accelerate are written: remove them, and put what they save into an object for "
                "accelerator.register_for_checkpointing"
            )
        models = [accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
        state = {
            **_named("model", map(model_state, models)),
            **_named("optimizer", (getattr(one, "optimizer", one) for one in accelerator._optimizers)),
            **_named("scheduler", accelerator._schedulers),
            **_named("dataloader", (PerRank(_DataLoader(loader)) for loader in accelerator._dataloaders)),
            **_named("custom", accelerator._custom_objects),
            "accelerator": _Position(accelerator),
            "rng": RngState(),
        }
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        return state


def check_backend(accelerator: Any) -> None:
    """Raise ValueError for a backend that keeps the state in a form of its own."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise ValueError(
            "FSDP1 is not supported: use FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 in the "
            "configuration"
        )
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(
            f"{kind.value} is not supported, because it saves its state by itself: use DDP or FSDP2, or call "
            "accelerator.save_state"
        )


def model_state(model: torch.nn.Module) -> Any:
    """Return what to save of a model: the model; of a `peft.PeftModel` the tensors of adapters and those that train."""
    peft = sys.modules.get("peft")  # there is no PeftModel unless it is imported
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    tensors = model.state_dict(keep_vars=True)
    chosen: set[int] = set()
    for adapter in model.peft_config:  # those that do not train now, too
        # Without `save_embedding_layers` it would ask the hub for the size of the vocabulary.
        own = peft.get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False)
        chosen.update(map(id, own.values()))
    return {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and (tensor.requires_grad or id(tensor) in chosen)
    }


def _named(name: str, objects: Iterable[Any]) -> dict[str, Any]:
    return {name if number == 0 else f"{name}_{number}": item for number, item in enumerate(objects)}


class _Position:
    """The count of batches by which accelerate knows when to synchronize gradients."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]


class _DataLoader:
    """The epoch of a data loader, which decides the order; and its position, if it is a stateful one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        position = self._loader.state_dict() if getattr(self._loader, "use_stateful_dataloader", False) else None
        # In a list without tensors, it is one value: its structure need not be that of a loader that has just begun.
        return {"epoch": getattr(self._loader, "iteration", 0), "position": [_without_tensors(position)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = state_dict["epoch"]
        (position,) = state_dict["position"]
        if position is not None:
            self._loader.load_state_dict(_with_tensors(position))


def _without_tensors(node: Any) -> Any:
    """Return a copy of a tree with bytes in place of tensors, such as the states of generators."""
    if isinstance(node, torch.Tensor):
        dtype = str(node.dtype).removeprefix("torch.")
        data = node.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TENSOR: dtype, "shape": list(node.shape), "data": data}
    if isinstance(node, dict):
        return {key: _without_tensors(item) for key, item in node.items()}
    if type(node) in (list, tuple):
        return type(node)(map(_without_tensors, node))
    return node


def _with_tensors(node: Any) -> Any:
    """Return a copy of a tree with the tensors that `_without_tensors` has replaced."""
    if isinstance(node, dict):
        if _TENSOR in node:
            data = torch.tensor(list(node["data"]), dtype=torch.uint8)
            return data.view(getattr(torch, node[_TENSOR])).reshape(node["shape"])
        return {key: _with_tensors(item) for key, item in node.items()}
    if type(node) in (list, tuple):
        return type(node)(map(_with_tensors, node))
    return node
