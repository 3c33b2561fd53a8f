"""In-process restarts with CUDA: NCCL, state on the GPU, a broken context. Skipped, cleanly, where there is no GPU."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support import rank_values

pytestmark = pytest.mark.gpu


def test_nccl_and_the_state_of_the_gpu_are_back_after_a_fault(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        import torch
        import torch.distributed as dist

        import ckpt
        import inprocess
        from ckpt.restart import CheckpointAbort, CheckpointFinalize

        weights = torch.zeros(1 << 20, device="cuda")
        told = []
        checkpointer = ckpt.Checkpointer(tmp_path)
        checkpointer.register(weights=weights)

        @inprocess.Wrapper(
            abort=inprocess.Compose(CheckpointAbort(checkpointer), inprocess.abort.AbortTorchDistributed()),
            finalize=CheckpointFinalize(checkpointer, drain_timeout=timedelta(seconds=20)),
            health_check=inprocess.health_check.CudaHealthCheck(),
        )
        def train(call: inprocess.CallWrapper | None = None) -> float:
            assert call is not None
            dist.init_process_group("cpu:gloo,cuda:nccl", store=call.store, rank=rank, world_size=world_size)
            told.append(float(weights[-1]))
            for step in range(int(weights[-1]) + 1, 6):
                gradient = torch.ones(1 << 20, device="cuda")
                dist.all_reduce(gradient)
                weights.add_(gradient)
                checkpointer.async_save({"weights": weights}, step)
                checkpointer.maybe_finalize(blocking=step == 2)
                if step == 3 and call.iteration < 2:
                    weights.fill_(float("nan"))
                    raise RuntimeError("a fault")
            checkpointer.maybe_finalize(blocking=True)
            dist.destroy_process_group()
            return float(weights.sum())

        total = train()
        report = checkpointer.last_restore
        assert report is not None
        checkpointer.close()
        return total, told, report.own_memory_bytes

    total, told, own_bytes = rank_values(main, 1)[0]
    assert total == 5 * (1 << 20)
    assert told == [0.0, 3.0]  # the save of step 3 was drained
    assert own_bytes == 4 << 20


def test_a_rank_with_a_broken_context_leaves_and_the_other_goes_on() -> None:
    def main(rank: int, world_size: int) -> Any:
        import torch

        import inprocess
        from inprocess.rank_assignment import ShiftRanks
        from inprocess.tools.inject_fault import Fault, trigger

        @inprocess.Wrapper(health_check=inprocess.health_check.CudaHealthCheck(), rank_assignment=ShiftRanks())
        def train(call: inprocess.CallWrapper | None = None) -> Any:
            assert call is not None
            values = torch.ones(5, device="cuda")
            if call.iteration == 0:
                if rank == 1:
                    trigger(Fault.GPU_ERROR)
                    torch.cuda.synchronize()
                    raise AssertionError("the error was not noticed")
                while True:
                    time.sleep(0.01)
            return float(values.sum()), os.environ["WORLD_SIZE"]

        try:
            return train()
        except BaseException as error:
            return type(error).__name__

    left, gone = rank_values(main, 2, timeout=60.0, returncodes={1: None})
    assert left == (5.0, "1")
    assert gone in (None, "HealthCheckError")


@pytest.mark.timeout(300)
def test_ranks_on_one_gpu_come_out_of_collectives_of_nccl_twenty_times_and_then_one_dies() -> None:
    """NCCL takes two ranks on one GPU if it believes that they are on different hosts."""
    restarts = 20

    def main(rank: int, world_size: int) -> Any:
        import signal

        import torch
        import torch.distributed as dist

        import inprocess

        os.environ["NCCL_HOSTID"] = f"host{rank}"
        torch.cuda.set_device(0)

        @inprocess.Wrapper(
            soft_timeout=timedelta(seconds=30),
            hard_timeout=timedelta(seconds=40),
            max_same_faults=None,
            max_faults_per_hour=None,
            max_backoff=timedelta(0),
        )
        def train(call: inprocess.CallWrapper | None = None) -> Any:
            assert call is not None
            dist.init_process_group("nccl")
            total = torch.ones(1, device="cuda")
            dist.all_reduce(total)
            torch.cuda.synchronize()
            if call.iteration <= restarts:
                if rank == world_size - 1:
                    if call.iteration == restarts:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("a fault")
                dist.all_reduce(total)  # waits for ever: the last rank does not come
                torch.cuda.synchronize()
                raise AssertionError("a collective without all ranks ended")
            dist.destroy_process_group()
            return call.iteration, float(total)

        return train()

    answers = rank_values(main, 3, timeout=240.0, returncodes={2: -9})
    assert answers == [(restarts + 1, 2.0)] * 2 + [None]
