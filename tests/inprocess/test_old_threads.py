"""Threads that an interrupted function has left running are named, and take part in no later collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from inprocess import CallWrapper, Wrapper
from inprocess.old_threads import OldThreads
from tests.inprocess.restarting import PATIENT, logged
from tests.support import rank_values

_LONG_S = 40.0


def _default(kept: dict[str, Any]) -> None:
    dist.all_reduce(torch.full((1,), 100.0))


def _given(kept: dict[str, Any]) -> None:
    """Uses a group of the new iteration, which a variable that outlives the iterations holds."""
    dist.all_reduce(torch.full((1,), 100.0), group=kept["group"])


def _objects(kept: dict[str, Any]) -> None:
    dist.all_gather_object([None, None], "old")


def _functional(kept: dict[str, Any]) -> None:
    """Uses the old mesh, whose groups are found by their names: those of the new iteration have the same."""
    functional.all_reduce(torch.full((1,), 100.0), "sum", (kept["mesh"], 0)).sum().item()


def _by_mesh(kept: dict[str, Any]) -> None:
    kept["mesh"].get_group()


def _new_group(kept: dict[str, Any]) -> None:
    dist.new_group([0, 1])


def _first_group(kept: dict[str, Any]) -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")


@pytest.mark.parametrize(
    "use",
    [_default, _given, _objects, _functional, _by_mesh, _new_group, _first_group],
    ids=lambda use: use.__name__.strip("_"),
)
def test_a_thread_of_an_old_iteration_takes_part_in_no_collective(use: Callable[[dict[str, Any]], None]) -> None:
    def main(rank: int, world_size: int) -> Any:
        go, errors, kept = threading.Event(), [], {}

        def goes_on() -> None:
            go.wait(_LONG_S)
            try:
                use(kept)
            except Exception as error:
                errors.append(str(error))

        thread = threading.Thread(target=goes_on, name="goes on", daemon=True)

        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            dist.init_process_group("gloo")
            mesh: DeviceMesh = init_device_mesh("cpu", (2,))
            if call.iteration == 0:
                kept["mesh"] = mesh
                thread.start()
                dist.barrier()
                raise ValueError("fault")
            kept["group"] = dist.group.WORLD
            go.set()
            thread.join(_LONG_S)
            found = thread.is_alive(), list(errors)
            total = torch.ones(1)
            dist.all_reduce(total)
            group = dist.new_group([0, 1])
            dist.all_reduce(total, group=group)
            total = functional.all_reduce(total, "sum", (mesh, 0)) + 0
            kept.clear()
            dist.destroy_process_group()
            return (*found, float(total))

        with logged() as lines:
            result = train()
        warned = [line for line in lines if "left threads running" in line]
        unchanged = dist.distributed_c10d._rank_not_in_group.__module__ == dist.distributed_c10d.__name__
        return result, warned, unchanged and dist.distributed_c10d._World.default_pg.fget.__name__

    for (is_alive, errors, total), warned, unchanged in rank_values(main, 2):
        assert not is_alive
        assert len(errors) == 1
        assert "thread 'goes on' was started in iteration 0, which is over" in errors[0]
        assert total == 8.0
        assert len(warned) == 1
        assert "'goes on'" in warned[0]
        assert unchanged == "default_pg"


def test_threads_can_be_refused() -> None:
    def main(rank: int, world_size: int) -> Any:
        go = threading.Event()

        @Wrapper(threads="error", **PATIENT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0:
                if rank == 1:
                    threading.Thread(target=go.wait, args=(_LONG_S,), name="goes on", daemon=True).start()
                raise ValueError("fault")
            return call.state.world_size

        try:
            return train()
        except Exception as error:
            return type(error).__name__, "threads='error': 'goes on'" in str(error)
        finally:
            go.set()

    assert rank_values(main, 2) == [1, ("RestartError", True)]


def test_threads_that_end_with_the_function_are_not_named() -> None:
    def main(rank: int, world_size: int) -> Any:
        before = threading.Event()
        threading.Thread(target=before.wait, args=(_LONG_S,), name="of before", daemon=True).start()

        class Monitor(threading.Thread):
            """As tqdm starts one with the first bar."""

            def run(self) -> None:
                before.wait(_LONG_S)

        Monitor.run.__module__ = "tqdm._monitor"

        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> None:
            assert call is not None
            over = threading.Event()
            if call.iteration == 0:
                Monitor(daemon=True).start()
            thread = threading.Thread(target=over.wait, args=(_LONG_S,))
            thread.start()
            try:
                if call.iteration < 2:
                    raise ValueError("fault")
            finally:
                over.set()  # the thread ends a moment later

        with logged() as lines:
            train()
        before.set()
        return [line for line in lines if "left threads" in line]

    assert rank_values(main, 1) == [[]]


def test_a_thread_that_gets_the_number_of_an_old_one_may_do_all() -> None:
    """Numbers of threads are used again when they have ended."""
    threads, go = OldThreads(), threading.Event()
    threads.begin()
    first = threading.Thread(target=go.wait, args=(_LONG_S,), daemon=True)
    first.start()
    try:
        assert len(threads.end(0)) == 1
        go.set()
        first.join(_LONG_S)
        refused, until = [], time.monotonic() + _LONG_S
        second = first
        while time.monotonic() < until:
            second = threading.Thread(target=lambda: refused.append(threads._iteration_of_caller()))
            second.start()
            second.join(_LONG_S)
            if second.ident == first.ident:
                break
        assert second.ident == first.ident
        assert set(refused) == {None}
    finally:
        threads.close()
