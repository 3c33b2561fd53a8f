"""Trains a tiny Llama with accelerate; see `jobs`. The arguments of a job are ROOT, LOG, and words.

Appends a line to LOG.<rank> for each step and one at the end. Words: `kill:N` ends the process at the end of step N,
before a save; `kill-saving:N` just after the save of step N has begun; `fsdp`, `lora`, `stateful` and `accumulate` say
how it trains; `steps:N` how long.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin, set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.integrations.accelerate import Checkpoints
from tests.ckpt.integrations.programs.jobs import await_save_before_strike, run_jobs, strike

SAVE_EVERY = 3


class Progress:
    """A registered object: the epoch, and the batches of this process that it has trained on since it began."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.batches = state_dict["epoch"], state_dict["batches"]


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def tokens(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def digest(model: torch.nn.Module) -> str:
    parts = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        parts.update(name.encode())
        parts.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return parts.hexdigest()


def write_line(file: Path, **line: Any) -> None:
    with file.open("a") as log:
        print(json.dumps(line), file=log)


def make_accelerator(words: tuple[str, ...]) -> Accelerator:
    loading = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader="stateful" in words)
    accelerator = Accelerator(
        cpu=True, dataloader_config=loading, gradient_accumulation_steps=2 if "accumulate" in words else 1
    )
    if "fsdp" in words:  # accelerate itself chooses FSDP on accelerators only, but all of it runs on CPUs
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def main(root: str, log: str, *words: str) -> None:
    numbers = dict(word.split(":") for word in words if ":" in word)
    accelerator = make_accelerator(words)
    set_seed(7)
    model = tiny_llama()
    if "lora" in words:
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    # With a generator of its own, a loader that is made again in the middle of an epoch takes no random numbers.
    loader = DataLoader(tokens(40), batch_size=4, shuffle=True, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    tell = functools.partial(write_line, Path(f"{log}.{accelerator.process_index}"))
    model.train()
    with ckpt.Checkpointer(root, keep=2) as checkpointer, Checkpoints(accelerator, checkpointer) as checkpoints:
        step = checkpoints.load_state() or 0
        last = int(numbers.get("steps", 12))
        tell(start=step)
        while step < last:
            batches = loader
            if progress.batches and "stateful" not in words:
                batches = accelerator.skip_first_batches(loader, progress.batches)
            batches.set_epoch(progress.epoch)
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                progress.batches += 1
                checkpoints.maybe_finalize()
                if not accelerator.sync_gradients:
                    continue
                step += 1
                tell(step=step, loss=loss.item(), lr=scheduler.get_last_lr()[0], order=batch["input_ids"].sum().item())
                await_save_before_strike(words, Path(root), step, SAVE_EVERY)
                strike(words, "kill", step)
                if step % SAVE_EVERY == 0:
                    checkpoints.save_state(step, metrics={"loss": loss.item()})
                strike(words, "kill-saving", step)
                if step == last:
                    break
            else:
                progress.epoch, progress.batches = progress.epoch + 1, 0
        local = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in model.parameters()]
        tell(end=step, weights=digest(accelerator.unwrap_model(model)), local=sum(map(torch.numel, local)))
    accelerator.end_training()


if __name__ == "__main__":
    run_jobs(main)
