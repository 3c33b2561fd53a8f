"""A Lightning `Trainer` to which each process is a node of its own, so that any of them can be lost."""

from __future__ import annotations

import os

import lightning
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader, TensorDataset

from tests.inprocess.unchanged.programs.journal import begin, digest, note, run
from tests.inprocess.unchanged.programs.with_lightning import Model


class OneDeviceEach(TorchElasticEnvironment):
    """The numbers that the wrapper sets, and one device for each process."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()


def train() -> str:
    begin()
    lightning.seed_everything(0)
    model = Model()
    inputs = torch.randn(48, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        plugins=[OneDeviceEach()],
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
