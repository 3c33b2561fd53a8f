"""The block of README that shows the wrapper, as it is printed there, with one fault."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.inprocess.unchanged.programs.journal import begin, digest, note, strike

README = Path(__file__).resolve().parents[4] / "README.md"


def main() -> None:
    """What the block takes for given, then the block, then a call of what it defines."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer}
    names["state"] = {"model": model, "optimizer": optimizer}

    def train_from(step: int) -> None:
        begin()
        strike(1)
        total = torch.ones(())
        dist.all_reduce(total)
        assert int(total) == int(os.environ["WORLD_SIZE"])

    names["train_from"] = train_from
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "Wrapper" in text]
    exec(compile(block.replace("/data/run7", os.environ["TEST_FOLDER"] + "/run7"), "README.md", "exec"), names)
    names["train"]()
    names["checkpointer"].close()
    note("done", weights=digest(model.state_dict()))


if __name__ == "__main__":
    main()
