"""A tiny Llama, trained with the Trainer of transformers and saved in the background.

    torchrun --standalone --nproc-per-node 2 examples/with_transformers.py runs/llama --max-steps 60

Kill it at any moment, and start the same command again: it goes on from the newest checkpoint.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from ckpt.integrations.transformers import CkptTrainer


def tiny_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )


def counting(rows: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of 32 numbers that count upwards from anywhere."""
    starts = torch.randint(64, (rows, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(32)) % 64]


def main() -> None:
    parser = argparse.ArgumentParser(description="a tiny Llama that learns to count")
    parser.add_argument("output_dir")
    parser.add_argument("--max-steps", type=int, default=60)
    options = parser.parse_args()
    set_seed(0)

    args = TrainingArguments(
        options.output_dir,
        max_steps=options.max_steps,
        learning_rate=1e-2,
        save_steps=10,
        save_total_limit=3,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = CkptTrainer(tiny_llama(), args, train_dataset=counting(1024))
    result = trainer.train(resume_from_checkpoint="auto")  # from the newest step, if there is any
    trainer.save_model()  # as usual: the final weights, in the format of the Hub

    if trainer.is_world_process_zero():
        print(f"step {result.global_step} of {trainer.checkpoint_root}")


if __name__ == "__main__":
    main()
