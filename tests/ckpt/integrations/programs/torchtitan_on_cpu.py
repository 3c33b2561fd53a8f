"""Run torchtitan's trainer on CPU. It knows accelerators only: this stands in for their functions, and for kernels.

    python torchtitan_on_cpu.py KILLED_AT [options of torchtitan.train]

The process kills itself when training step KILLED_AT begins; 0 for never.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def use_cpu() -> None:
    """Make torchtitan use the CPU. To be called before anything else of it is imported."""
    from torchtitan.tools import utils

    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()  # needs triton
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_stats=lambda device: Counter(),
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    )
    if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 uses functions of PyTorch's nightly builds
        dist.set_timeout = lambda timeout, group: None
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(module: Any, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum


def plain_attention(config: Any) -> Any:
    """Replace attention that needs a compiler."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    return ScaledDotProductAttention.Config()


def kill_at(step: int) -> None:
    """Have this process kill itself when a training step begins."""
    from torchtitan.trainer import Trainer

    train_step = Trainer.train_step

    def train_or_die(trainer: Any, batches: Any) -> Any:
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(trainer, batches)

    Trainer.train_step = train_or_die


def with_override() -> Any:
    """Return the configuration of the example with torchtitan's own checkpoint manager, which an override replaces."""
    from torchtitan.components.checkpointer import CheckpointManager

    from examples.with_torchtitan import debugmodel

    config = debugmodel()
    config.checkpoint = CheckpointManager.Config(enable=True, last_save_model_only=False)
    return config


def main() -> None:
    """Run `torchtitan.train` as the command line says."""
    use_cpu()
    from torchtitan import train
    from torchtitan.config.override import override
    from torchtitan.models.common.attention import FlexAttention

    override(target=FlexAttention.Config)(plain_attention)
    kill_at(int(sys.argv.pop(1)))
    overrides = [f"{__name__}.plain_attention"]
    if "with_override" in sys.argv:
        overrides.append("ckpt.integrations.torchtitan.use_ckpt")
    sys.argv += ["--training.mixed_precision_param", "float32", "--override.imports", *overrides]
    train.main()


if __name__ == "__main__":
    main()
