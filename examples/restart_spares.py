"""A rank is killed, and a spare takes its place: the others keep their numbers, and as many ranks work as before.

    ckpt_launcher --standalone --nproc-per-node 4 --ft-restart-policy in-process examples/restart_spares.py

Not under torchrun, which ends all ranks of a node with the first one that dies.

Ranks 0 and 1 are on one "node", 2 and 3 on another; of each node one works and one is a reserve. `Tree` knows that: a
replacement comes from the same node (RESERVE on the layer of nodes), if there is one, and else from the other (RESERVE
on the root).
"""

import os
import signal

import torch
import torch.distributed as dist

import inprocess
from inprocess.rank_assignment import Layer, LayerFlag, Tree

RANKS_PER_NODE = 2


def node_of(state: inprocess.FrozenState) -> str:
    """The key of the layer of nodes. On a real cluster: the host name."""
    assert state.initial_rank is not None
    return f"node {state.initial_rank // RANKS_PER_NODE}"


def train(call: inprocess.CallWrapper | None = None) -> float:
    """Runs on active ranks only; a spare waits in the wrapper until it is needed, or all is done."""
    assert call is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # among the active ones
    print(f"iteration {call.iteration}: process {call.state.initial_rank} is rank {rank} of {world_size}", flush=True)
    dist.init_process_group("gloo")
    if call.iteration == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(())
    dist.all_reduce(total)  # the other rank waits here in vain, until the restart
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
    print(
        f"process {process}: {'was a spare' if total is None else f'sum over the active ranks {total:g}'}", flush=True
    )


if __name__ == "__main__":
    main()
