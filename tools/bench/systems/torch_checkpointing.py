"""torch_checkpointing: a process writes what was staged in shared memory. It syncs nothing: rank 0 does, in the end."""

from concurrent.futures import Future
from typing import Any

from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, CheckpointWriterConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from tools.bench.state import State
from tools.bench.systems.base import Background, Place, sync_tree

__all__ = ["TorchCheckpointing"]


class TorchCheckpointing:
    """One file for each part of the state and rank, written several at once.

    The state may change when it is staged, so the call waits for that. Pinned memory needs CUDA. Its O_DIRECT writes
    are not aligned, which ext4 refuses when the file is closed: files go through the page cache. To reshard, it
    collects metadata on CUDA devices only: here each rank loads what it saved.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._background = Background()
        self._manager: Any = None

    def prepare(self, state: State) -> None:
        self._manager = self._make_manager()
        self._manager.prewarm_staging(state)

    def save(self, state: State, step: int) -> None:
        written: Future[Any] = self._manager.save(str(self._place.path(step)), state)
        with self._manager.lock():  # taken when staging is done
            pass
        self._background.begin(written.result, lambda: self._sync(step))

    def poll(self) -> bool:
        return self._background.poll()

    def load(self, state: State, step: int) -> None:
        manager = self._make_manager() if self._manager is None else self._manager
        loaded = manager.load(str(self._place.path(step)), into=state)
        for part, named in state.items():
            for name, tensor in named.items():
                if loaded[part][name] is not tensor:
                    tensor.copy_(loaded[part][name])
        if self._manager is None:
            manager.close()

    def close(self) -> None:
        self._background.close()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _make_manager(self) -> Any:
        writer = CheckpointWriterConfig(file_write_max_threads=self._place.threads)
        saving = AsyncCheckpointSaverConfig(writer_config=writer)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(save=saving, storage_config=storage)
        return CheckpointManager(config)

    def _sync(self, step: int) -> None:
        if self._place.rank == 0:
            sync_tree(self._place.path(step), self._place.threads)
