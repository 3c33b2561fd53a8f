"""A tiny Llama, trained with accelerate and saved in the background.

    accelerate launch --cpu --num_processes 2 examples/with_accelerate.py runs/llama --epochs 3

Kill it at any moment, and start the same command again: it goes on with the batch after the newest checkpoint, and ends
with the same weights as without the fault.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt.integrations.accelerate import Checkpoints


class Progress:
    """Where the training is: how many batches of which epoch are done."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.batch = state_dict["epoch"], state_dict["batch"]


def tiny_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 32 numbers that count upwards from anywhere."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = (7 * number + torch.arange(32)) % 64
        return {"input_ids": row, "labels": row}


def train(root: str, epochs: int) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Counting(), batch_size=8, shuffle=True, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    with Checkpoints(accelerator, root) as checkpoints:
        step = checkpoints.load_state() or 0  # the newest published step; None if there is none
        for epoch in range(progress.epoch, epochs):
            batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
            batches.set_epoch(epoch)
            for batch in batches:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                progress.batch += 1
                if step % 10 == 0:
                    checkpoints.save_state(step)  # copies, and returns; writer processes do the rest
                checkpoints.maybe_finalize()  # if a save failed, every process gets the error here
            progress.epoch, progress.batch = epoch + 1, 0
        accelerator.print(f"trained to step {step}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description="a tiny Llama that learns to count")
    parser.add_argument("root", help="where the checkpoints go")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    train(options.root, options.epochs)


if __name__ == "__main__":
    main()
