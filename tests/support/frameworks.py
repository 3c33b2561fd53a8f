"""Modules of frameworks that take seconds to import, for ranks to be forked with; see `imports` of `launch_ranks`."""

__all__ = ["LIGHTNING", "MEGATRON", "TORCHDATA", "TORCHTITAN", "TORCHTITAN_ON_CPU", "TRANSFORMERS"]

LIGHTNING = ("lightning.pytorch", "tests.ckpt.integrations.programs.lightning_jobs")
MEGATRON = ("megatron.core.dist_checkpointing.strategies.torch", "megatron.core.num_microbatches_calculator")
TORCHDATA = ("torchdata.nodes", "torchdata.stateful_dataloader")
TORCHTITAN = ("tests.ckpt.integrations.programs.torchtitan_job",)
TORCHTITAN_ON_CPU = ("tests.ckpt.integrations.programs.torchtitan_trainer",)
TRANSFORMERS = (
    "accelerate",
    "datasets",  # which accelerate imports in a job of several ranks
    "peft",
    "torchdata.stateful_dataloader",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
