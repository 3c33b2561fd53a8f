"""Sections under the in-process wrapper: one monitor process per rank watches both."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import pytest

from inprocess import CallWrapper, Wrapper
from inprocess.fault_tolerance import FaultToleranceConfig, RankMonitorClient, RankMonitorClientError
from inprocess.monitor_process.supervised import MonitorProcess
from inprocess.sections.gate import SECTION_BOARD_ENV
from tests.inprocess.restarting import seconds
from tests.support import rank_values

QUICK = seconds(progress_watchdog_interval=0.1, monitor_thread_interval=0.2, monitor_process_interval=0.2)
PATIENT = {**QUICK, **seconds(soft_timeout=45.0, hard_timeout=50.0, last_call_wait=0.0)}


def hang() -> None:
    while True:
        time.sleep(60)


def test_a_late_section_restarts_the_job() -> None:
    def main(rank: int, world_size: int) -> Any:
        found: list[Any] = []
        kept = RankMonitorClient()  # lives through the restart; rank 1 makes a new one each time

        @Wrapper(sections=FaultToleranceConfig(rank_section_timeouts={"a": 1.0, "b": 60.0}), **PATIENT)
        def train(call: CallWrapper | None = None) -> None:
            assert call is not None
            client = kept if rank == 0 else RankMonitorClient()
            if not client.is_initialized:
                client.init_workload_monitoring()
            found.append((call.iteration, [(r.rank, r.interruption.name) for r in call.state.interruptions]))
            if call.iteration == 0:
                learned = {"section": {"b": 30.0}, "calculated_sections": ["b"]}
                client.load_state_dict({"current_timeouts": {"section": learned}})
                client.start_section("b")
                call.state.store.arrive("begun", str(rank))
                if rank == 1:  # late when all ranks have begun
                    while len(call.state.store.members("begun")) < world_size:
                        pass
                    client.start_section("a")
                try:
                    hang()
                finally:
                    client.end_section("b")  # dropped, and no error
            assert client.section_timeouts is not None
            found.append((client.section_timeouts.section["b"], len(client._recorder.open_sections)))
            client.end_all_sections()
            with client.section("a"), client.section("b"):
                found.append(next(r.summary for r in call.state.interruptions))
            for name in ("a", "b"):
                client.start_section(name)
            client.shutdown_workload_monitoring()

        begun = time.monotonic()
        train()
        return found, time.monotonic() - begun, os.environ.get(SECTION_BOARD_ENV)

    for found, taken, variable in rank_values(main, 2):
        assert found[0] == (0, [])
        assert found[1] == (1, [(1, "SOFT_TIMEOUT")])
        assert found[2][0] == 30.0
        assert "in section 'a'" in found[3]
        assert taken < 40
        assert variable is None


def test_a_section_that_outlives_the_restart_ends_the_rank() -> None:
    def main(rank: int, world_size: int) -> Any:
        limits = seconds(soft_timeout=44.0, hard_timeout=45.0, last_call_wait=0.0, termination_grace_time=0.1)

        @Wrapper(sections=FaultToleranceConfig(rank_section_timeouts={"a": 0.5}), **{**QUICK, **limits})
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0:
                client = RankMonitorClient()
                client.init_workload_monitoring()
                if rank == 1:
                    client.start_section("a")
                    mutex = ctypes.create_string_buffer(64)
                    for _ in range(2):  # the second time for ever, with the GIL, and no signal ends it
                        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
                hang()
            return call.state.world_size or 0

        begun = time.monotonic()
        return train(), time.monotonic() - begun

    size, taken = rank_values(main, 2, returncodes={1: None})[0]
    assert size == 1
    assert taken < 40  # long before the limits of progress


@pytest.mark.parametrize("ladder", ["limit", "progress"])
def test_a_slow_rank_that_is_alive(ladder: str) -> None:
    def main(rank: int, world_size: int, ladder: str) -> Any:
        config = FaultToleranceConfig(rank_section_timeouts={"a": 0.3}, ladder=ladder)

        @Wrapper(sections=config, **PATIENT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0:
                client = RankMonitorClient()
                client.init_workload_monitoring()
                with client.section("a"):
                    end = time.monotonic() + 1.0
                    while time.monotonic() < end:
                        pass
                client.shutdown_workload_monitoring()
            return call.iteration

        return train()

    assert rank_values(main, 1, ladder) == [0 if ladder == "progress" else 1]


def test_without_hang_protection_the_clocks_stand_still() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(sections=FaultToleranceConfig(rank_section_timeouts={"a": 2.5}), **PATIENT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0:
                client = RankMonitorClient()
                client.init_workload_monitoring()
                client.start_section("a")
                with call.disable_hang_protection(), call.disable_hang_protection():
                    time.sleep(4.0)
                client.end_section("a")
                client.start_section("a")
                hang()
            return call.iteration

        begun = time.monotonic()
        return train(), time.monotonic() - begun

    ((iteration, taken),) = rank_values(main, 1)
    assert iteration == 1
    assert taken > 6.0


def test_another_monitor_process_goes_on_with_the_same_board() -> None:
    """The section is late before the new process has started."""

    def main(rank: int, world_size: int) -> Any:
        @Wrapper(sections=FaultToleranceConfig(rank_section_timeouts={"a": 0.2}), **PATIENT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0:
                monitor: MonitorProcess = call.monitor_process
                client = RankMonitorClient()
                client.init_workload_monitoring()
                if rank == 1:  # rank 0's monitor process hosts the store
                    client.start_section("a")
                    os.kill(monitor.pid, signal.SIGKILL)
                hang()
            return call.iteration

        return train()

    assert rank_values(main, 2, timeout=50.0) == [1, 1]


def test_one_client_at_a_time() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(sections=FaultToleranceConfig(rank_section_timeouts={"a": 60.0}), **PATIENT)
        def train() -> str:
            first, second = RankMonitorClient(), RankMonitorClient()
            first.init_workload_monitoring()
            try:
                second.init_workload_monitoring()
            except RankMonitorClientError as error:
                text = str(error)
            first.shutdown_workload_monitoring()
            second.init_workload_monitoring()
            second.start_section("a")
            return text

        return train()

    assert "another client" in rank_values(main, 1)[0]
