"""torch.distributed.checkpoint: in the call, in a thread, and in a process.

Of what makes saves faster this uses all that runs without CUDA: several files at once on each rank, cached plans, and
for the process a stager that is kept and copies into the same shared memory each time. With CUDA that is pinned, and
copies do not block each other; staging in a thread would not let the state change any earlier.
"""

import warnings
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from tools.bench.systems import Background, Place, sync_tree
from tools.bench.workload import State

_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


class Dcp:
    """Saves in the call. It syncs its files, not the directory with their names: rank 0 does that here."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def prepare(self, state: State) -> None:
        """There is nothing to prepare: plans are cached by the first save."""

    def save(self, state: State, step: int) -> None:
        save(state, storage_writer=self._writer(step), planner=_planner())
        self._sync(step)
        dist.barrier()

    def poll(self) -> bool:
        return True

    def load(self, state: State, step: int) -> None:
        load(state, checkpoint_id=self._place.path(step))

    def close(self) -> None:
        caches: list[dict[str, Any]] = [getattr(DefaultSavePlanner, name) for name in _CACHES]
        for cache in caches:  # of the class: the next instance would not plan, but use these plans
            cache.clear()

    def _writer(self, step: int) -> FileSystemWriter:
        return FileSystemWriter(self._place.path(step), thread_count=self._place.threads)

    def _sync(self, step: int) -> None:
        if self._place.rank == 0:
            sync_tree(self._place.path(step), self._place.threads, files=False)


class DcpThread(Dcp):
    """Saves in a thread of the trainer, with a stager that is kept and a process group of its own, as documented."""

    _kind = AsyncCheckpointerType.THREAD
    _shared_memory = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._background = Background()
        on_gpu = place.device == "cuda"
        self._stager = DefaultStager(StagingOptions(on_gpu, self._shared_memory, False, on_gpu))
        self._group = dist.new_group(backend="gloo")

    def prepare(self, state: State) -> None:
        self._stager.stage(state)

    def save(self, state: State, step: int) -> None:
        answer = async_save(
            state,
            storage_writer=self._writer(step),
            planner=_planner(),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        assert not isinstance(answer, AsyncSaveResponse)
        written: Future[object] = answer
        self._background.begin(written.result, lambda: self._sync(step))

    def poll(self) -> bool:
        return self._background.poll()

    def close(self) -> None:
        super().close()
        self._background.close()
        self._stager.close()
        dist.destroy_process_group(self._group)


class DcpProcess(DcpThread):
    """Saves in a process, with a stager that copies to shared memory."""

    _kind = AsyncCheckpointerType.PROCESS
    _shared_memory = True

    def prepare(self, state: State) -> None:
        """Start the process by a save of a single number: nothing else starts it."""
        super().prepare(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = self._place.folder / "first"
            answer = async_save(
                {"step": 0},
                checkpoint_id=path,
                process_group=self._group,
                async_checkpointer_type=self._kind,
                async_stager=self._stager,
            )
            assert isinstance(answer, Future)
            answer.result()

    def close(self) -> None:
        super().close()
        executor._CHECKPOINT_PROCESS = (
            None  # ends it: there is no other way, and its memory would count for the next system
        )


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(enable_plan_caching=True)
