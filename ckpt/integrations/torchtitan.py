"""The checkpoint manager for torchtitan: its trainer saves and restores with `ckpt.Checkpointer`.

    Trainer.Config.checkpoint ─build()─▶ CheckpointManager ─▶ ckpt.Checkpointer(DUMP_FOLDER/FOLDER)
                                          load(step)   restore, or initial load
                                          save(step)   in each training step: finalize, then save if one is due
                                          close()      finalize what is pending

Runs in the trainer, in the thread that trains; `load` and the first `save` are collective.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from ckpt import Checkpointer, CheckpointNotFoundError, PerRank, StateMismatchError

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
    from torchtitan.components.checkpointer import CheckpointManager as DcpCheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.config.override import derive, override
    from torchtitan.observability import structured_logger
    from torchtitan.tools import filesystem
    from torchtitan.tools.logging import logger
except ImportError as error:
    raise ImportError(
        "ckpt.integrations.torchtitan needs torchtitan 0.3 or newer: pip install 'ckpt-inprocess[torchtitan]'"
    ) from error

__all__ = ["CheckpointManager", "use_ckpt"]


class CheckpointManager(BaseCheckpointManager):
    """Saves and restores a torchtitan job with `ckpt.Checkpointer`; made by ``Config.build()`` in the trainer.

    Each rank makes one, and calls the same methods in the same order. A save costs the training step a copy to shared
    memory; the newest `keep_latest_k` steps are kept. What a step holds: ``model``, ``optimizer``, ``lr_scheduler``,
    ``dataloader`` and ``train_state``; the last one of a run with `last_save_model_only`, and step 0, the model alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The options of every torchtitan checkpoint manager; `folder` is the root of the checkpoints.

        `initial_load_path` is a folder of steps of ckpt (the newest one is loaded), one of its steps, or with
        `initial_load_in_hf` a directory with safetensors. ValueError for `last_save_in_hf`.
        """

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.last_save_in_hf:
                raise ValueError(
                    "checkpoint.last_save_in_hf is not supported by ckpt: the last save is a step like the others. "
                    "Set it to False, and write safetensors afterwards: inspect_ckpt export ROOT DIRECTORY "
                    "--to safetensors"
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Start and write nothing yet. The arguments are those that torchtitan's trainer passes."""
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        self._config = config
        self._sd_adapter = sd_adapter
        self.states = {
            **states,
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            LR_SCHEDULER: lr_schedulers,
        }
        if dataloader is not None:
            self.states[DATALOADER] = _Position(dataloader)
        self._checkpointer = Checkpointer(
            filesystem.join(base_folder, config.folder),
            keep=config.keep_latest_k or None,
            read_only=config.load_only,
        )
        logger.info(f"Checkpoints are loaded from and saved to {self._checkpointer.root}, by ckpt.")

    def _load(self, step: int = -1) -> bool:
        """Restore `step`, the newest step for -1, or what the options for an initial load name.

        Returns False if there is nothing to load. Collective. Raises what `Checkpointer.restore` raises.
        """
        with structured_logger.log_trace_span("checkpoint_load"):
            try:
                found = self._restore(self._checkpointer, None if step == -1 else step, model_only=step == 0)
            except CheckpointNotFoundError as error:
                if step == -1:
                    raise
                raise CheckpointNotFoundError(f"--checkpoint.load_step={step} not found: {error}", step=step) from error
            if found is not None:
                logger.info(f"Loaded step {found} from {self._checkpointer.root}.")
                return True
            return self._load_initial()

    def _restore(self, checkpointer: Checkpointer, step: int | None, model_only: bool) -> int | None:
        """Restore all states but the excluded ones, or the model alone. Step 0 has only that.

        What the checkpoint has besides is ignored. No state is touched if there is no step.
        """
        unknown = sorted(set(self._config.exclude_from_loading) - self.states.keys())
        if unknown:
            raise ValueError(
                f"checkpoint.exclude_from_loading names {', '.join(unknown)}; the states are {', '.join(self.states)}"
            )
        model = {MODEL: self.states[MODEL]}
        if model_only:
            return checkpointer.restore(model, step, only=list(model))
        wanted = {key: state for key, state in self.states.items() if key not in self._config.exclude_from_loading}
        optimizers = self.states[OPTIMIZER]
        each = optimizers if isinstance(optimizers, Iterable) else ()  # a container of one's own may have no members
        new = [optimizer for optimizer in each if not optimizer.state]
        try:
            return checkpointer.restore(wanted, step, only=list(wanted))
        except StateMismatchError as error:
            if error.step != 0:
                error.add_note(
                    "If the step holds the model alone (checkpoint.last_save_model_only), load an earlier one "
                    "(checkpoint.load_step), or take its model for a new run (checkpoint.initial_load_path). "
                    "checkpoint.exclude_from_loading leaves states out: dataloader if the data-parallel degree has "
                    "changed."
                )
                raise
        for optimizer in new:  # their `state_dict` has made state, and counted a step that was none
            optimizer.state.clear()
        return checkpointer.restore(model, 0, only=list(model))

    def _load_initial(self) -> bool:
        config = self._config
        path = config.initial_load_path
        if config.initial_load_in_hf:
            self._load_hf(path or getattr(self._sd_adapter, "hf_assets_path", None))
            return True
        if path is None:
            logger.info("There is no checkpoint: training starts anew.")
            return False
        root, step = _root_and_step(path)
        with Checkpointer(root, read_only=True) as source:
            found = self._restore(source, step, config.initial_load_model_only)
        if found is None:
            raise CheckpointNotFoundError(
                f"checkpoint.initial_load_path is {path}, which is neither a folder of steps of ckpt nor one of its "
                "steps. For safetensors set checkpoint.initial_load_in_hf; inspect_ckpt convert makes steps of "
                "checkpoints in other formats"
            )
        logger.info(f"Loaded step {found} from {root}.")
        return True

    def _load_hf(self, path: str | None) -> None:
        """Load the model from safetensors, with the names and the reader of torchtitan's adapter. Collective."""
        if self._sd_adapter is None or path is None or not os.path.isdir(path):
            raise ValueError(
                f"checkpoint.initial_load_in_hf needs a directory with safetensors, not {path}, in "
                "checkpoint.initial_load_path or hf_assets_path, and a model with a state dict adapter "
                f"(this model has {'none' if self._sd_adapter is None else 'one'})"
            )
        model = self.states[MODEL]
        tensors = self._sd_adapter.to_hf(model.state_dict())
        reader = self._sd_adapter.get_hf_storage_reader(path, self._config.initial_load_in_hf_quantized)
        load_distributed(tensors, storage_reader=reader)
        model.load_state_dict(self._sd_adapter.from_hf(tensors))
        logger.info(f"Loaded the model from safetensors in {path}.")

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Finalize earlier saves, then save if one is due, and return whether it was. For each step.

        Returns when the state is staged; in the last step, when it is published. Raises the `CheckpointError` of an
        earlier save that failed, on every rank, and what `Checkpointer.async_save` raises.
        """
        self._finalize()
        config = self._config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_first or last_step or curr_step % config.interval == 0):
            return False
        structured_logger.add_step_tag("checkpoint_save")
        with structured_logger.log_trace_span("checkpoint_save"):
            model_only = curr_step == 0 or (last_step and config.last_save_model_only)
            self._checkpointer.async_save(self._exported() if model_only else self.states, curr_step)
            self.save_future = self.save_future or Future()
            if last_step:
                self._finalize(blocking=True)
        return True

    def _exported(self) -> dict[str, Any]:
        """Return the model alone, in the dtype for export."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        with torch.no_grad():
            return {
                MODEL: {
                    name: item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item
                    for name, item in self.states[MODEL].state_dict().items()
                }
            }

    def _finalize(self, blocking: bool = False) -> None:
        for step in self._checkpointer.maybe_finalize(blocking):
            logger.info(f"Published step {step} in {self._checkpointer.root}.")
        if self.save_future is not None and not self._checkpointer.queue.get_num_unfinalized_calls():
            self.save_future.set_result(None)
            self.save_future = None

    def _wait_for_saving(self) -> None:
        """Wait until all saves are published. Raises the first `CheckpointError` of one that failed."""
        self._finalize(blocking=True)

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: `save` returns when the state is staged."""

    def _close(self) -> None:
        """Finalize what is pending and end the writers; while an exception is handled, without waiting for them."""
        self._checkpointer.__exit__(*sys.exc_info())


@override(target=DcpCheckpointManager.Config, exact=True, description="checkpoints by ckpt")
def use_ckpt(config: Any) -> CheckpointManager.Config:
    """Replace torchtitan's own checkpoint manager: ``--override.imports ckpt.integrations.torchtitan.use_ckpt``.

    The options that both have keep their values; `async_mode` has no meaning here.
    """
    replaced: CheckpointManager.Config = derive(config, CheckpointManager.Config)
    return replaced


class _Position:
    """The state of a data loader as a part of a step: one value, under its data-parallel rank if it has one.

    A `ParallelAwareDataloader` pickles its state for DCP. Here its content is stored, without pickle.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._is_parallel = isinstance(dataloader, ParallelAwareDataloader)
        if self._is_parallel:
            kind = type(dataloader)
            for method in ("state_dict", "load_state_dict"):
                if getattr(kind, method) is not getattr(ParallelAwareDataloader, method):
                    raise TypeError(
                        f"{kind.__name__} overrides {method} of ParallelAwareDataloader, whose state is a pickle: let "
                        "its dataset have the state, or derive it from BaseDataLoader"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Return the state in a list: a restore takes that as one value, whatever it looks like."""
        if not self._is_parallel:
            return {"rank": PerRank([self._dataloader.state_dict()])}
        state = StatefulDataLoader.state_dict(self._dataloader)
        return {
            f"dp_rank_{self._dataloader.dp_rank}": [state],
            "world_size": self._dataloader.dp_world_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. ValueError if it was of another data-parallel degree."""
        if not self._is_parallel:
            self._dataloader.load_state_dict(state_dict["rank"].value[0])
            return
        degree = self._dataloader.dp_world_size
        if state_dict["world_size"] != degree:
            raise ValueError(
                f"the data-parallel degree was {state_dict['world_size']} and is {degree}: the position in the data "
                "cannot be restored; leave it out with checkpoint.exclude_from_loading"
            )
        state = state_dict[f"dp_rank_{self._dataloader.dp_rank}"][0]
        StatefulDataLoader.load_state_dict(self._dataloader, state)


def _root_and_step(path: str) -> tuple[str, int | None]:
    """Return the root and step of the directory of a step; any other path is a root."""
    parent, name = os.path.split(path.rstrip("/"))
    step = re.fullmatch(r"step_(\d{8,18})", name)
    return (path, None) if step is None else (parent, int(step[1]))
