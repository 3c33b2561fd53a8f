"""The first example of docs/restart.md, as it is printed there, with a training loop in the place of its `...`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.inprocess.unchanged.programs.journal import begin, digest, note

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "restart.md"
STEPS = 200


def fit() -> None:
    """Train, with what programs do first here: an optimizer, a compiled function and a package are imported."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters())
    compiled = torch.compile(torch.nn.functional.gelu, backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", enabled=False):
            compiled(parallel(inputs)).square().mean().backward()
        optimizer.step()
    note("done", weights=digest({name: tensor.detach() for name, tensor in model.state_dict().items()}))


def main() -> None:
    """Run the example. What it calls of torch tells the journal when the function begins."""
    script = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    make_group = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin()
        make_group(*args, **kwargs)

    dist.init_process_group = init_process_group
    script = script.replace("    ...\n", "    fit()\n")
    exec(compile(script, "restart.md", "exec"), {"__name__": "__main__", "fit": fit})


if __name__ == "__main__":
    main()
