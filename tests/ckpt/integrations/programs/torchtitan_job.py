"""A job of torchtitan's parts, without its trainer: a small FSDP2 model, its containers, data loader and manager."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from ckpt.integrations.torchtitan import CheckpointManager

WIDTH = 8


class Numbers(IterableDataset[torch.Tensor]):
    """Vectors that differ by rank and position."""

    def __init__(self, rank: int) -> None:
        self.rank, self.next = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.next += 1
            yield torch.sin(torch.arange(WIDTH) * (self.next + 100.0 * self.rank))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "buffers": {"tokens": [self.rank] * (self.next % 3)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


class OwnLoader(BaseDataLoader):
    """A data loader that is not of torchtitan's class."""

    def __init__(self, rank: int) -> None:
        self.numbers = Numbers(rank)

    def __iter__(self) -> Any:
        return (vector[None] for vector in iter(self.numbers))

    def state_dict(self) -> dict[str, Any]:
        return self.numbers.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.numbers.load_state_dict(state_dict)


class PicklingLoader(ParallelAwareDataloader):
    """A data loader that adds to the pickle of torchtitan's class."""

    def __init__(self, rank: int) -> None:
        super().__init__(Numbers(rank), rank, 2)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


class HfNames(StateDictAdapter):
    """The names that the model has on the Hub."""

    def __init__(self, assets: str | None = None) -> None:
        super().__init__(None, assets)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"hub.{name}": tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hub."): tensor for name, tensor in hf_state_dict.items()}


class KilledAt:
    """A part of the state that kills this process while a step is being saved."""

    def __init__(self, job: Job, step: int) -> None:
        self.job, self.step = job, step

    def state_dict(self) -> dict[str, Any]:
        if self.job.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"any": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Job:
    """What torchtitan's trainer does with its checkpoint manager. `options` are those of the configuration."""

    def __init__(
        self,
        folder: str,
        *,
        seed: int = 1,
        lr: float = 0.01,
        dp: tuple[int, int] | None = None,
        loader: BaseDataLoader | None = None,
        adapter: StateDictAdapter | None = None,
        killed_at: int | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world_size,))
        self.model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
        fully_shard(self.model, mesh=mesh)
        self.optimizers = default_adamw(lr=lr).build(model_parts=[self.model])
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=40
        )
        dp_rank, dp_degree = dp or (rank, world_size)
        if loader is None:
            loader = ParallelAwareDataloader(Numbers(dp_rank), dp_rank, dp_degree, batch_size=2)
        self.loader = loader
        self.step = 0
        states = {"train_state": self}
        if killed_at is not None:
            states["killed_at"] = KilledAt(self, killed_at)
        self.manager = CheckpointManager.Config(**{"enable": True, "interval": 1, **options}).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states=states,
            sd_adapter=adapter,
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def train(self, steps: int, *, ends: bool = False) -> list[int]:
        """Train up to step `steps`, and return the steps that were saved."""
        batches = iter(self.loader)
        saved = []
        while self.step < steps:
            self.step += 1
            self.optimizers.zero_grad()
            batch = next(batches)
            (self.model(batch) - batch).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            if self.manager.save(self.step, last_step=ends and self.step == steps):
                saved.append(self.step)
        return saved

    def steps(self) -> list[int]:
        """Finalize, and return the published steps."""
        self.manager.maybe_wait_for_saving()
        dist.barrier()
        return self.manager._checkpointer.all_steps()

    def weights(self) -> list[float]:
        """Return all weights. Collective."""
        return [x for p in self.model.parameters() for x in p.full_tensor().flatten().tolist()]

    def content(self) -> dict[str, Any]:
        """Return all that training depends on. Collective."""
        return {
            "model": self.weights(),
            "optimizer": [
                value.full_tensor().tolist() if hasattr(value, "full_tensor") else float(value)
                for value in self.optimizers.state_dict().values()
                if isinstance(value, torch.Tensor)
            ],
            "lr_scheduler": [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups],
            "dataloader": self.loader.dataset.state_dict() if isinstance(self.loader, ParallelAwareDataloader) else {},
            "train_state": self.step,
        }
