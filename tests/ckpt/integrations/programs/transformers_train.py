"""Trains a tiny Llama with the Trainer; see `jobs`. The arguments of a job are FOLDER, LOG, and words.

Appends a line to LOG.<rank> for each step and one at the end. Words: `kill:N` ends the process at the end of step N,
before a save; `kill-saving:N` just after the save of step N has begun; `damage:N` changes a byte of step N before the
start, `fail:N` makes its save fail; `lora`, `accumulate` and `best` say how it trains, `steps:N` how
long, `resume:` with a step, `none`, `newest` or `auto` from where.
"""

import functools
import os
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback, TrainingArguments, set_seed

import ckpt
from ckpt.integrations.transformers import CkptTrainer
from tests.ckpt.integrations.programs.accelerate_train import digest, tiny_llama, tokens, write_line
from tests.ckpt.integrations.programs.jobs import await_save_before_strike, run_jobs, strike


class Journal(TrainerCallback):
    """Writes the losses down, and kills."""

    def __init__(self, log: str, words: tuple[str, ...]) -> None:
        self.tell = functools.partial(write_line, Path(f"{log}.{os.environ['RANK']}"))
        self._words = words

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tell(start=state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if f"fail:{state.global_step + 1}" in self._words:  # a folder is where the step would be
            Path(args.output_dir, "checkpoints", f"step_{state.global_step + 1:08d}", "other").mkdir(parents=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:
            self.tell(step=state.global_step, **{name: logs[name] for name in ("loss", "grad_norm", "learning_rate")})
            root = Path(args.output_dir, "checkpoints")
            await_save_before_strike(self._words, root, state.global_step, state.save_steps)
            strike(self._words, "kill", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        strike(self._words, "kill-saving", state.global_step)


class TolerantTrainer(CkptTrainer):
    """Goes on after a save that failed, and writes it down."""

    def on_save_error(self, error: ckpt.CheckpointError) -> None:
        self.journal.tell(failed=error.step, text=str(error))


def main(folder: str, log: str, *words: str) -> None:
    numbers = dict(word.split(":") for word in words if ":" in word)
    best = "best" in words
    args = TrainingArguments(
        output_dir=folder,
        max_steps=int(numbers.get("steps", 12)),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2 if "accumulate" in words else 1,
        learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=1,
        save_steps=3,
        save_total_limit=2,
        eval_strategy="steps" if best else "no",
        eval_steps=3,
        load_best_model_at_end=best,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=7,
    )
    set_seed(7)
    model = tiny_llama()
    if "lora" in words:
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    journal = Journal(log, words)
    data = tokens(40)
    trainer = TolerantTrainer(model, args, train_dataset=data, eval_dataset=data[:8], callbacks=[journal])
    trainer.journal = journal
    root = Path(trainer.checkpoint_root)
    if "damage" in numbers:
        _damage(root / f"step_{int(numbers['damage']):08d}")
    how = numbers.get("resume", "auto")
    try:
        trainer.train(int(how) if how.isdecimal() else {"none": None, "newest": True, "auto": "auto"}[how])
    except ValueError as error:
        journal.tell(error=str(error))
    # Rank 0 removes steps; another rank may get here before that.
    steps = sorted(int(name.name[5:]) for name in root.glob("step_*")) if os.environ["RANK"] == "0" else None
    journal.tell(end=trainer.state.global_step, weights=digest(model), best=trainer.state.best_global_step, steps=steps)


def _damage(step: Path) -> None:
    """Change a byte in the middle of the data of a step."""
    (pack,) = step.glob("packs/000/*")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)


if __name__ == "__main__":
    run_jobs(main)
