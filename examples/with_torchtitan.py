"""Train torchtitan's debug model, a small Llama, with checkpoints by ckpt. The text is Python's standard library.

    torchrun --standalone --nproc-per-node 2 -m torchtitan.train \
        --module examples.with_torchtitan --config debugmodel --dump_folder /tmp/titan

Stop the run at any moment, in any way, and start the same command again: it continues from the newest published step,
with the same data. Options of torchtitan change the configuration: --training.steps 1000 --checkpoint.interval 100.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from ckpt.integrations.torchtitan import CheckpointManager


def debugmodel() -> Trainer.Config:
    """Return the configuration: that of torchtitan, with another checkpoint manager, and with bytes for tokens."""
    config = llama3_debugmodel()
    config.checkpoint = CheckpointManager.Config(enable=True, interval=10, keep_latest_k=3, last_save_model_only=False)
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = ByteLoader.Config()
    config.training.local_batch_size = 4
    config.training.seq_len = 256
    config.training.steps = 30
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a nightly build of PyTorch
    return config


class ByteTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Text as bytes: needs no files."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """No options."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Return the text."""
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Return the number of bytes."""
        return 256


class Texts(IterableDataset[Any]):
    """Sequences of the text, of which each data-parallel rank has its own. `state_dict` is the position."""

    def __init__(self, tokenizer: BaseTokenizer, seq_len: int, rank: int, ranks: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
        self._tokens = torch.tensor(tokenizer.encode("".join(file.read_text("utf-8") for file in files)))
        self._seq_len, self._rank, self._ranks = seq_len, rank, ranks
        self._next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        count = (len(self._tokens) - 1) // self._seq_len // self._ranks
        while True:
            begin = (self._rank * count + self._next % count) * self._seq_len
            self._next += 1
            tokens = self._tokens[begin : begin + self._seq_len + 1]
            yield {"input": tokens[:-1], "positions": torch.arange(self._seq_len)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        """Return the position in the text."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at that position."""
        self._next = state_dict["next"]


class ByteLoader(ParallelAwareDataloader):  # type: ignore[misc]
    """Batches of sequences."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """The options of each data loader of torchtitan."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        texts = Texts(tokenizer, seq_len, dp_rank, dp_world_size)
        super().__init__(
            texts,
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )
