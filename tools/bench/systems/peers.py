"""Other libraries, and `torch.save`. Each library is imported when its system is made: not all need be installed."""

import importlib
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.bench.systems import Background, Place, commit_directory, hidden_path, sync_file, sync_tree
from tools.bench.systems.state import local_state
from tools.bench.workload import State


class _OneFile:
    """One file: by rank 0 of what all ranks have, or by each rank of its shards. Training waits.

    Files are synced, and the directory gets its name when all are there: the libraries do neither.
    """

    _suffix = ""

    def __init__(self, place: Place) -> None:
        self._place = place

    def prepare(self, state: State) -> None:
        """There is nothing to prepare."""

    def save(self, state: State, step: int) -> None:
        folder = hidden_path(self._place, step)
        folder.mkdir(exist_ok=True)
        if self._place.sharded or self._place.rank == 0:
            path = folder / self._name()
            self._write(local_state(state), path)
            sync_file(path)
        commit_directory(self._place, step)

    def poll(self) -> bool:
        return True

    def load(self, state: State, step: int) -> None:
        path = self._place.path(step) / self._name()
        self._read(local_state(state), path)

    def close(self) -> None:
        """There is nothing to close."""

    def _write(self, state: State, path: Path) -> None:
        raise NotImplementedError

    def _read(self, state: State, path: Path) -> None:
        raise NotImplementedError

    def _name(self) -> str:
        return f"rank_{self._place.rank if self._place.sharded else 0}.{self._suffix}"


class TorchSave(_OneFile):
    """`torch.save` and `torch.load`. A load maps the file: the faster way that the documentation names."""

    _suffix = "pt"

    def _write(self, state: State, path: Path) -> None:
        with path.open("wb") as stream:
            torch.save(state, stream)

    def _read(self, state: State, path: Path) -> None:
        stored = torch.load(path, mmap=True, weights_only=True)
        for part, named in state.items():
            for name, tensor in named.items():
                tensor.copy_(stored[part][name])


class Safetensors(_OneFile):
    """safetensors: `save_file` and `safe_open`."""

    _suffix = "safetensors"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._library = importlib.import_module("safetensors.torch")

    def _write(self, state: State, path: Path) -> None:
        tensors = {f"{part}/{name}": tensor for part, named in state.items() for name, tensor in named.items()}
        self._library.save_file(tensors, path)

    def _read(self, state: State, path: Path) -> None:
        with self._library.safe_open(path, framework="pt", device=self._place.device) as stored:
            for part, named in state.items():
                for name, tensor in named.items():
                    tensor.copy_(stored.get_tensor(f"{part}/{name}"))


class _Unsynced:
    """A library that writes in the background and syncs nothing: rank 0 does, in the end."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._background = Background()

    def poll(self) -> bool:
        return self._background.poll()

    def close(self) -> None:
        self._background.close()

    def _sync(self, step: int) -> None:
        if self._place.rank == 0:
            sync_tree(self._place.path(step), self._place.threads)


class Torchsnapshot(_Unsynced):
    """torchsnapshot: copies in the call, writes in a thread of the trainer.

    What all ranks have is marked as replicated, so ranks share its writing. It does not know DTensors: each rank saves
    its shards as its own, and no other number of ranks could load them.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library = importlib.import_module("torchsnapshot")

    def prepare(self, state: State) -> None:
        """There is nothing to prepare."""

    def save(self, state: State, step: int) -> None:
        replicated = [] if self._place.sharded else ["**"]
        path = str(self._place.path(step))
        pending = self._library.Snapshot.async_take(path, self._app_state(state), replicated=replicated)
        self._background.begin(pending.wait, lambda: self._sync(step))

    def load(self, state: State, step: int) -> None:
        self._library.Snapshot(str(self._place.path(step))).restore(self._app_state(state))

    def _app_state(self, state: State) -> dict[str, Any]:
        return {part: self._library.StateDict(**named) for part, named in local_state(state).items()}


class TorchCheckpointing(_Unsynced):
    """torch_checkpointing: a process writes a file for each part of the state and rank.

    The state may change when it is staged, so the call waits for that. Pinned memory needs CUDA. Its O_DIRECT writes
    are not aligned, which ext4 refuses when the file is closed: files go through the page cache. To reshard, it
    collects metadata on CUDA devices only: here each rank loads what it saved.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._library = importlib.import_module("torch_checkpointing")
        self._storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        self._manager: Any = None

    def prepare(self, state: State) -> None:
        self._manager = self._make_manager()
        self._manager.prewarm_staging(state)

    def save(self, state: State, step: int) -> None:
        written: Future[Any] = self._manager.save(str(self._place.path(step)), state)
        with self._manager.lock():  # taken when staging is done
            pass
        self._background.begin(written.result, lambda: self._sync(step))

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
        super().close()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _make_manager(self) -> Any:
        writer = self._library.CheckpointWriterConfig(file_write_max_threads=self._place.threads)
        saving = self._library.AsyncCheckpointSaverConfig(writer_config=writer)
        storage = self._storage.LocalFileSystemStorageConfig(use_direct_io=False)
        config = self._library.CheckpointManager.Config(save=saving, storage_config=storage)
        return self._library.CheckpointManager(config)


class Orbax(_Unsynced):
    """orbax-checkpoint, which writes in a thread, with numpy arrays over the memory of the tensors.

    One rank: several would need a distributed JAX.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._library = importlib.import_module("orbax.checkpoint")
        self._bfloat16 = importlib.import_module("ml_dtypes").bfloat16
        self._checkpointer: Any = None

    def prepare(self, state: State) -> None:
        self._checkpointer = self._library.AsyncCheckpointer(self._library.PyTreeCheckpointHandler())

    def save(self, state: State, step: int) -> None:
        saved = self._library.args.PyTreeSave(self._arrays(state))
        self._checkpointer.save(self._place.path(step), args=saved)
        self._background.begin(self._checkpointer.wait_until_finished, lambda: self._sync(step))

    def load(self, state: State, step: int) -> None:
        into = self._arrays(state)
        with self._library.Checkpointer(self._library.PyTreeCheckpointHandler()) as checkpointer:
            restore_args = self._library.checkpoint_utils.construct_restore_args(into)
            restored = self._library.args.PyTreeRestore(item=into, restore_args=restore_args)
            loaded = checkpointer.restore(self._place.path(step), args=restored)
        for part, named in into.items():
            for name, array in named.items():
                np.copyto(array, loaded[part][name])

    def close(self) -> None:
        super().close()
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _arrays(self, state: State) -> dict[str, dict[str, Any]]:
        return {part: {n: self._array(t) for n, t in named.items()} for part, named in local_state(state).items()}

    def _array(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(self._bfloat16)
        return tensor.numpy()
