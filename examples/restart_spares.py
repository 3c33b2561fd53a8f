"""Replace a killed rank by a spare: the other ranks keep their numbers, and the number of active ranks stays the same.

    ckpt_launcher --standalone --nproc-per-node 4 --ft-restart-policy in-process examples/restart_spares.py

This does not work under torchrun, which ends all ranks of a node when one dies.

Ranks 0 and 1 are on one "node", ranks 2 and 3 on another. On each node one rank is active and one is a spare. `Tree`
takes a replacement from the same node if possible (RESERVE on the layer of nodes), otherwise from the other node
(RESERVE on the root).
"""

import os
import signal

import torch
import torch.distributed as dist

import inprocess
from inprocess.rank_assignment import Layer, LayerFlag, Tree

RANKS_PER_NODE = 2


def node_of(state: inprocess.FrozenState) -> str:
    """Return the key of the layer of nodes. On a real cluster, use the host name."""
    assert state.initial_rank is not None
    return f"node {state.initial_rank // RANKS_PER_NODE}"


def train(call: inprocess.CallWrapper) -> float:
    """Run on active ranks only. A spare waits in the wrapper until it becomes active or the job has completed."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # among the active ranks
    tell(f"iteration {call.iteration}: process {call.state.initial_rank} is rank {rank} of {world_size}")
    dist.init_process_group("gloo")
    if call.iteration == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(())
    dist.all_reduce(total)  # the other rank is blocked here until the restart
    dist.destroy_process_group()
    return total.item()


def main() -> None:
    layers = [
        Layer(min_ranks=1, key_or_fn="job", flag=LayerFlag.RESERVE),
        Layer(max_ranks=1, key_or_fn=node_of, flag=LayerFlag.RESERVE),
    ]
    wrapper = inprocess.Wrapper(rank_assignment=Tree(layers))
    process = int(os.environ["RANK"])
    total = wrapper(train)()
    tell(f"process {process}: {'was a spare' if total is None else f'sum over the active ranks {total:g}'}")


def tell(line: str) -> None:
    """Print a line in one write, so that lines of several ranks do not mix."""
    print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    main()
