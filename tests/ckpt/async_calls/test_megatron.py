"""Background calls as Megatron-LM and nvidia_resiliency_ext make them: requests, finalizing in the loop, closing."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt import AsyncCallsQueue, AsyncRequest, CheckpointError, WriterError
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Gate
from tests.support import LeakCheck, run_ranks
from tests.support.frameworks import MEGATRON, NVRX, nvrx_is_there
from tests.support.selection import full_only

pytestmark = pytest.mark.timeout(120)
needs_nvrx = pytest.mark.skipif(not nvrx_is_there(), reason=f"nothing is in {NVRX}: make build/nvrx/.installed")


class ForeignRequest(NamedTuple):
    """A request of another package, with a later field that is unknown here."""

    async_fn: Callable[..., Any] | None
    async_fn_args: Any
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0
    something_new: str = ""


class OldRequest(NamedTuple):
    """As in the first releases."""

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = MappingProxyType({})
    is_frozen: bool = False


# What a sharded save does: every rank writes its file in the background; when all have, rank 0 writes the metadata.


def write_shard(compress: bool, rank: int, shard: dict[str, Any], answers: Any, folder: Path) -> None:
    torch.save(shard, folder / f"{rank}.pt")
    answers.put({"rank": rank, "pid": os.getpid(), "compress": compress})


def copy_of(shard: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in shard.items()}


def finish(answers: Any, folder: Path) -> None:
    """Gather what the ranks wrote: a collective, so the ranks must finalize the same calls in the same order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, answers.get(timeout=30))
    if dist.get_rank() == 0:
        assert len({answer["pid"] for answer in gathered} | {os.getpid()}) == 1 + len(gathered)
        (folder / "metadata").write_text(str(sorted(answer["rank"] for answer in gathered)))


def train(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Manager() as manager:
        answers = manager.Queue()
        queue, seen, finalized = AsyncCallsQueue(persistent=True), [], []
        weight = torch.zeros(5)
        for step in range(1, 13):
            weight += rank + 1
            finalized += queue.maybe_finalize_async_calls(blocking=step == 9, no_dist=False)
            if step == 9:
                assert queue.get_num_unfinalized_calls() == 0
            if step % 4 == 0:
                folder = root / str(step)
                folder.mkdir(exist_ok=True)
                shard = {"weight": weight}
                request = AsyncRequest(
                    partial(write_shard, True),
                    [rank, shard, answers],  # a list, as Megatron passes it
                    [partial(finish, answers, folder)],
                    {"folder": folder},
                    preload_fn=partial(copy_of, shard),
                )
                request.add_finalize_fn(partial(seen.append, step))
                index = queue.schedule_async_request(request)
                assert request._replace(call_idx=index).freeze().is_frozen
                request.add_finalize_fn(partial(seen.append, -step))  # in time: it has not been finalized
        assert queue.get_num_unfinalized_calls() > 0
        queue.close()
        assert (queue.get_num_unfinalized_calls(), queue.maybe_finalize_async_calls(blocking=True)) == (0, [])
        queue.close()
    return {"seen": seen, "finalized": finalized, "threads": multiprocessing.active_children()}


def test_the_loop_of_a_trainer(tmp_path: Path) -> None:
    for result in run_ranks(train, 2, tmp_path):
        assert result.value == {"seen": [4, -4, 8, -8, 12, -12], "finalized": [0, 1], "threads": []}
    for step in (4, 8, 12):
        assert (tmp_path / str(step) / "metadata").read_text() == "[0, 1]"
        for rank in (0, 1):
            assert torch.load(tmp_path / str(step) / f"{rank}.pt")["weight"].tolist() == [step * (rank + 1.0)] * 5


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise OSError("disk full")


def train_with_a_failure(rank: int, world_size: int) -> list[Any]:
    queue, seen = AsyncCallsQueue(), []
    queue.schedule_async_request(AsyncRequest(None, (), [partial(seen.append, 0)]))
    queue.schedule_async_request(AsyncRequest(fail_on_rank_1, (rank,), [partial(seen.append, 1)]))
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), [dist.barrier, partial(seen.append, 2)]))
    with pytest.raises(WriterError, match=r"rank 1.*disk full"):
        queue.close()
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), [partial(seen.append, 3)]))  # it goes on
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return seen


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    assert [result.value for result in run_ranks(train_with_a_failure, 2)] == [[0, 2, 3]] * 2


@pytest.mark.parametrize("kind", [AsyncRequest, ForeignRequest])
def test_requests_of_other_packages(kind: Any, tmp_path: Path, leak_check: LeakCheck) -> None:
    queue, log, seen = AsyncCallsQueue(), tmp_path / "log", []
    request = kind(functions.write_pid_and, (log, "old"), [partial(seen.append, 1)], {"end": "."}, lambda: os.getpid())
    assert queue.schedule_async_request(async_request=request) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    writer, preloaded_in = log.read_text().split()
    assert (preloaded_in, writer == preloaded_in, seen) == (f"{os.getpid()}.", False, [1])
    queue.close()


def test_requests_of_the_first_releases(tmp_path: Path, leak_check: LeakCheck) -> None:
    queue = AsyncCallsQueue(persistent=False, is_daemon=True)
    queue.warmup_persistent_caller(0, mp_mode="spawn")
    assert queue.schedule_async_request(OldRequest(functions.append, (tmp_path / "log", "x"), [])) == 0
    queue.close(abort=False)
    assert (tmp_path / "log").read_text() == "x"


def test_abort_ends_a_call_that_hangs(tmp_path: Path, leak_check: LeakCheck) -> None:
    queue, gate, seen = AsyncCallsQueue(persistent=True), Gate.create(tmp_path), []
    queue.schedule_async_request(AsyncRequest(functions.hang, (gate,), [partial(seen.append, 1)]))
    gate.wait_entered()
    assert queue.maybe_finalize_async_calls() == []
    queue.close(abort=True)
    assert (seen, queue.get_num_unfinalized_calls()) == ([], 0)


def test_what_takes_too_long_is_given_up_at_the_end(tmp_path: Path, leak_check: LeakCheck) -> None:
    queue, gate = AsyncCallsQueue(timeout_s=0.1), Gate.create(tmp_path)
    queue.schedule_async_request(AsyncRequest(functions.hang, (gate,), []))
    gate.wait_entered()
    with pytest.raises(CheckpointError, match="not done after"):
        queue.close()


def test_the_error_names_the_function() -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(partial(functions.fail, "no space"), (), []))
    with pytest.raises(WriterError, match=r"fail.*no space"):
        queue.close()


# -- the package itself ------------------------------------------------------------------------------------------------


def without_cuda(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of Megatron in a process without CUDA."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *given: None  # type: ignore[assignment]
    return fn(*args, **kwargs)


def _megatron_saves(rank: int, world_size: int, folder: Path) -> list[Any]:
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing

    def sharded(value: float) -> dict[str, Any]:
        share, whole = torch.full((2, 8), value + rank), torch.full((8,), value)
        tensor = dist_checkpointing.ShardedTensor.from_rank_offsets
        weights = tensor("weights", share, (0, rank, world_size), replica_id=0)
        return {"weights": weights, "bias": tensor("bias", whole, replica_id=rank), "step": int(value)}

    restored = []
    queue = AsyncCallsQueue(timeout_s=60)
    for step in (10, 20):
        path = folder / str(step)
        path.mkdir(exist_ok=True)
        dist.barrier()
        request = without_cuda(
            dist_checkpointing.save,
            sharded(step),
            str(path),
            async_sharded_save=True,
            validate_access_integrity=False,
        )
        request = request._replace(preload_fn=partial(without_cuda, request.preload_fn))  # where it runs
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        loaded = dist_checkpointing.load(sharded(0.0), str(path), validate_access_integrity=False)
        restored.append([loaded["weights"].unique().tolist(), loaded["bias"].unique().tolist(), loaded["step"]])
    queue.close()
    return restored


def test_sharded_save_of_megatron(tmp_path: Path) -> None:
    """It answers through a queue of a manager, a server process of the trainer that wants to see a key."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    for result in run_ranks(_megatron_saves, 2, tmp_path, timeout=100, imports=MEGATRON):
        rank = result.rank
        assert result.value == [[[10.0 + rank], [10.0], 10], [[20.0 + rank], [20.0], 20]]


def _nvrx_saves(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Save with the writer of nvidia_resiliency_ext for DCP, as its `FileSystemWriterAsync` is used; twice, reused."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(NVRX))
    torch.cuda.synchronize = lambda *given: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    from nvidia_resiliency_ext.checkpointing.async_ckpt import core
    from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
        CachedMetadataFileSystemReader,
    )
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )

    restored: list[Any] = []
    queue = AsyncCallsQueue(timeout_s=60)
    mesh = init_device_mesh("cpu", (world_size,))
    for step in (10, 20):
        path = str(folder / str(step))
        weight = torch.full((2, 8), float(step + rank))
        state = {"weight": DTensor.from_local(weight, mesh, [Shard(0)]), "bias": torch.full((3,), float(step))}
        writer = FileSystemWriterAsync(path, thread_count=2)
        planned = save_state_dict_async_plan(state, writer)
        save_fn, preload_fn, save_args = writer.get_save_function_and_args()
        request = core.AsyncRequest(
            save_fn, save_args, [partial(save_state_dict_async_finalize, *planned)], preload_fn=preload_fn
        )
        queue.schedule_async_request(request)
        weight.zero_()  # the data were copied by `preload_fn`
        if step == 10:
            queue.maybe_finalize_async_calls(blocking=True)
            queue.close()  # and it is used again
    queue.close()
    for step in (10, 20):
        loaded = {"weight": distribute_tensor(torch.zeros(2 * world_size, 8), mesh, [Shard(0)]), "bias": torch.zeros(3)}
        dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(folder / str(step)))
        restored.append([loaded["weight"].to_local().unique().tolist(), loaded["bias"].unique().tolist()])
    return restored


@full_only
@needs_nvrx
def test_sharded_save_of_nvidia_resiliency_ext(tmp_path: Path) -> None:
    for result in run_ranks(_nvrx_saves, 2, tmp_path, timeout=100, imports=MEGATRON):
        assert result.value == [[[step + result.rank], [step]] for step in (10.0, 20.0)]


def _nvrx_torch_save(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Let `TorchAsyncCheckpoint` of nvidia_resiliency_ext schedule its requests on a queue of ckpt."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(NVRX))
    torch.cuda.synchronize = lambda *given: None  # type: ignore[assignment]
    from nvidia_resiliency_ext.checkpointing.async_ckpt import torch_ckpt

    torch_ckpt.AsyncCallsQueue = AsyncCallsQueue
    saver = torch_ckpt.TorchAsyncCheckpoint()
    saver.async_save({"weight": torch.full((4,), float(rank)), "step": 7}, folder / f"{rank}.pt")
    saver.finalize_async_save(blocking=True, no_dist=False, terminate=True)
    loaded = torch.load(folder / f"{rank}.pt")
    return [loaded["weight"].unique().tolist(), loaded["step"]]


@needs_nvrx
def test_torch_async_checkpoint_of_nvidia_resiliency_ext(tmp_path: Path) -> None:
    results = run_ranks(_nvrx_torch_save, 2, tmp_path, timeout=100, imports=MEGATRON)
    assert [result.value for result in results] == [[[0.0], 7], [[1.0], 7]]


def _nvrx_local_saves(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Save with `LocalCheckpointManager` of nvidia_resiliency_ext, in the background; then find and load the newest."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(NVRX))
    torch.cuda.synchronize = lambda *given: None  # type: ignore[assignment]
    torch.Tensor.is_cuda = True  # type: ignore[assignment]  # it takes tensors of a GPU alone
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    BasicTensorAwareStateDict.restore_tensor_device = lambda *given, **options: None  # to the GPU
    found: list[Any] = []
    with AsyncCallsQueue(timeout_s=60) as queue:
        manager = LocalCheckpointManager(folder, session_id="job")
        for step in (10, 20):
            state = {"weight": torch.full((4,), float(step + rank)), "step": step}
            queue.schedule_async_request(manager.save(BasicTensorAwareStateDict(state), step, is_async=True))
            state["weight"].zero_()  # it was pickled
            queue.maybe_finalize_async_calls(blocking=True)
    for session in ("job", "another"):
        manager = LocalCheckpointManager(folder, session_id=session)
        found.append(manager.find_latest())
        if found[-1] != -1:
            loaded, name = manager.load()
            found.append([name, loaded.state_dict["weight"].unique().tolist(), loaded.state_dict["step"]])
    return found


@needs_nvrx
def test_local_checkpoints_of_nvidia_resiliency_ext(tmp_path: Path) -> None:
    for result in run_ranks(_nvrx_local_saves, 2, tmp_path, timeout=100, imports=MEGATRON):
        assert result.value == [20, [(20, result.rank, "job"), [20.0 + result.rank], 20], -1]
