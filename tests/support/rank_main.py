"""The main program of one rank under `run_ranks`: join the group, call the function, leave its result in a file."""

import os
import sys
from pathlib import Path

import cloudpickle


def main() -> None:
    folder = Path(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with_group = bool(os.environ["TEST_RANKS_INIT"])
    if with_group:
        import torch.distributed as dist

        # A file store: unlike a port it cannot be taken by somebody else between choosing and using it.
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    function, args = cloudpickle.loads((folder / "call.pickle").read_bytes())
    value = function(rank, world_size, *args)
    partial = folder / f"rank_{rank:05d}.partial"
    partial.write_bytes(cloudpickle.dumps(value))
    partial.rename(folder / f"rank_{rank:05d}.result")
    if with_group and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
