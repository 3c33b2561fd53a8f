"""Modules of frameworks that take seconds to import, for ranks to be forked with; see `imports` of `launch_ranks`."""

from pathlib import Path

NVRX = Path(__file__).resolve().parents[2] / "build" / "nvrx"
"""Where the Makefile puts nvidia_resiliency_ext: it installs a program of the name of ours, so not into the venv."""


def nvrx_is_there() -> bool:
    """Return whether nvidia_resiliency_ext can be imported from `NVRX`."""
    return (NVRX / "nvidia_resiliency_ext").is_dir()


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
