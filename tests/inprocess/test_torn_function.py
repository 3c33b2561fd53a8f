"""What an interrupted function may leave behind, and what may come while it is interrupted, on real ranks."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

from inprocess import CallWrapper, FrozenState, Wrapper
from inprocess.deferred_log import DeferredLog
from inprocess.exception import RestartAbort
from tests.inprocess.restarting import PATIENT, logged
from tests.support import LeakCheck, rank_values


def test_each_iteration_begins_with_the_modes_of_the_first() -> None:
    def main(rank: int, world_size: int) -> Any:
        import torch
        import torch.utils._device

        from inprocess.modes import Modes

        def leave_modes() -> None:
            """Change modes, as a function that is interrupted between entering and leaving a context."""
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_float32_matmul_precision("medium")
            for context in (
                torch.no_grad(),
                torch.inference_mode(),
                torch.autocast("cpu", dtype=torch.float16),
                torch.autograd.set_detect_anomaly(True),
                torch.autograd.graph.save_on_cpu(),
                torch.backends.cudnn.flags(enabled=False),
                torch.device("cpu"),
            ):
                context.__enter__()

        def finalize(state: FrozenState) -> FrozenState:
            assert torch.is_grad_enabled()
            return state

        @Wrapper(finalize=finalize)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if call.iteration == 0:
                leave_modes()
                raise ValueError("fault")
            return before.restore(), str((torch.ones(2, requires_grad=True) * 2).sum())

        before = Modes()
        before.record()
        return train()

    assert rank_values(main, 1) == [([], "tensor(4., grad_fn=<SumBackward0>)")]


def test_ctrl_c_while_a_fault_is_handled_ends_the_call_and_nothing_is_thrown_later() -> None:
    def main(rank: int, world_size: int) -> Any:
        interrupted = threading.Event()

        def abort(state: FrozenState) -> FrozenState:
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.wait(20)
            return state

        @Wrapper(abort=abort, **PATIENT)
        def train() -> None:
            raise ValueError("fault")

        def note(number: int, frame: Any) -> None:
            interrupted.set()
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, note)
        try:
            train()
        except BaseException as error:
            kind = type(error).__name__
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        return kind, [thread.name for thread in threading.enumerate() if "monitor" in thread.name]

    assert rank_values(main, 1) == [("KeyboardInterrupt", [])]


@pytest.mark.parametrize("kind", [RestartAbort, SystemExit])
def test_an_abort_hook_can_make_its_rank_leave(kind: type[BaseException]) -> None:
    def main(rank: int, world_size: int) -> Any:
        def abort(state: FrozenState) -> FrozenState:
            if rank == 1:
                raise kind("enough")
            return state

        @Wrapper(abort=abort, **PATIENT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0 and rank == 0:
                raise ValueError("fault")
            while call.state.world_size == 2:
                time.sleep(0.05)
            return call.state.world_size

        try:
            return train()
        except BaseException as error:
            return type(error).__name__, str(error)

    assert rank_values(main, 2) == [1, (kind.__name__, "enough")]


def test_text_that_is_not_unicode_is_a_fault_like_any_other() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0:
                raise FileNotFoundError("no file caf\udce9")
            return call.iteration

        return train()

    assert rank_values(main, 1) == [1]


def test_a_log_that_no_process_reads_does_not_hold_up_a_restart() -> None:
    """The function waits in `logging` with the lock of the handler, which the messages of the restart need, too."""

    def main(rank: int, world_size: int) -> Any:
        read, write = os.pipe()
        handler = logging.StreamHandler(os.fdopen(write, "w", buffering=1))
        logging.getLogger().addHandler(handler)

        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> tuple[int, bool]:
            assert call is not None
            if call.iteration == 0 and rank == 0:
                while True:
                    logging.getLogger("training").error("x" * 4096)
            if call.iteration == 0:
                time.sleep(0.3)  # rank 0 has filled its pipe then, or is filling it; both are right
                raise ValueError("fault")
            return call.iteration, handler.lock is not None and handler.lock._is_owned()  # type: ignore[attr-defined]

        result = train()
        os.close(read)
        logging.raiseExceptions = False
        return result

    assert rank_values(main, 2) == [(1, False), (1, False)]


def test_errors_of_signal_handlers_in_the_restart_itself_are_logged() -> None:
    def main(rank: int, world_size: int) -> Any:
        def fails(number: int, frame: Any) -> None:
            raise RuntimeError("a worker was killed")

        signal.signal(signal.SIGUSR1, fails)

        def again(state: FrozenState) -> FrozenState:
            signal.raise_signal(signal.SIGUSR1)
            return state

        @Wrapper(finalize=again, health_check=lambda state: again(state) if state.fn_exception else state, **PATIENT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0:
                signal.raise_signal(signal.SIGUSR1)
            return call.iteration

        with logged() as lines:
            result = train()
        failed = [line for line in lines if "the handler of signal" in line]
        return result, len(failed), signal.getsignal(signal.SIGUSR1) is fails

    assert rank_values(main, 1) == [(1, 2, True)]


def test_functions_whose_body_runs_later_are_refused() -> None:
    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    async def both() -> AsyncIterator[int]:
        yield 1

    class Called:
        async def __call__(self) -> None: ...

    for function in (coroutine, generator, both, functools.partial(coroutine), Called()):
        with pytest.raises(TypeError, match="returns before its body runs"):
            Wrapper()(function)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["group", "other exception", "return"])
def test_a_function_that_ends_otherwise_after_the_throw_is_not_waited_for(ending: str) -> None:
    """`soft_timeout` is longer than this test may take."""

    def main(rank: int, world_size: int) -> Any:
        async def wait() -> None:
            await asyncio.sleep(1000)

        async def group() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(wait())
                while True:
                    await asyncio.sleep(0.01)

        def run() -> None:
            if ending == "group":
                asyncio.run(group())
            try:
                time.sleep(1000)
            except BaseException as error:
                if ending == "other exception":
                    raise ValueError("of the cleaning up") from error

        @Wrapper(soft_timeout=timedelta(seconds=100), hard_timeout=timedelta(seconds=110))
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0 and rank == 0:
                raise ValueError("fault")
            if call.iteration == 0:
                run()
            return call.iteration

        return train()

    assert rank_values(main, 2) == [1, 1]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_come_in_their_order_with_their_tracebacks(leak_check: LeakCheck) -> None:
    log = logging.getLogger("inprocess.of_the_test")
    with logged() as lines, DeferredLog():
        for number in range(100):
            log.info("message %d", number)
        try:
            raise ValueError("of the test")
        except ValueError:
            log.exception("failed")
    assert lines == [*(f"INFO message {number}" for number in range(100)), "ERROR failed"]


def test_tracebacks_are_kept_and_their_frames_are_not(leak_check: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("inprocess.of_the_test")
    with DeferredLog():
        try:
            raise ValueError("of the test")
        except ValueError:
            log.exception("failed with %s", object())
    assert "ValueError: of the test" in caplog.text
    assert [record.exc_info for record in caplog.records] == [None]


def test_a_handler_that_blocks_holds_up_no_caller(leak_check: LeakCheck) -> None:
    entered, released = threading.Event(), threading.Event()
    taken: list[str] = []

    class Blocks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            entered.set()
            released.wait(60)
            taken.append(record.getMessage())

    logger, handler = logging.getLogger("inprocess"), Blocks()
    logger.addHandler(handler)
    try:
        deferred = DeferredLog(patience_s=0.05)
        with deferred:
            logger.error("first")
            entered.wait(60)
            logger.error("second")  # would wait for the lock of the handler
            deferred.flush()
            assert taken == []
            released.set()
    finally:
        released.set()
        logger.removeHandler(handler)
    until = time.monotonic() + 60
    while len(taken) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert taken == ["first", "second"]


def test_the_logger_is_as_before_afterwards(leak_check: LeakCheck) -> None:
    logger = logging.getLogger("inprocess")
    before = list(logger.handlers), logger.propagate
    with DeferredLog(), DeferredLog():
        assert not logger.propagate
    assert (list(logger.handlers), logger.propagate) == before
