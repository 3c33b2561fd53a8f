"""torchsnapshot: copies in the call, writes in a thread of the trainer. It syncs nothing: rank 0 does, in the end."""

import warnings

from tools.bench.state import State
from tools.bench.systems.base import Background, Place, sync_tree
from tools.bench.workloads.transformer import local_state

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchsnapshot import Snapshot, StateDict

__all__ = ["Torchsnapshot"]


class Torchsnapshot:
    """What all ranks have is marked as replicated, so ranks share its writing. It knows no DTensors: each rank saves
    its shards as its own, and no other number of ranks could load them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._background = Background()

    def prepare(self, state: State) -> None:
        """There is nothing to prepare."""

    def save(self, state: State, step: int) -> None:
        replicated = [] if self._place.sharded else ["**"]
        pending = Snapshot.async_take(str(self._place.path(step)), _app_state(state), replicated=replicated)
        self._background.begin(pending.wait, lambda: self._sync(step))

    def poll(self) -> bool:
        return self._background.poll()

    def load(self, state: State, step: int) -> None:
        Snapshot(str(self._place.path(step))).restore(_app_state(state))

    def close(self) -> None:
        self._background.close()

    def _sync(self, step: int) -> None:
        if self._place.rank == 0:
            sync_tree(self._place.path(step), self._place.threads)


def _app_state(state: State) -> dict[str, StateDict]:
    return {part: StateDict(**named) for part, named in local_state(state).items()}
