"""One rank of a job that loses a node; see `nodes`.

    ckpt_launcher ... -m tools.bench.nodes_training --gb 1 --folder DIR

At the first start it saves a step, and trains until its node is lost; a later one restores the step, and ends after a
step of training. Each rank of each start appends one line to notes.jsonl.
"""

import time

_STARTED = time.time()  # before the imports, which are part of a start

import argparse  # noqa: E402
import json  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ckpt  # noqa: E402
from tools.bench.workload import make_state  # noqa: E402

_STEP_S = 0.02  # the ranks are not to take all of the machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.nodes_training")
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    checkpointer_class = ckpt.Checkpointer  # imports what is behind it
    notes = {"started": _STARTED, "imported": time.time()}
    dist.init_process_group("gloo")
    notes["joined"] = time.time()
    rank = dist.get_rank()
    state = {f"rank{rank}": make_state(1e9 * options.gb / dist.get_world_size())}
    notes["allocated"] = time.time()
    with checkpointer_class(options.folder / "root") as checkpointer:
        restored = checkpointer.restore(state)
        notes["restored"] = time.time()
        if restored is None:
            checkpointer.save(state, 1)
        _train_step()
        notes["stepped"] = time.time()
        line = json.dumps({"rank": rank, "is_first": restored is None, **notes})
        with (options.folder / "notes.jsonl").open("a") as file:
            file.write(f"{line}\n")
        while restored is None:
            _train_step()
            time.sleep(_STEP_S)
    dist.destroy_process_group()


def _train_step() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


if __name__ == "__main__":
    main()
