"""Globals of libraries are reset after a restart; each with the real library, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess import CallWrapper, Wrapper, process_state
from tests.inprocess.restarting import PATIENT, logged
from tests.support import rank_values, run_ranks
from tests.support.frameworks import MEGATRON


def _needs(library: str) -> None:
    if importlib.util.find_spec(library.partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed; the extra `frameworks` has it")


@pytest.mark.timeout(120)  # it imports all frameworks
def test_what_is_reset_exists() -> None:
    """An entry that fails is only logged in a job. Libraries that are not installed are left out."""

    def main(rank: int, world_size: int) -> tuple[list[str], list[str]]:
        found = []
        for name in process_state._RESETS:
            package = name.partition(".")[0]
            if importlib.util.find_spec(package) is not None and importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
                found.append(name)
        with logged() as lines:
            process_state.reset_libraries()
        return found, lines

    ((found, lines),) = rank_values(main, 1, timeout=100)
    assert lines == []
    assert [name for name in found if name.startswith("torch.")]


def _save(folder: Path, step: int) -> str:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    saved: Any = checkpoint.async_save(
        {"weights": torch.ones(4) * step},
        checkpoint_id=folder / str(step),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    try:
        saved.result(timeout=40)
        return "saved"
    except Exception as error:
        return repr(error)


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_checkpoint_process_saves_again_after_a_rank_was_lost(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        outcomes = []

        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            dist.init_process_group("gloo")
            outcomes.append(_save(tmp_path, call.iteration))
            dist.barrier()
            if call.iteration == 0 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if call.iteration == 0:
                dist.barrier()
            outcomes.append(_save(tmp_path, 10 + call.iteration))
            dist.destroy_process_group()
            return outcomes, dist.is_initialized()

        return train()

    results = run_ranks(
        main, 2, init_process_group=False, returncodes={1: -signal.SIGKILL}, env={"PYTHONWARNINGS": "ignore"}
    )
    assert results[0].value == (["saved"] * 3, False)
    assert all((tmp_path / str(step) / ".metadata").exists() for step in (0, 1, 11))


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_process_that_is_just_started_does_not_come_into_the_next_iteration(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        from torch.distributed.checkpoint import _async_process_executor as executor

        starting = threading.Event()
        wait = executor._AsyncCheckpointProcess._wait_for_response

        def tells(self: Any, timeout: float | None = None) -> Any:
            starting.set()
            return wait(self, timeout)

        threads = []

        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            dist.init_process_group("gloo")
            if call.iteration == 0:
                executor._AsyncCheckpointProcess._wait_for_response = tells
                threads.append(threading.Thread(target=_save, args=(tmp_path, 0), daemon=True))
                threads[0].start()
                assert starting.wait(40)
                executor._AsyncCheckpointProcess._wait_for_response = wait
                raise ValueError("fault")
            threads[0].join(40)
            kept = executor._CHECKPOINT_PROCESS
            outcome = _save(tmp_path, 1)
            dist.destroy_process_group()
            return threads[0].is_alive(), kept, outcome

        return train()

    assert rank_values(main, 2, env={"PYTHONWARNINGS": "ignore"}) == [(False, None, "saved")] * 2


def test_megatron_is_initialized_again() -> None:
    _needs("megatron")

    def main(rank: int, world_size: int) -> Any:
        sizes = []

        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> Any:
            from megatron.core import num_microbatches_calculator, parallel_state

            assert call is not None
            dist.init_process_group("gloo")
            parallel_state.initialize_model_parallel()
            replicas = parallel_state.get_data_parallel_world_size()
            num_microbatches_calculator.init_num_microbatches_calculator(dist.get_rank(), None, 8, 1, replicas)
            total = torch.ones(1)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            sizes.append((replicas, int(total), num_microbatches_calculator.get_num_microbatches()))
            if call.iteration == 0:
                dist.barrier()
                if rank == 1:
                    sys.exit(1)
                dist.barrier()
            dist.destroy_process_group()
            return sizes

        return train()

    results = run_ranks(main, 2, init_process_group=False, returncodes={1: 1}, imports=MEGATRON)
    assert results[0].value == [(2, 2, 4), (1, 1, 8)]
