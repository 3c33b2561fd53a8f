"""Lightning jobs of one or two ranks that end on their own, are killed in a save, or resume."""

from __future__ import annotations

import hashlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.integrations.lightning import CkptDDPStrategy, CkptIO, CkptModelParallelStrategy

EPOCHS = 4
BATCHES = 4


class Fuse:
    """A value of a checkpoint. The rank that encodes it dies, in the middle of staging."""


def _burn(fuse: Fuse) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


ckpt.register_encoder(Fuse, _burn, lambda text: Fuse())


class Model(lightning.LightningModule):
    """A small regression; with `sharded`, each layer is split over all ranks."""

    def __init__(self, width: int = 16, sharded: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.sharded = sharded
        self.hidden = torch.nn.Linear(8, width)
        self.head = torch.nn.Linear(width, 1)

    def configure_model(self) -> None:
        if self.sharded and not isinstance(self.hidden, FSDPModule):  # it is called for each fit and test
            for part in (self.hidden, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.hidden(inputs).relu())
        return output

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, targets = batch
        return (self(inputs) - targets).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        self.log("val_loss", (self(inputs) - targets).square().mean(), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.validation_step(batch, index)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)]


class Killer(Callback):
    """Kills one rank in the save at the end of an epoch, while it stages its share; or just after it has done so."""

    def __init__(self, rank: int, epoch: int, when: str) -> None:
        self.rank, self.epoch, self.when = rank, epoch, when

    def _is_due(self, trainer: Any) -> bool:
        return bool(trainer.global_rank == self.rank and trainer.current_epoch == self.epoch)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._is_due(trainer) and self.when == "staging":
            checkpoint["fuse"] = Fuse()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == self.epoch + 1 and self.when == "staged":
            os.kill(os.getpid(), signal.SIGKILL)


def data(world_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * BATCHES * world_size, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4)


def make_trainer(
    strategy: str, world_size: int, checkpoint: ModelCheckpoint, *more: Callback, plugin: CkptIO | None = None
) -> Any:
    strategies: dict[str, Any] = {
        "single": "auto",
        "ddp": "ddp",
        "all ranks": CkptDDPStrategy,
        "fsdp2": lambda: CkptModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1),
    }
    chosen = strategies[strategy]
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=chosen if isinstance(chosen, str) else chosen(),
        plugins=[plugin or CkptIO()],
        callbacks=[checkpoint, *more],
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_model(strategy: str) -> Model:
    lightning.seed_everything(0)
    return Model(sharded=strategy == "fsdp2")


def digest(module: torch.nn.Module) -> str:
    """Return a hash of all parameters, as a whole."""
    whole = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole.update(name.encode() + full.cpu().numpy().tobytes())
    return whole.hexdigest()


def train(
    rank: int, world_size: int, strategy: str, folder: Path, ckpt_path: str | None, kill: tuple[int, int, str] | None
) -> tuple[str, int]:
    """Train to the end; return a hash of the weights, and the number of epochs that this job has trained."""
    warnings.simplefilter("ignore")
    counted = _Count()
    checkpoint = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True)
    trainer = make_trainer(strategy, world_size, checkpoint, counted, *([Killer(*kill)] if kill else []))
    model = make_model(strategy)
    trainer.fit(model, data(world_size), data(world_size), ckpt_path=ckpt_path)
    weights = digest(model)
    if ckpt_path is None:
        tested = trainer.test(model, data(world_size), ckpt_path="best", verbose=False)
        assert checkpoint.best_model_score is not None
        assert tested[0]["val_loss"] == checkpoint.best_model_score.item()
    torch.distributed.destroy_process_group()
    return weights, counted.epochs


class _Count(Callback):
    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1
