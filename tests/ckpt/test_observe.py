"""`ckpt.observe`: what sinks see, and that they disturb nothing."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import events
from ckpt.observing import emit
from ckpt.sinks import JsonLines
from tests.support import run_ranks

_STATE = {"w": torch.ones(1000)}


def _of(seen: list[events.Event], kind: type[events.Event]) -> list[Any]:
    return [event for event in seen if type(event) is kind]


def _names(seen: list[events.Event]) -> list[str]:
    return [type(event).__name__ for event in seen]


def _started(step: int = 1) -> events.SaveStarted:
    return events.SaveStarted(1.0, 0, step)


def test_a_run_and_its_events(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    with ckpt.observe(seen.append), ckpt.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(_STATE, 1)
        checkpointer.save(_STATE, 2)
        checkpointer.restore(_STATE)
    saved = ["SaveStarted", "SaveStaged", "SavePublished"]
    assert _names(seen) == [*saved, *saved, "Retained", "Restored", "Closed"]
    begun, staged, published = seen[:3]
    assert isinstance(begun, events.SaveStarted)
    assert isinstance(staged, events.SaveStaged)
    assert isinstance(published, events.SavePublished)
    assert begun.time <= staged.time <= published.time
    assert staged.bytes == published.bytes >= 4000
    assert staged.stall_s == pytest.approx(staged.wait_s + staged.stage_s)
    assert staged.time - begun.time == pytest.approx(staged.stall_s, abs=0.01)
    parts = published.queue_s + published.write_s + published.sync_s
    assert parts <= published.seconds - staged.stall_s + 0.01
    assert published.bytes_per_s == pytest.approx(published.bytes / (published.write_s + published.sync_s))
    (retained,) = _of(seen, events.Retained)
    assert (retained.kept, retained.removed) == (1, (1,))
    (restored,) = _of(seen, events.Restored)
    assert (restored.step, restored.own_memory_bytes, restored.damaged) == (2, 4000, ())


@pytest.mark.parametrize("by_s", [1000, -1000])
def test_durations_do_not_change_when_the_clock_is_set(
    by_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[events.Event] = []
    now = time.time
    with ckpt.observe(seen.append), ckpt.Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now() + by_s)
            checkpointer.async_save(_STATE, 1)
        checkpointer.maybe_finalize(blocking=True)
    (published,) = _of(seen, events.SavePublished)
    assert abs(published.time - _of(seen, events.SaveStarted)[0].time) > 500
    assert 0 < published.write_s + published.sync_s <= published.seconds < 500


def test_what_fails_is_seen_with_its_cause(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    with ckpt.observe(seen.append), ckpt.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ckpt.StateError):
            checkpointer.save({"lock": threading.Lock()}, 1)
        checkpointer.save(_STATE, 2)
        with pytest.raises(ckpt.CheckpointExistsError):
            checkpointer.save(_STATE, 2)
        with pytest.raises(ckpt.CheckpointNotFoundError):
            checkpointer.restore(_STATE, 7)
    first, second = _of(seen, events.SaveAbandoned)
    assert (first.step, first.by_rank, first.kind) == (1, 0, "StateError")
    assert "lock" in first.cause
    assert (second.step, second.kind) == (2, "CheckpointExistsError")
    (failed,) = _of(seen, events.RestoreFailed)
    assert (failed.step, failed.kind) == (7, "CheckpointNotFoundError")
    assert Counter(_names(seen))["SaveStarted"] == 3


def test_a_step_that_is_damaged_is_named(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(_STATE, step)
    (file,) = (tmp_path / "step_00000002" / "packs").rglob("rank_*")
    file.write_bytes(b"\1" * file.stat().st_size)
    seen: list[events.Event] = []
    with ckpt.observe(seen.append), ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(_STATE) == 1
        with pytest.raises(ckpt.CheckpointCorruptError):
            checkpointer.restore(_STATE, 2)
    restored, failed, _closed = seen
    assert isinstance(restored, events.Restored)
    assert (restored.step, restored.storage_bytes, restored.damaged) == (1, 4000, (2,))
    assert isinstance(failed, events.RestoreFailed)
    assert (failed.step, failed.kind) == (2, "CheckpointCorruptError")


def test_a_request_that_is_not_scheduled_ends_with_the_checkpointer(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    with ckpt.observe(seen.append), ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_request(_STATE, 1)
    assert _names(seen) == ["SaveStarted", "SaveStaged", "SaveAbandoned", "Closed"]
    (left,) = _of(seen, events.SaveAbandoned)
    assert left.kind == "Left"


def test_a_request_that_is_executed_here(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    with ckpt.observe(seen.append), ckpt.Checkpointer(tmp_path) as checkpointer:
        for _ in range(2):
            try:
                checkpointer.save_request(_STATE, 1).execute_sync()
            except ckpt.CheckpointExistsError:
                seen.append(_started(2))
    saved = ["SaveStarted", "SaveStaged", "SavePublished"]
    assert [name for name in _names(seen) if name != "Retained"][:5] == [*saved, "SaveStarted", "SaveStaged"]
    assert Counter(_names(seen))["SavePublished"] == Counter(_names(seen))["SaveAbandoned"] == 1


def test_documents_are_read_back() -> None:
    for event in (
        events.Retained(1.5, 0, 3, (1, 2)),
        events.SaveAbandoned(1.5, 3, 7, None, "StorageError", "full"),
        events.Restored(1.5, 3, 7, 1, 2, 3, 0.5, (9,)),
    ):
        document = json.loads(json.dumps(events.to_document(event)))
        assert events.from_document(document | {"later": 1}) == event
    for wrong in ({}, {"event": "Event"}, {"event": "SaveStarted", "time": 1.0}):
        with pytest.raises(ValueError, match="not an event"):
            events.from_document(wrong)


def _save_and_log(rank: int, world_size: int, folder: Path) -> int:
    with (
        ckpt.observe(JsonLines(folder / "all.jsonl")),
        ckpt.observe(JsonLines(folder / "rank{rank}" / "own.jsonl")),
        ckpt.Checkpointer(folder / "root") as checkpointer,
    ):
        for step in range(1, 6):
            checkpointer.save({"w": torch.ones(1000)}, step)
    return rank


def test_ranks_share_a_file_of_json_lines(tmp_path: Path) -> None:
    run_ranks(_save_and_log, 2, tmp_path, init_process_group=True)
    lines = [events.from_document(json.loads(line)) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    own = [(tmp_path / f"rank{rank}" / "own.jsonl").read_text().splitlines() for rank in range(2)]
    assert len(lines) == len(own[0]) + len(own[1]) == 32
    assert {type(event).__name__ for event in lines} == {"SaveStarted", "SaveStaged", "SavePublished", "Closed"}
    assert all(json.loads(line)["rank"] == rank for rank in range(2) for line in own[rank])


def _steps(path: Path) -> list[Any]:
    """The steps of the lines that are events, and None for every other line."""
    found: list[Any] = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line)["step"])
        except ValueError:
            found.append(None)
    return found


def test_a_full_disk_costs_json_lines_only_what_did_not_fit(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sink = JsonLines(path)
        sink(_started(1))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        for step in (2, 3):
            with pytest.raises(OSError, match=r"part|large"):
                sink(_started(step))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sink(_started(4))
        sink(_started(5))

    path = tmp_path / "lines"
    child = multiprocessing.get_context("fork").Process(target=write, args=(path,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert _steps(path) == [1, None, 4, 5]


def test_json_lines_go_on_behind_a_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"event": "Save')
    for step in (1, 2):  # two starts of a job
        sink = JsonLines(path)
        sink(_started(step))
        sink.close()
    assert _steps(path) == [None, 1, 2]


def test_a_file_of_json_lines_that_is_rotated_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    sink = JsonLines(path)
    sink(_started(1))
    path.rename(tmp_path / "lines.1")
    sink(_started(2))
    path.unlink()
    sink(_started(3))
    sink.close()
    assert (_steps(tmp_path / "lines.1"), _steps(path)) == ([1], [3])


# -- sinks that misbehave ----------------------------------------------------------------------------------------------


def test_a_slow_sink_loses_events_and_others_lose_none(caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on = threading.Event(), threading.Event()
    slow: list[events.Event] = []
    fast: list[events.Event] = []

    def wait(event: events.Event) -> None:
        begun.set()
        assert go_on.wait(30)
        slow.append(event)

    with ckpt.observe(wait, limit=3) as handle, ckpt.observe(fast.append):
        emit(_started(0))
        assert begun.wait(30)
        for step in range(1, 10):
            emit(_started(step))
        assert handle.dropped == 6
        go_on.set()
    assert [event.step for event in slow if isinstance(event, events.SaveStarted)] == [0, 1, 2, 3]
    assert [event.dropped for event in slow if isinstance(event, events.EventsDropped)] == [6]
    assert len(fast) == 10
    assert len([record for record in caplog.records if "too slow" in record.message]) == 1


def test_a_sink_that_never_returns_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    handle = ckpt.observe(lambda event: go_on.wait(60))
    emit(_started())
    handle.close(timeout_s=0.1)
    assert "did not take its last" in caplog.text
    go_on.set()
    handle._thread.join(30)
    assert not handle._thread.is_alive()


class _Raises:
    closed = 0

    def __call__(self, event: events.Event) -> None:
        raise OSError("the disk is full")

    def close(self) -> None:
        self.closed += 1


def test_a_sink_that_raises_is_called_again_and_closed_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = _Raises()
    with ckpt.observe(sink) as handle:
        for step in range(3):
            emit(_started(step))
    handle.close()
    assert (handle.failed, handle.dropped, sink.closed) == (3, 0, 1)
    failures = [record for record in caplog.records if "failed" in record.message]
    assert len(failures) == 1
    assert failures[0].levelno == logging.WARNING


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_sink_that_raises_what_ends_threads_is_called_again(kind: type[BaseException]) -> None:
    seen: list[events.Event] = []

    def sink(event: events.Event) -> None:
        seen.append(event)
        if len(seen) == 1:
            raise kind

    with ckpt.observe(sink) as handle:
        emit(_started(0))
        emit(_started(1))
    assert (len(seen), handle.failed, handle.dropped) == (2, 1, 0)


def test_a_sink_closes_itself(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[events.Event] = []
    begun = threading.Event()

    def sink(event: events.Event) -> None:
        assert begun.wait(30)
        seen.append(event)
        handle.close()

    handle = ckpt.observe(sink)
    emit(_started(0))
    emit(_started(1))
    begun.set()
    handle._thread.join(30)
    assert not handle._thread.is_alive()
    emit(_started(2))
    assert (len(seen), caplog.records) == (2, [])


def test_a_sink_runs_in_the_context_of_the_event() -> None:
    name = contextvars.ContextVar("name", default="none")
    seen: list[str] = []
    with ckpt.observe(lambda event: seen.append(name.get())), ckpt.observe(lambda event: seen.append(name.get())):
        name.set("first")
        emit(_started())
        name.set("second")
    assert seen == ["first", "first"]


def test_an_end_that_is_emitted_again_is_delivered_once() -> None:
    seen: list[events.Event] = []
    end = events.SaveAbandoned(1.0, 0, 1, None, "Left", "")
    with ckpt.observe(seen.append):
        emit(end)
        emit(end)
        emit(events.SaveAbandoned(1.0, 0, 1, None, "Left", ""))  # another save
    assert len(seen) == 2


def test_a_forked_process_has_no_sinks(tmp_path: Path) -> None:
    with ckpt.observe(JsonLines(tmp_path / "lines")) as handle:
        pid = os.fork()
        if pid == 0:
            emit(_started())
            handle.close()
            os._exit(7 if handle.dropped else 0)
        assert os.waitpid(pid, 0)[1] == 0
    assert not (tmp_path / "lines").exists()


def test_without_a_sink_nothing_is_kept() -> None:
    ckpt.observe(lambda event: None).close()
    emit(_started())
    assert not ckpt.observing.is_observed()  # type: ignore[attr-defined]


def test_a_job_that_reads_an_opened_step_into_its_tensors_has_restored_it(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"w": torch.arange(1000.0), "more": {"b": torch.ones(10), "n": 3}}, 4)
    seen: list[events.Event] = []
    target = torch.zeros(500)
    with ckpt.observe(seen.append), ckpt.open(tmp_path) as checkpoint:
        assert checkpoint["w"].read().sum() == torch.arange(1000.0).sum()  # looked at only
        checkpoint.read_into([(checkpoint["w"], (500,), target)])
        assert checkpoint.load(("more",))["n"] == 3
        with checkpoint.restoring():  # several reads of one restore
            checkpoint.read_into([(checkpoint["w"], (0,), target)])
            checkpoint.load(("more",))
        with pytest.raises(KeyError), checkpoint.restoring():
            checkpoint.read_into([(checkpoint["v"], (0,), target)])
    restored, failed = _of(seen, events.Restored), _of(seen, events.RestoreFailed)
    assert _names(seen) == ["Restored"] * 3 + ["RestoreFailed"]
    assert [(each.step, each.storage_bytes, each.tier) for each in restored] == [
        (4, 2000, "storage"),
        (4, 40, "storage"),
        (4, 2040, "storage"),
    ]
    assert all(0 <= each.seconds < 60 and each.rank == 0 for each in restored)
    assert [(each.step, each.kind) for each in failed] == [(4, "KeyError")]
