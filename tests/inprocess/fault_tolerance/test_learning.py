"""Limits that ranks learn together."""

import json
import os
from pathlib import Path

import pytest

from inprocess.fault_tolerance import progress_tracker
from inprocess.fault_tolerance.learned_limits import exchange_measured
from inprocess.fault_tolerance.progress_tracker import TrainingProgressTracker
from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalc
from tests.support import run_ranks


def _learn(rank: int, world_size: int, folder: str) -> list[object]:
    import os
    import time

    from inprocess.fault_tolerance import FaultToleranceConfig, RankMonitorClient
    from inprocess.fault_tolerance.rank_monitor_server import RankMonitorServer

    path = os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = f"{folder}/{rank}.sock"
    config = FaultToleranceConfig(rank_section_timeouts={"step": 60.0, "save": 60.0}, rank_heartbeat_timeout=60.0)
    found: list[object] = []
    with RankMonitorServer.run_in_subprocess(config, path):
        client = RankMonitorClient()
        client.init_workload_monitoring()
        found.append(client.calculate_and_set_section_timeouts(skip_if_not_ready=True))
        found.append(client.calculate_and_set_hb_timeouts(skip_if_not_ready=True))
        for _ in range(2):
            client.send_heartbeat()
            with client.section("step"):
                time.sleep(0.1 + 0.3 * rank)
        found.append(client.calculate_and_set_section_timeouts(["step"]))
        found.append(client.calculate_and_set_hb_timeouts())
        found.append(client.state_dict())
        client.shutdown_workload_monitoring()
        again = RankMonitorClient()
        again.load_state_dict(client.state_dict())
        again.init_workload_monitoring()
        found.append(again.state_dict())
        assert again.section_timeouts is not None
        found.append(again.section_timeouts.section["save"])
        again.shutdown_workload_monitoring()
    return found


def test_learned_limits_are_equal_on_all_ranks_and_survive(tmp_path: Path) -> None:
    first, second = [
        result.value for result in run_ranks(_learn, 2, str(tmp_path), timeout=50, init_process_group=True)
    ]
    assert first == second
    assert first[:4] == [False, False, True, True]
    assert first[4] == first[5] == json.loads(json.dumps(first[4]))
    assert first[6] == 60.0
    section = first[4]["current_timeouts"]["section"]
    assert section["calculated_sections"] == ["step"]
    assert 2.0 <= section["section"]["step"] < 10.0  # five times the slower rank's


class _Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_an_exchange_uses_an_earlier_checkpoint_with_values_of_all_ranks() -> None:
    store = _Store()
    calcs = [TimeoutsCalc(["a"], start_time=0.0) for _ in range(2)]
    for rank, calc in enumerate(calcs):
        calc.update_on_section_open("a", 1.0)
        calc.update_on_section_close("a", 2.0 + rank)

    def exchange(rank: int, checkpoint: int) -> bool:
        return exchange_measured(store, calcs[rank], checkpoint, rank, 2)

    assert not exchange(0, 1)
    assert not exchange(0, 2)  # rank 1 has not written for 1
    assert not exchange(1, 1)
    assert exchange(1, 2)
    assert exchange(0, 3)
    limits = [calc.get_section_timeouts(["a"], False) for calc in calcs]
    assert limits[0] == limits[1]
    assert limits[0].section["a"] == 10.0


def test_no_progress_gives_up(tmp_path: Path) -> None:
    file = tmp_path / "latest"
    tracker = TrainingProgressTracker(str(file), max_no_progress_cycles=3)
    file.write_text("5\n")
    tracker.analyze_previous_cycle()
    assert tracker.no_progress_cycles == 0
    for _ in range(3):
        assert not tracker.should_terminate_early()
        tracker.analyze_previous_cycle()
    assert tracker.should_terminate_early()
    file.write_text("not a number")
    tracker.analyze_previous_cycle()
    assert tracker.should_terminate_early()
    file.write_text("6")
    tracker.analyze_previous_cycle()
    assert not tracker.should_terminate_early()
    assert not TrainingProgressTracker(None).should_terminate_early()


def test_a_file_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_tracker, "_READ_TIMEOUT_S", 0.1)
    file = tmp_path / "iteration"
    file.write_text("7")
    tracker = TrainingProgressTracker(str(file))
    file.unlink()
    os.mkfifo(file)  # like a file on a server that is down: `open` waits
    assert tracker.read_iteration() == 7
    os.close(os.open(file, os.O_RDWR))  # the reader ends


def test_progress_of_a_checkpoint_root(tmp_path: Path) -> None:
    tracker = TrainingProgressTracker(str(tmp_path))
    assert tracker.read_iteration() == 0
    for name in ("step_3", "step_12", "step_20.tmp"):
        (tmp_path / name).mkdir()
    assert tracker.read_iteration() == 12
