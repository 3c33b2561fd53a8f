"""What the wrapper does for its callers, on real ranks: restarts, results, hooks, errors."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import pytest

from inprocess import CallWrapper, Compose, FrozenState, Mode, Wrapper
from inprocess.exception import RestartAbort
from inprocess.health_check import FaultCounter
from inprocess.initialize import RetryController
from inprocess.rank_assignment import ActiveWorldSizeDivisibleBy, MaxActiveWorldSize, ShiftRanks
from inprocess.store import FileStore
from tests.ckpt.crash.killers import wait_until
from tests.inprocess.restarting import SHORT, UNBOUNDED, Calls, logged, numbers, outcome, seconds
from tests.support import launch_ranks, rank_values

# -- the decorator -----------------------------------------------------------------------------------------------------


def test_not_enabled_it_hands_out_the_function_itself() -> None:
    def train() -> int:
        return 7

    assert Wrapper(enabled=False)(train) is train


def test_the_wrapped_function_looks_like_the_function() -> None:
    def train(size: int, *, name: str = "") -> int:
        """Train."""
        return size

    wrapped = Wrapper()(train)
    assert wrapped is not train
    assert (wrapped.__name__, wrapped.__doc__) == ("train", "Train.")
    assert wrapped.__wrapped__ is train  # type: ignore[attr-defined]


def test_a_process_group_that_exists_is_refused() -> None:
    def main(rank: int, world_size: int) -> Any:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=0, world_size=1
        )
        return outcome(Wrapper()(lambda: 1))

    kind, text, _ = rank_values(main, 1)[0]
    assert kind == "ValueError"
    assert "not torch.distributed.is_initialized()" in text


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_the_watchdog_of_nccl_ends_no_process_in_a_wrapped_function() -> None:
    def main(rank: int, world_size: int) -> Any:
        names = [f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "DUMP_ON_TIMEOUT")]
        os.environ[names[1]] = "1"  # what the user says stays

        def values() -> list[str | None]:
            return [os.environ.get(name) for name in names]

        return values(), Wrapper()(values)(), values()

    before, inside, after = rank_values(main, 1)[0]
    assert before == after == [None, "1", None]
    assert inside == ["0", "1", None]


def test_the_agent_of_torchrun_does_not_have_it_end_processes_either() -> None:
    def main(rank: int, world_size: int) -> Any:
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        os.environ.update({"TORCHELASTIC_RUN_ID": "run", name: "1"})  # as the agent gives it to each worker
        inside = Wrapper()(lambda: os.environ.get(name))()
        by_agent = inside, os.environ[name]
        os.environ[name] = "3"
        return by_agent, Wrapper()(lambda: os.environ.get(name))()

    assert rank_values(main, 1)[0] == (("0", "1"), "3")


def test_a_fault_on_one_rank_restarts_all_and_all_know_why() -> None:
    def main(rank: int, world_size: int) -> Any:
        calls = Calls()
        ran = []

        @Wrapper(
            initialize=calls.current("initialize"),
            abort=calls.current("abort"),
            finalize=calls.current("finalize"),
            health_check=calls.current("health_check"),
            completion=calls.current("completion"),
            terminate=calls.current("terminate"),
        )
        def train(step: int, call: Optional[CallWrapper] = None, *, name: str) -> tuple[str, int]:  # noqa: UP045
            assert call is not None
            ran.append((call.iteration, step, name, numbers()))
            if call.iteration == 0:
                if rank == 1:
                    raise ValueError("only here")
                while True:
                    time.sleep(60)
            return name, rank

        with logged() as lines:
            return train(5, name="a"), ran, calls.made, [line for line in lines if line.startswith("WARNING")]

    for rank, (result, ran, made, warnings) in enumerate(rank_values(main, 2)):
        assert result == ("a", rank)
        assert ran == [(i, 5, "a", (str(rank), "2")) for i in (0, 1)]
        own = "only here" if rank == 1 else None
        why = ((1, "EXCEPTION"),)
        assert made == [
            ("initialize", 0, rank, None, (), True),
            ("health_check", 0, rank, None, (), True),
            ("abort", 0, rank, None, why, False),
            ("finalize", 0, rank, own, why, True),
            ("health_check", 0, rank, own, why, True),
            ("initialize", 1, rank, None, why, True),
            ("health_check", 1, rank, None, why, True),
            ("completion", 1, rank, None, why, True),
        ]
        assert any("EXCEPTION on rank 1 (ValueError: only here)" in line for line in warnings)


def test_hooks_of_the_classic_style_and_hooks_that_return_nothing() -> None:
    def main(rank: int, world_size: int) -> Any:
        calls = Calls()

        def forgets(state: FrozenState) -> None:
            calls.made.append(("forgets", state.iteration))

        @Wrapper(
            initialize=forgets,
            abort=forgets,
            finalize=Compose(calls.classic("second"), calls.classic("first")),
            health_check=calls.classic("health_check"),
            rank_assignment=ShiftRanks(),
            rank_filter=MaxActiveWorldSize(2),
        )
        def train(call: CallWrapper | None = None) -> str:
            assert call is not None
            if call.iteration == 0 and rank == 0:
                raise OSError("disk")
            return f"iteration {call.iteration}"

        return train(), calls.made

    for rank, (result, made) in enumerate(rank_values(main, 2)):
        own = "disk" if rank == 0 else None
        assert result == "iteration 1"
        assert made == [
            ("forgets", 0),
            ("health_check", 0, None),
            ("forgets", 0),
            ("first", 0, own),
            ("second", 0, own),
            ("health_check", 0, own),
            ("forgets", 1),
            ("health_check", 1, None),
        ]


def test_exceptions_that_cannot_be_copied_or_pickled_or_printed() -> None:
    def main(rank: int, world_size: int) -> Any:
        class WithoutText(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

            __repr__ = __str__

        class WithoutCopy(Exception):
            def __init__(self, first: int, second: int) -> None:
                super().__init__(first)
                self.lock = threading.Lock()

            def __reduce__(self) -> Any:
                raise TypeError("no copy")

        faults: list[Any] = [
            WithoutText(),
            WithoutCopy(1, 2),
            ValueError("\ud800 and \n two lines " + 100_000 * "x"),
            ValueError(100_000 * "ü"),
        ]
        faults += [ExceptionGroup("several", [OSError(5, "io"), WithoutText()])]
        seen = []

        def finalize(state: FrozenState) -> FrozenState:
            seen.append((type(state.fn_exception).__name__, [record.summary[:40] for record in state.interruptions]))
            return state

        @Wrapper(finalize=finalize, **UNBOUNDED)
        def train(call: CallWrapper) -> int:
            if call.iteration < len(faults):
                raise faults[call.iteration]
            return call.iteration

        return train(None), seen  # type: ignore[arg-type]

    ((result, seen),) = rank_values(main, 1)
    assert result == 5
    assert [kind for kind, _ in seen] == ["WithoutText", "WithoutCopy", "ValueError", "ValueError", "ExceptionGroup"]
    summaries = [summary for _, (summary,) in seen]
    assert summaries[0] == "WithoutText"
    assert summaries[1].startswith("WithoutCopy: 1")
    assert summaries[2].startswith("ValueError: ")


def test_one_wrapper_many_functions_many_calls_nothing_left() -> None:
    def main(rank: int, world_size: int) -> Any:
        from tests.support import LeakCheck

        wrapper = Wrapper()
        results = []
        gc.unfreeze()  # the template of ranks has frozen its objects; the wrapper freezes only what nothing else has
        frozen = gc.get_freeze_count()  # some Pythons begin with more than none

        @wrapper
        def first(n: int, call: CallWrapper | None = None) -> Any:
            assert call is not None
            if call.iteration < 2 and (rank + n + call.iteration) % 2 == 0:
                raise ValueError("fault")
            return n, call.iteration, numbers()

        @wrapper
        def second(n: int) -> Any:
            return -n

        results += [first(0), second(0)]
        before = threading.active_count()
        leaks = LeakCheck()
        results += [first(1), second(1)]
        leaks.check()
        return results, before, gc.get_freeze_count() - frozen, os.environ["RANK"]

    for rank, (results, threads, frozen, variable) in enumerate(rank_values(main, 2)):
        assert results[::2] == [(n, 2, (str(rank), "2")) for n in range(2)]
        assert results[1::2] == [0, -1]
        assert threads == 1
        assert frozen == 0
        assert variable == str(rank)


def test_garbage_of_the_failed_iteration_is_gone_before_the_next() -> None:
    def main(rank: int, world_size: int) -> Any:
        import weakref

        class Model:
            pass

        models: list[Any] = []
        alive = []

        @Wrapper()
        def train(call: CallWrapper | None = None) -> None:
            alive.append([model() is not None for model in models])
            model = Model()
            model.itself = model  # type: ignore[attr-defined]  # a cycle
            models.append(weakref.ref(model))
            assert call is not None
            if call.iteration < 2:
                raise ValueError("holds the model in its traceback")

        train()
        return alive

    assert rank_values(main, 1) == [[[], [False], [False, False]]]


def test_a_store_of_torch_will_do(tmp_path: Path) -> None:
    def main(rank: int, world_size: int, path: str) -> Any:
        @Wrapper(store_factory=FileStore, store_kwargs={"file_name": path, "world_size": world_size})
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0 and rank == 0:
                raise ValueError("fault")
            return call.iteration

        return train()

    assert rank_values(main, 2, str(tmp_path / "store")) == [1, 1]


# -- leaving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit", "RestartAbort"])
def test_a_rank_that_leaves_is_restarted_without(kind: str) -> None:
    def main(rank: int, world_size: int) -> Any:
        calls = Calls()
        errors = {"KeyboardInterrupt": KeyboardInterrupt(), "SystemExit": SystemExit(3), "RestartAbort": RestartAbort()}

        @Wrapper(terminate=calls.current("terminate"), finalize=calls.current("finalize"))
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if rank == 0:
                raise errors[kind]
            return call.iteration, numbers(), call.state.rank, call.state.initial_rank

        return outcome(train), calls.made

    (left, left_made), (result, made) = rank_values(main, 2)
    assert left[0] == kind
    assert left[2] == "NoneType"  # no cause
    assert left_made == [("terminate", 0, None, None, (), True)]
    assert result == (1, ("0", "1"), 0, 1)
    assert made == [("finalize", 0, 1, None, ((0, "BASE_EXCEPTION"),), True)]


def test_the_exit_code_of_sys_exit_survives() -> None:
    def main(rank: int, world_size: int) -> None:
        Wrapper()(lambda: sys.exit(7))()

    rank_values(main, 1, returncodes={0: 7})


def test_a_rank_whose_abort_hook_hangs_is_killed_at_the_hard_limit() -> None:
    """Its main thread runs on all the time, and would otherwise keep the others waiting."""

    def main(rank: int, world_size: int) -> Any:
        def hangs(state: FrozenState) -> FrozenState:
            if rank == 1:
                threading.Event().wait()
            return state

        limits = {**SHORT, **seconds(hard_timeout=3.5, termination_grace_time=0.1)}

        @Wrapper(abort=hangs, **limits)
        def train(call: CallWrapper | None = None) -> int | None:
            assert call is not None
            if rank == 0 and call.iteration == 0:
                raise ValueError("a fault")
            while call.state.world_size == 2:
                time.sleep(0.05)
            return call.state.world_size

        return train()

    assert rank_values(main, 2, returncodes={1: -signal.SIGTERM})[0] == 1


def test_a_rank_that_is_killed_while_it_sends_a_large_tensor() -> None:
    """Gloo does not end the wait of the receiver, whose rank would be killed at the hard limit, too."""

    def main(rank: int, world_size: int) -> Any:
        import torch
        import torch.distributed as dist

        @Wrapper(**{**SHORT, **seconds(soft_timeout=15.0)})  # a busy machine may take seconds for the transfer
        def train(call: CallWrapper | None = None) -> int | None:
            assert call is not None
            if call.state.world_size == 1:
                return call.iteration
            dist.init_process_group("gloo")
            pids: list[Any] = [None] * world_size
            dist.all_gather_object(pids, os.getpid())
            tensor = torch.full((64 << 20,), float(rank == 1))

            def kill_the_sender() -> None:
                while tensor[0] == 0:
                    pass
                os.kill(pids[1], signal.SIGKILL)

            if rank == 0:
                threading.Thread(target=kill_the_sender, daemon=True).start()
            dist.broadcast(tensor, 1)
            return None

        return train()

    assert rank_values(main, 2, returncodes={1: -signal.SIGKILL}) == [1, None]


def test_restart_abort_on_all_ranks_ends_the_job() -> None:
    def main(rank: int, world_size: int) -> Any:
        ran = []

        @Wrapper(initialize=RetryController(max_iterations=2))
        def train(call: CallWrapper | None = None) -> None:
            assert call is not None
            ran.append(call.iteration)
            if rank == 0:
                raise ValueError("again and again")

        return outcome(train), ran

    began = time.monotonic()
    for (kind, text, _), ran in rank_values(main, 2):
        assert kind == "RestartAbort"
        assert "max_iterations=2" in text
        assert ran == [0, 1]
    assert time.monotonic() - began < 20  # nobody waited for a barrier


def test_too_few_ranks_end_the_job() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(initialize=RetryController(min_world_size=2))
        def train() -> None:
            if rank == 0:
                sys.exit("gone")

        return outcome(train)

    left, ended = rank_values(main, 2)
    assert left[:2] == ("SystemExit", "gone")
    assert ended[0] == "RestartAbort"
    assert "min_world_size=2" in ended[1]


def test_a_rank_that_fails_too_often_leaves() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(health_check=FaultCounter(max_rank_faults=1))
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if rank == 1:
                raise ValueError("again")
            if call.state.world_size == 2:
                time.sleep(60)
            return call.iteration, call.state.world_size

        return outcome(train)

    result, (kind, text, cause) = rank_values(main, 2)
    assert result == (2, 1)
    assert (kind, cause) == ("HealthCheckError", "FaultCounterExceeded")
    assert "failed in 2 iterations" in text


def test_hooks_that_raise() -> None:
    """Before the function that is a fault like any other; in `abort` and `completion` it is logged; else one leaves."""

    def main(rank: int, world_size: int) -> Any:
        finalized = []

        def initialize(state: FrozenState) -> FrozenState:
            if state.iteration == 0 and rank == 0:
                raise ValueError("not yet")
            return state

        def health_check(state: FrozenState) -> FrozenState:
            if state.iteration == 1 and rank == 0 and state.fn_exception is None and not finalized[1:]:
                raise OSError("ill")
            return state

        def finalize(state: FrozenState) -> FrozenState:
            finalized.append(type(state.fn_exception).__name__)
            if state.iteration == 2 and rank == 1:
                raise RuntimeError("cannot clean up")
            return state

        def fails(state: FrozenState) -> FrozenState:
            raise LookupError(f"hook of rank {rank}")

        def terminate(state: FrozenState) -> FrozenState:
            assert state.mode is Mode.TERMINATED
            raise LookupError("terminate")

        @Wrapper(
            initialize=initialize,
            health_check=health_check,
            abort=fails,
            finalize=finalize,
            completion=fails,
            terminate=terminate,
        )
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if call.iteration == 2:
                if rank == 0:  # alone: who is interrupted before its own exception has none
                    raise ValueError("on rank 0")
                time.sleep(60)
            return call.iteration, call.state.world_size

        with logged() as lines:
            return outcome(train), finalized, [line for line in lines if "hook fail" in line]

    (result, finalized, lines), (left, _, _) = rank_values(main, 2)
    assert result == (3, 1)
    assert finalized == ["ValueError", "HealthCheckError", "ValueError"]
    assert len([line for line in lines if "abort hook" in line]) == 3
    assert len([line for line in lines if "completion hook" in line]) == 1
    assert left[:2] == ("LookupError", "terminate")


def test_when_nobody_would_work_all_leave_at_once() -> None:
    """The last ones, between two iterations: there is nobody whom they could wait for."""

    def main(rank: int, world_size: int) -> Any:
        @Wrapper(rank_assignment=Compose(ActiveWorldSizeDivisibleBy(2), ShiftRanks()))
        def train() -> None:
            if rank == 0:
                sys.exit("gone")
            time.sleep(60)

        return outcome(train)

    left, other = rank_values(main, 2)
    assert left[0] == "SystemExit"
    assert other[0] == "RestartError"
    assert "no rank would run" in other[1]


# -- spares ------------------------------------------------------------------------------------------------------------


def test_spares_wait_return_nothing_and_take_over() -> None:
    def main(rank: int, world_size: int) -> Any:
        ran = []

        @Wrapper(rank_assignment=Compose(MaxActiveWorldSize(2), ShiftRanks()))
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            ran.append((call.iteration, numbers(), call.state.active_rank, call.state.world_size))
            if call.iteration == 0:
                if rank == 0:
                    sys.exit("gone")
                time.sleep(60)
            return call.state.active_rank

        return outcome(train), ran, numbers()

    (left, ran_0, _), (one, ran_1, _), (two, ran_2, _), (three, ran_3, variables) = rank_values(main, 4)
    assert left[0] == "SystemExit"
    assert ran_0 == [(0, ("0", "2"), 0, 4)]
    assert ran_1 == [(0, ("1", "2"), 1, 4), (1, ("0", "2"), 0, 3)]
    assert ran_2 == [(1, ("1", "2"), 1, 3)]
    assert ran_3 == []
    assert (one, two, three) == (0, 1, None)
    assert variables == ("2", "2")  # the dense rank, which no active rank has


# -- functions that do not cooperate -----------------------------------------------------------------------------------


def test_who_swallows_the_exception_is_named_and_gets_it_again() -> None:
    def main(rank: int, world_size: int) -> Any:
        swallowed = []

        @Wrapper(**SHORT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration > 0:
                return call.iteration
            if rank == 0:
                raise ValueError("fault")
            while True:
                try:
                    time.sleep(0.01)
                except BaseException as error:
                    swallowed.append(type(error).__name__)
                    if len(swallowed) == 2:
                        raise
            return -1

        with logged() as lines:
            return train(), swallowed, lines

    (first, _, _), (result, swallowed, lines) = rank_values(main, 2)
    assert (first, result) == (1, 1)
    assert swallowed == ["RankShouldRestart", "RankShouldRestart"]
    named = [line for line in lines if "was swallowed near" in line]
    assert len(named) == 1
    assert f"{__file__}:" in named[0]
    assert named[0].endswith("in train; let BaseException pass there")
    again = [line for line in lines if "throwing it again" in line]
    assert len(again) == 1
    assert "in train" in again[0]


def test_who_swallows_it_for_ever_is_killed() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(**{**SHORT, **seconds(hard_timeout=3.5)})
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if rank == 0:
                if call.iteration == 0:
                    raise ValueError("fault")
                return call.state.world_size
            while True:
                with contextlib.suppress(BaseException):
                    time.sleep(0.01)

        return train()

    assert rank_values(main, 2, returncodes={1: -signal.SIGTERM}) == [1, None]


def test_a_hang_is_ended_and_its_rank_goes_on() -> None:
    """Also one that makes progress for the interpreter, but promised pings."""

    def main(rank: int, world_size: int) -> Any:
        reasons = []

        @Wrapper(**SHORT)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            reasons.append([(r.rank, r.interruption.name) for r in call.state.interruptions])
            if call.iteration == 0 and rank == 1:
                time.sleep(60)
            if call.iteration == 1 and rank == 0:
                call.ping()
                while True:
                    pass
            if call.iteration < 2:
                while True:
                    time.sleep(0.05)
            return call.iteration

        return train(), reasons

    for result, reasons in rank_values(main, 2):
        assert result == 2
        assert reasons == [[], [(1, "SOFT_TIMEOUT")], [(0, "SOFT_TIMEOUT")]]


def test_hang_protection_can_be_switched_off() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(**{**SHORT, **seconds(soft_timeout=2.0, hard_timeout=2.5)})
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            with call.disable_hang_protection(), call.disable_hang_protection():
                time.sleep(3.5)
            time.sleep(0.1)
            return call.iteration

        return train()

    assert rank_values(main, 1) == [0]


def test_no_restart_inside_an_atomic_section() -> None:
    def main(rank: int, world_size: int) -> Any:
        whole = []

        @Wrapper(store_kwargs={"timeout": timedelta(seconds=30)})
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if call.iteration > 0:
                return call.iteration
            if rank == 0:
                call.base_store.wait(["inside"], timedelta(seconds=20))
                raise ValueError("while the other one is inside")
            with contextlib.ExitStack() as stack:
                for _ in range(2):
                    stack.enter_context(call.atomic())
                call.base_store.set("inside", "1")
                call.agreement(0, 2).wait_outcome(20.0)  # the restart has begun
                end = time.monotonic() + 0.3
                while time.monotonic() < end:
                    pass
                whole.append(True)
            time.sleep(60)
            return None

        return train(), whole

    assert rank_values(main, 2) == [(1, []), (1, [True])]


# -- blame -------------------------------------------------------------------------------------------------------------


def _blamed(rank: int, world_size: int, folder: Path) -> Any:
    """Rank 2 is killed while all others wait for it in gloo, whose connections break. Returns who counted a fault."""
    counted: list[str] = []

    def finalize(state: FrozenState) -> FrozenState:
        if state.fn_exception is not None:
            counted.append(str(state.fn_exception))
        return state

    @Wrapper(finalize=finalize, health_check=FaultCounter(max_rank_faults=0))
    def train(call: CallWrapper | None = None) -> tuple[int, list[str]]:
        import torch
        import torch.distributed as dist

        assert call is not None
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if call.iteration == 0:
            (folder / f"added-{rank}").touch()
            if rank == 2:
                wait_until(lambda: len(list(folder.glob("added-*"))) == world_size, "all to be there", 20)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.recv(torch.empty(1), src=2)
        return dist.get_world_size(), counted

    return train()


def test_a_connection_to_a_rank_that_died_is_no_fault_of_who_lost_it(tmp_path: Path) -> None:
    with launch_ranks(_blamed, 4, tmp_path, init_process_group=False) as ranks:
        results = ranks.wait(60, {2: -signal.SIGKILL})
    assert [result.value for result in results if result.value is not None] == [(3, [])] * 3


# -- what is not a rank ------------------------------------------------------------------------------------------------


def test_a_forked_child_that_exits_is_no_rank() -> None:
    def main(rank: int, world_size: int) -> Any:
        codes = []

        @Wrapper()
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            for leave in (lambda: sys.exit(7), lambda: sys.exit("a text"), lambda: 1 / 0, lambda: None):
                child = os.fork()
                if child == 0:
                    leave()
                    return 100  # it returns from the function
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return call.iteration

        return train(), codes

    assert rank_values(main, 2) == [(0, [7, 1, 1, 0])] * 2


def test_another_thread_than_the_main_one_is_refused() -> None:
    def main(rank: int, world_size: int) -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(outcome(Wrapper()(lambda: 1))))
        thread.start()
        thread.join()
        return results

    ((kind, text, _),) = rank_values(main, 1)[0]
    assert kind == "ValueError"
    assert "call the wrapped function on the main thread" in text
    assert "such as Ray Train, leave the wrapper out" in text


@pytest.mark.parametrize("who", [(0, 1), (1,)])
def test_a_hook_that_raises_at_the_very_beginning_ends_the_rank_at_once(who: tuple[int, ...]) -> None:
    def main(rank: int, world_size: int) -> Any:
        def assign(ctx: Any) -> Any:
            if rank in who and ctx.state.iteration == 0 and ctx.state.world_size == 2:
                raise LookupError("no such topology")
            return ShiftRanks()(ctx)

        begin = time.monotonic()
        result = outcome(Wrapper(rank_assignment=assign)(lambda: "done"))
        return result, time.monotonic() - begin

    for rank, (result, took_s) in enumerate(rank_values(main, 2)):
        assert result == (("LookupError", "no such topology", "NoneType") if rank in who else "done")
        assert took_s < 30  # of a barrier timeout of 120 s


def test_nothing_of_the_store_is_left_when_the_call_is_over() -> None:
    def main(rank: int, world_size: int) -> Any:
        import weakref

        import torch.distributed as dist

        seen: list[Any] = []

        @Wrapper()
        def train(call: CallWrapper | None = None) -> None:
            assert call is not None
            dist.init_process_group("gloo")
            dist.barrier()  # the other rank may still be connecting, and would fail when this one closes its end
            dist.destroy_process_group()
            seen[:] = weakref.ref(call.store), weakref.ref(call.base_store), os.environ["MASTER_PORT"]

        train()
        gc.collect()
        store, base_store, port = seen
        listens = subprocess.run(["ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True).stdout
        return store() is None, base_store() is None, listens

    assert rank_values(main, 2) == [(True, True, "")] * 2


def test_locals_of_the_failed_function_are_freed_before_finalize_and_not_by_the_collector() -> None:
    """The collector may free what an object needs in its destructor before the object itself."""

    def main(rank: int, world_size: int) -> Any:
        import torch.distributed as dist

        made: list[str] = []
        collecting = [False]

        class Loader:
            def __init__(self, name: str) -> None:
                self.name = f"{name} {rank}"

            def __del__(self) -> None:
                made.append(f"{self.name} {'in a collection' if collecting[0] else 'freed'}")

        def fail(loader: Loader) -> None:
            inner = Loader("inner")
            raise ValueError(f"fault of {inner.name}")

        def finalize(state: FrozenState) -> FrozenState:
            made.append(f"finalize, {state.fn_exception}")
            return state

        @Wrapper(finalize=finalize)
        def train(call: CallWrapper | None = None) -> list[str]:
            assert call is not None
            dist.init_process_group("gloo")
            loader = Loader("loader")
            if call.iteration == 0:
                try:
                    if rank == 0:
                        fail(loader)
                    dist.barrier()
                except Exception as error:
                    raise RuntimeError("in training") from error
            dist.barrier()  # or one ends the group while the other still connects
            dist.destroy_process_group()
            return list(made)

        def watch(phase: str, info: dict[str, int]) -> None:
            collecting[0] = phase == "start"

        gc.callbacks.append(watch)
        return train()

    ranks = rank_values(main, 2)
    assert sorted(ranks[0][:2]) == ["inner 0 freed", "loader 0 freed"]
    assert ranks[0][2:] == ["finalize, in training"]
    assert ranks[1][0] == "loader 1 freed"
    assert ranks[1][1].startswith("finalize, ")


def test_workers_of_a_loader_are_ended_and_not_waited_for() -> None:
    def main(rank: int, world_size: int) -> Any:
        import torch
        from torch.utils.data import DataLoader
        from torch.utils.data import dataloader as implementation

        collecting = [False]
        made: list[bool] = []
        end = implementation._MultiProcessingDataLoaderIter._shutdown_workers  # type: ignore[attr-defined]

        def ended(self: Any) -> None:
            made.append(collecting[0])
            end(self)

        implementation._MultiProcessingDataLoaderIter._shutdown_workers = ended  # type: ignore[attr-defined]

        @Wrapper()
        def train(call: CallWrapper | None = None) -> list[bool]:
            assert call is not None
            batches = iter(DataLoader(torch.arange(64), batch_size=4, num_workers=2))  # type: ignore[arg-type]
            next(batches)
            if call.iteration < 2:
                raise ValueError("fault")
            return list(made)

        def watch(phase: str, info: dict[str, int]) -> None:
            collecting[0] = phase == "start"

        gc.callbacks.append(watch)
        return train()

    assert rank_values(main, 1) == [[False, False]]


def test_fencing_tokens_grow_and_are_the_same_on_all_ranks() -> None:
    def main(rank: int, world_size: int) -> Any:
        tokens = []

        @Wrapper()
        def train(call: CallWrapper | None = None) -> None:
            assert call is not None
            tokens.append(call.fencing_token)
            if call.iteration < 2 and rank == 0:
                raise ValueError("fault")
            while call.iteration < 2:
                time.sleep(0.01)

        train()
        train()
        return tokens

    first, second = rank_values(main, 2)
    assert first == second
    assert len(set(first)) == 6
    assert first == sorted(first)
