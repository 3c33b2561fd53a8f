"""A Lightning training whose checkpoints are saved in the background. Started again, it continues from the last one.

    python examples/with_lightning.py FOLDER EPOCHS
    torchrun --standalone --nproc-per-node 2 examples/with_lightning.py FOLDER EPOCHS

What is of ckpt is the plugin; the rest is as without it.
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ckpt.integrations.lightning import CkptIO, load_from_checkpoint


class Model(lightning.LightningModule):  # type: ignore[misc]
    """A small regression."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Log the loss, which ModelCheckpoint monitors."""
        self.log("val_loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(folder: str, epochs: int) -> None:
    lightning.seed_everything(0)
    inputs = torch.randn(256, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=16)

    best = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        max_epochs=epochs,
        plugins=[CkptIO()],
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), data, data, ckpt_path="last")  # the newest complete checkpoint, if there is one

    if trainer.is_global_zero:
        model = load_from_checkpoint(Model, best.best_model_path)
        print(f"trained {trainer.current_epoch} epochs; best: {os.path.basename(best.best_model_path)}, {model.device}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
