"""What a trainer spends in checkpoints can be watched: as sections with time limits, for one."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.restart import report_sections
from inprocess.fault_tolerance import FaultToleranceConfig, RankMonitorClient
from inprocess.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR
from inprocess.fault_tolerance.rank_monitor_server import RankMonitorServer
from tests.ckpt.crash.killers import KillingWriter, with_writer
from tests.support import run_ranks

_WRITE = "ckpt.write"


class Client:
    """Takes sections like a `RankMonitorClient`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_initialized = True

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.seen.append(f"begin {name}")
        try:
            yield
        finally:
            self.seen.append(f"end {name}")

    def begin_in_background(self, name: str, at_ns: int) -> None:
        self.seen.append(f"begin {name}")


def test_phases_are_reported_around_what_they_name(tmp_path: Path) -> None:
    client = Client()
    state = {"w": torch.ones(10)}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        report_sections(checkpointer, client)  # type: ignore[arg-type]
        checkpointer.restore(state)
        assert client.seen == ["begin ckpt.restore", "end ckpt.restore"]
        client.seen.clear()
        request = checkpointer.save_request(state, 1)
        assert client.seen == ["begin ckpt.stage", "end ckpt.stage"]
        checkpointer.queue.schedule_async_request(request)
        client.seen.clear()
        checkpointer.maybe_finalize(blocking=True)
        assert [seen for seen in client.seen if _WRITE not in seen] == ["begin ckpt.finalize", "end ckpt.finalize"]
        client.seen.clear()
        client.is_initialized = False
        assert checkpointer.maybe_finalize() == []
        assert client.seen == []


def test_a_phase_that_fails_is_ended(tmp_path: Path) -> None:
    client = Client()
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        report_sections(checkpointer, client)  # type: ignore[arg-type]
        with pytest.raises(ckpt.StateError):
            checkpointer.save_request({"lock": object()}, 1)
    assert client.seen == ["begin ckpt.stage", "end ckpt.stage"]


class _StuckWriter(KillingWriter):
    """Writes nothing, for ever."""

    def _write(self, *_: Any) -> Any:
        threading.Event().wait()


class _Reports(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if '"section_timeout"' in record.getMessage():
            self.lines.append(json.loads(record.getMessage()))


def _is_stuck_once(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """The writer of the last rank hangs in the second save; three are made."""
    os.environ[FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR] = path = str(folder / f"{rank}.sock")
    reports = _Reports()
    logging.getLogger("inprocess").addHandler(reports)
    config = FaultToleranceConfig(rank_section_timeouts={_WRITE: 60.0}, rank_out_of_section_timeout=60.0)
    found: dict[str, Any] = {"errors": [], "finalized": []}
    with (
        RankMonitorServer.run_in_subprocess(config, path),
        ckpt.Checkpointer(folder / "root") as checkpointer,
    ):
        client = RankMonitorClient()
        client.init_workload_monitoring()
        report_sections(checkpointer, client)
        for step in range(1, 4):
            state = {"w": torch.full((1000,), float(step))}
            request = checkpointer.save_request(state, step)
            if step == 2 and rank == world_size - 1:
                request = with_writer(request, _StuckWriter)
            checkpointer.queue.schedule_async_request(request)
            try:
                found["finalized"] += checkpointer.maybe_finalize(blocking=True)
            except ckpt.CheckpointError as error:
                found["errors"].append((type(error).__name__, error.step, str(error)))
            if step == 1:
                learned = client.calculate_and_set_section_timeouts([_WRITE], calc_out_of_section=False)
                assert client.section_timeouts is not None
                found["learned"] = learned, client.section_timeouts.section[_WRITE]
            found.setdefault("writers", []).append(checkpointer.queue._writers[0].pid)
        found["restored"] = checkpointer.restore({"w": torch.zeros(1000)}), checkpointer.all_steps()
        client.shutdown_workload_monitoring()
    found["reports"] = reports.lines
    return found


def test_a_late_writer_costs_its_save_on_all_ranks_and_no_rank(tmp_path: Path) -> None:
    """The limit is the learned one: five times the first save, and at least a second."""
    results = run_ranks(_is_stuck_once, 2, tmp_path, timeout=50, init_process_group=True)
    first, last = [result.value for result in results]
    for found in (first, last):
        assert found["finalized"] == [1, 3]
        assert [(name, step) for name, step, _ in found["errors"]] == [("SaveAbandonedError", 2)]
        assert found["restored"] == (3, [1, 3])
        assert found["learned"] == first["learned"]
    assert first["learned"][0]
    assert 1.0 <= first["learned"][1] < 60.0
    assert last["writers"][0] != last["writers"][2]
    (report,) = last["reports"]
    assert (report["step"], report["rank"], report["pid"]) == ("abandon", 1, last["writers"][0])
    assert report["open"] == {}
    assert report["background"][_WRITE] >= last["learned"][1]
    assert "in section 'ckpt.write'" in report["summary"]
