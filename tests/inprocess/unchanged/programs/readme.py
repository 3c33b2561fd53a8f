"""The script of README that shows the wrapper, as it is printed there, with the faults that a test has planned."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from tests.inprocess.unchanged.programs.journal import begin, digest, note, strike

README = Path(__file__).resolve().parents[4] / "README.md"


def main() -> None:
    """Run the script. What it calls of torch tells the journal when the function begins, and strikes in a step."""
    torch.manual_seed(0)
    (script,) = (
        text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "Wrapper" in text
    )
    root = os.environ["TEST_FOLDER"] + "/run7"
    make_group, optimize = dist.init_process_group, torch.optim.AdamW.step
    steps = 0

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        make_group(*args, **kwargs)
        begin()

    def step(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        strike(steps)
        return optimize(self, *args, **kwargs)

    dist.init_process_group = init_process_group
    torch.optim.AdamW.step = step  # type: ignore[method-assign]
    exec(compile(script.replace("/data/run7", root), "README.md", "exec"), {"__name__": "__main__"})
    with ckpt.open(root) as checkpoint:
        weights = {name: torch.from_numpy(checkpoint[f"model/{name}"][:]) for name in ("weight", "bias")}
        note("done", step=checkpoint.step, steps=steps, weights=digest(weights))


if __name__ == "__main__":
    main()
