"""Imports the trainer of torchtitan as it runs on CPUs, for ranks that are forked with it."""

from tests.ckpt.integrations.programs.torchtitan_on_cpu import use_cpu

use_cpu()

import torchtitan.train  # noqa: E402, F401
