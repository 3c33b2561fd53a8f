"""`transformers.Trainer` with a tiny language model of random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.inprocess.unchanged.programs.journal import begin, digest, note, run, strike


class Faults(TrainerCallback):
    """Strikes at the beginning of a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        strike(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            note("first step", weights=digest(kwargs["model"].state_dict()))


def train() -> str:
    begin()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 64, (48, 8))
    arguments = TrainingArguments(
        output_dir="output",
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=5,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Faults()],
    )
    note("ranks", rank=arguments.process_index, world_size=arguments.world_size)
    trainer.train()
    return digest(model.state_dict())


if __name__ == "__main__":
    run(train)
