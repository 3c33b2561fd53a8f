"""A Lightning job in the restart wrapper: one rank raises in the third epoch, and all continue from the last step.

lightning_restart.py STRATEGY FOLDER
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import inprocess
from ckpt.integrations.lightning import CkptIO
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from tests.ckpt.integrations.programs import lightning_jobs as jobs

FAULTY_EPOCH = 2


class Fault(Callback):
    """Tells each epoch; raises on rank 1 in the first call of the function."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            print(f"iteration {self.iteration}: epoch {trainer.current_epoch}", flush=True)
        if batch_idx == 1 and (self.iteration, trainer.current_epoch, trainer.global_rank) == (0, FAULTY_EPOCH, 1):
            raise RuntimeError("a fault on one rank")


def train(strategy: str, folder: Path, plugin: CkptIO, call: inprocess.CallWrapper | None = None) -> str:
    """Train to the end; return a hash of the weights."""
    assert call is not None
    weights = fit(strategy, folder, plugin, call.iteration)
    dist.destroy_process_group()
    return weights


def fit(strategy: str, folder: Path, plugin: CkptIO, iteration: int) -> str:
    checkpoint = ModelCheckpoint(dirpath=folder, save_last=True)
    world_size = int(os.environ["WORLD_SIZE"])
    trainer = jobs.make_trainer(strategy, world_size, checkpoint, Fault(iteration), plugin=plugin)
    model = jobs.make_model(strategy)
    trainer.fit(model, jobs.data(world_size), jobs.data(world_size), ckpt_path="last")
    return jobs.digest(model)


def main() -> None:
    warnings.simplefilter("ignore")
    plugin = CkptIO()
    wrapper = inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(plugin), inprocess.abort.AbortTorchDistributed()),
        finalize=CheckpointFinalize(plugin),
        soft_timeout=timedelta(seconds=60),
    )
    weights = wrapper(train)(sys.argv[1], Path(sys.argv[2]), plugin)
    print(f"weights {weights}", flush=True)


if __name__ == "__main__":
    main()
