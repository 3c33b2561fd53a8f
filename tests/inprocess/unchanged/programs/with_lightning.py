"""A Lightning `Trainer` with DDP. The number of devices is that of the ranks which are left."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset

from tests.inprocess.unchanged.programs.journal import begin, digest, note, run, strike


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        x, y = batch
        strike(batch_index + 1)
        return (self.layer(x) - y).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if batch_index == 0:
            note("first step", weights=digest(self.state_dict()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train() -> str:
    begin(rank_zero=rank_zero_only.rank)
    lightning.seed_everything(0)
    model = Model()
    inputs = torch.randn(48, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    note("ranks", rank=trainer.global_rank, world_size=trainer.world_size)
    return digest(model.state_dict())


if __name__ == "__main__":
    run(train)
