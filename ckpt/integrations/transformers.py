"""Checkpoints for the Trainer of Hugging Face transformers: `CkptTrainer`, in place of `Trainer`.

Trainer                             here
_save_checkpoint()                  one state (model, optimizer, scheduler, scaler, random number generators, and
                                    the TrainerState as JSON) is copied, and written in the background
each step end, and the end          saves that are done are finalized; at the end all are waited for
train(resume_from_checkpoint=...)   the TrainerState of the step is written to a temporary folder, from where
                                    Trainer reads it; when Trainer has prepared model and optimizer, all else is
                                    restored into them at once; the generators are set when Trainer asks for them
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ckpt
from ckpt import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointError,
    CheckpointNotFoundError,
    RngState,
    StateMismatchError,
    StorageError,
)

try:
    import transformers
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState
    from transformers.utils import logging

    _is_recent = int(transformers.__version__.split(".")[0]) >= 5
except ImportError:
    _is_recent = False
if not _is_recent:
    raise ImportError(
        "ckpt.integrations.transformers needs transformers 5.23 or newer: pip install 'ckpt-inprocess[transformers]'"
    )

from ckpt.integrations.accelerate import check_backend, model_state

__all__ = ["CkptTrainer"]

_log = logging.get_logger("ckpt")
_STATE_FILE = "trainer_state.json"  # where Trainer looks for its state


class CkptTrainer(Trainer):
    """A Trainer that saves in the background, whole or absent, and resumes from that.

    Takes the arguments of `Trainer`. It can also be the first base of a class with another trainer as the second:
    ``class MyTrainer(CkptTrainer, SFTTrainer)``. What `TrainingArguments` say about saving holds: `save_strategy`,
    `save_steps`, `save_total_limit`, `save_only_model`, `load_best_model_at_end`. Checkpoints are steps of the root
    ``<output_dir>/checkpoints``, or of `checkpointer`, which stays open, and has `keep` in place of
    `save_total_limit`.

    Of a PEFT model only the adapters are saved, and whatever else is trained. A save that fails is an error on every
    rank, at the end of a later step; see `on_save_error`. `train` raises ValueError for what is not supported.
    """

    def __init__(self, *args: Any, checkpointer: Checkpointer | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given_checkpointer = checkpointer
        self._checkpointer: Checkpointer | None = checkpointer
        self._resume: _Resume | None = None
        self._rng = _KeptRng()
        self._last_saved: int | None = None
        self.add_callback(_Finalize(self))

    @property
    def checkpoint_root(self) -> str:
        """The absolute path of the checkpoint root, for `ckpt.open` and inspect_ckpt."""
        if self._given_checkpointer is not None:
            return self._given_checkpointer.root
        return os.path.abspath(os.path.join(self.args.output_dir, "checkpoints"))

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as `Trainer.train` does.

        `resume_from_checkpoint` is True for the newest step, a number or the path of a step for that one, and "auto"
        for the newest step if there is any. Anything else goes to Trainer, such as a checkpoint that it has written.
        """
        self._check_supported(trial)
        with self._opened() as checkpointer:
            step, foreign = self._step_to_resume(checkpointer, resume_from_checkpoint)
            newest = resume_from_checkpoint is True or resume_from_checkpoint == "auto"
            while step is not None:
                try:
                    with self._resuming(step, newest) as folder:
                        return super().train(folder, trial, *args, **kwargs)
                except _OtherStepRestored as other:  # the newest step is damaged: Trainer needs the state of that one
                    step = other.step
            return super().train(foreign, trial, *args, **kwargs)

    def on_save_error(self, error: CheckpointError) -> None:
        """Raise the error of a save that failed in the background. Override it to let the training go on."""
        raise error

    # -- saving --------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        assert self._checkpointer is not None
        step = self.state.global_step
        if step == self._last_saved:  # at the end of a step, and again at the end of its epoch
            return
        self.store_flos()
        if self.state.best_global_step:
            self.state.best_model_checkpoint = self._step_path(self.state.best_global_step)
        callbacks = [*self.callback_handler.callbacks, self.control]
        exported = TrainerState(stateful_callbacks=[item for item in callbacks if isinstance(item, ExportableState)])
        self.state.stateful_callbacks = exported.stateful_callbacks
        self._checkpointer.async_save(self._state_at(json.dumps(dataclasses.asdict(self.state))), step)
        self._last_saved = step

    def _state_at(self, trainer_state: str) -> dict[str, Any]:
        model = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
        state: dict[str, Any] = {"model": model_state(model)}
        if self.is_world_process_zero():  # those of other ranks differ: they have other run times in their logs
            state["trainer_state"] = trainer_state
        if self.args.save_only_model:
            return state
        state["optimizer"] = getattr(self.optimizer, "optimizer", self.optimizer)
        state["scheduler"] = self.lr_scheduler
        state["rng"] = self._rng
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        return state

    def _finalize_saves(self, blocking: bool = False) -> None:
        assert self._checkpointer is not None
        while True:
            try:
                self._checkpointer.maybe_finalize(blocking)
                break
            except CheckpointError as error:
                self.on_save_error(error)
                if not blocking:
                    break
        if self.is_world_process_zero() and self._protects_best:
            self._remove_old_steps()

    @property
    def _protects_best(self) -> bool:
        """Whether the best step is kept beside the newest ones, which `keep` cannot do."""
        return self.args.metric_for_best_model is not None and (self.args.save_total_limit or 0) > 0

    def _remove_old_steps(self) -> None:
        assert self._checkpointer is not None
        steps = self._checkpointer.all_steps()
        best = self.state.best_global_step or 0
        if not steps or best > steps[-1]:  # it is still being written: the best one before it may be needed
            return
        kept = {steps[-1]} | ({best} & set(steps))
        surplus = len(steps) - max(self.args.save_total_limit, len(kept))
        for step in [step for step in steps if step not in kept][: max(surplus, 0)]:
            try:
                self._checkpointer.delete(step)
            except StorageError as error:  # it is being read; it goes next time
                _log.info("%s", error)

    # -- resuming ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Checkpointer]:
        given = self._given_checkpointer
        if given is not None:
            yield given
            return
        limit = 0 if self._protects_best else self.args.save_total_limit or 0
        with Checkpointer(self.checkpoint_root, keep=limit if limit > 0 else None) as checkpointer:
            self._checkpointer = checkpointer
            yield checkpointer

    def _step_to_resume(self, checkpointer: Checkpointer, resume: Any) -> tuple[int | None, Any]:
        """Return the step to resume from, or what Trainer resumes from by itself. Collective."""
        steps = checkpointer.recover()
        self._last_saved = None
        if resume is True or resume == "auto":
            if resume is True and not steps:
                raise ValueError(
                    f"{checkpointer.root} has no published step to resume from: train(resume_from_checkpoint='auto') "
                    "begins anew then"
                )
            return next(filter(self._is_readable, reversed(steps)), steps[-1] if steps else None), None
        if isinstance(resume, int) and resume is not False:
            return resume, None
        if isinstance(resume, (str, os.PathLike)):
            path = os.fspath(resume)
            folder, name = os.path.split(path.rstrip("/") if "://" in path else os.path.abspath(path))
            if (found := re.fullmatch(r"step_(\d+)", name)) is not None and folder == checkpointer.root:
                return int(found[1]), None
        if steps and self.args.save_strategy != "no":
            raise ValueError(
                f"{checkpointer.root} has published steps already, the newest is {steps[-1]}: continue with "
                "train(resume_from_checkpoint=True), or give this training another output_dir"
            )
        return None, resume

    def _is_readable(self, step: int) -> bool:
        """Whether the metadata of a step are whole; a restore of the newest step skips those that are not."""
        try:
            ckpt.open(self.checkpoint_root, step).close()
        except CheckpointCorruptError as error:
            _log.warning("step %d cannot be resumed from, trying the step before: %s", step, error)
            return False
        return True

    @contextlib.contextmanager
    def _resuming(self, step: int, newest: bool) -> Iterator[str]:
        """Write the TrainerState of a step to a folder for Trainer; until the end, what it loads is restored."""
        with tempfile.TemporaryDirectory(prefix="ckpt_trainer_") as folder:
            with ckpt.open(self.checkpoint_root, step) as checkpoint:
                trainer_state = checkpoint.values_by_name.get("trainer_state")
            if not isinstance(trainer_state, str):
                raise StateMismatchError(
                    f"step {step} of {self.checkpoint_root} has no 'trainer_state': it was not saved by CkptTrainer",
                    step=step,
                )
            with open(os.path.join(folder, _STATE_FILE), "w", encoding="utf-8") as file:
                file.write(trainer_state)
            self._resume = _Resume(step, newest)
            try:
                yield folder
            finally:
                self._resume = None

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        if self._resume is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Restore everything: Trainer calls this when it has prepared the model, the optimizer and the scheduler."""
        if self._resume is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self._checkpointer is not None
        expected = self._resume.step
        state = self._state_at("")  # of which the trainer_state was read before
        restored = self._checkpointer.restore(state, None if self._resume.newest else expected)
        if restored is None:
            raise CheckpointNotFoundError(f"step {expected} of {self.checkpoint_root} was removed", step=expected)
        if restored != expected:
            raise _OtherStepRestored(restored)
        self._last_saved = restored

    def _load_scaler(self, checkpoint: Any) -> None:
        if self._resume is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self._resume is None:
            super()._load_rng_state(checkpoint)
        else:
            self._rng.set()

    def _load_best_model(self) -> None:
        """Restore the best step, with its optimizer and scheduler. All ranks call it, at the end of the training."""
        self._finalize_saves(blocking=True)
        step = self.state.best_global_step
        _log.info("Restoring the best step %s of %s (score: %s).", step, self.checkpoint_root, self.state.best_metric)
        # Another one, and only to read: the steps after the best one stay on the branch.
        with Checkpointer(self.checkpoint_root, read_only=True) as reader:
            try:
                state = self._state_at("")
                reader.restore(state, step)
            except CheckpointNotFoundError as error:
                _log.warning("The best model was not loaded: %s", error)

    def _step_path(self, step: int) -> str:
        return os.path.join(self.checkpoint_root, f"step_{step:08d}")

    def _check_supported(self, trial: Any) -> None:
        args = self.args
        check_backend(self.accelerator)
        if trial is not None:
            raise ValueError("hyperparameter_search is not supported: use Trainer for it")
        if args.auto_find_batch_size:
            raise ValueError("auto_find_batch_size is not supported: it begins anew after checkpoints were saved")
        if args.enable_jit_checkpoint:
            raise ValueError("enable_jit_checkpoint is not supported: save often instead, a save costs little")
        if args.push_to_hub and args.hub_strategy != "end":
            raise ValueError(
                f"hub_strategy={str(args.hub_strategy)!r} is not supported, because there are no files to push during "
                "the training: set hub_strategy='end'"
            )
        if self._given_checkpointer is not None and args.save_total_limit:
            raise ValueError("give keep to the checkpointer, and no save_total_limit to the arguments")


class _Finalize(TrainerCallback):
    """Finalizes saves at the end of each step, and waits for all at the end of the training."""

    def __init__(self, trainer: CkptTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._finalize_saves()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._finalize_saves(blocking=True)


class _KeptRng(RngState):
    """The random number generators, set only when `set` is called after a restore: Trainer skips batches before."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Any] | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict

    def set(self) -> None:
        """Set the generators to what was restored last, if anything was."""
        if self._kept is not None:
            super().load_state_dict(self._kept)


@dataclass(frozen=True)
class _Resume:
    """The step that Trainer resumes from; `newest` if an older one may take its place when it is damaged."""

    step: int
    newest: bool


class _OtherStepRestored(Exception):
    """Another step was restored, on all ranks, than the one whose TrainerState Trainer has read."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step
