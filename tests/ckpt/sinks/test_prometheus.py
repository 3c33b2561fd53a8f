"""Metrics of a node at one address, as a scrape sees them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import events
from tests.support import free_port, launch_ranks, run_ranks

pytest.importorskip("prometheus_client")

from ckpt.sinks import Prometheus

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> Samples:
    """All samples of the metrics at this port, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples: Samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()  # type: ignore[union-attr]
            samples[name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))] = float(value)
    return samples


def value_of(samples: Samples, name: str, rank: int, **labels: str) -> float:
    return samples[f"ckpt_{name}", frozenset({"run": "lm", "rank": str(rank), **labels}.items())]


def _sink(folder: Path, **options: Any) -> Any:
    return Prometheus("lm", port=0, directory=folder, **options)


def _saved(step: int, rank: int = 0) -> list[events.Event]:
    return [
        events.SaveStarted(1000.0, rank, step),
        events.SaveStaged(1001.0, rank, step, 100, 0.5, 0.5, 0.03),
        events.SavePublished(1003.0, rank, step, 90, 3.0, 0.5, 1.0, 0.5, 6e8),
    ]


def test_each_event_is_counted(tmp_path: Path) -> None:
    sink = _sink(tmp_path)
    for event in (
        *_saved(7),
        *_saved(8)[:2],
        events.SaveAbandoned(1004.0, 0, 8, 1, "StorageError", "full"),
        events.SaveStarted(1005.0, 0, 9),
        events.Restored(1006.0, 0, 7, 10, 20, 30, 0.2, (9, 8)),
        events.RestoreFailed(1007.0, 0, None, "CheckpointCorruptError", "", 0.2),
        events.Restarted(1008.0, 0, 1, 2.5, "rank 1: EXCEPTION", None, 7),
        events.SectionLate(1009.0, 0, "ckpt.write", 3.0),
        events.Retained(1010.0, 0, 3, (1, 2)),
        events.ExportDone(1011.0, 0, 7, "x", 1.0),
        events.ExportFailed(1012.0, 0, 8, "x", "full"),
        events.MirrorDone(1012.5, 0, 7, "s3://b/x", 10, 1.0),
        events.MirrorDone(1012.6, 0, 5, "s3://b/x", 10, 1.0),
        events.MirrorFailed(1012.7, 0, 8, "s3://b/x", "away", True),
        events.EventsDropped(1013.0, 0, 4),
        events.EventsDropped(1013.0, 0, 6),
    ):
        sink(event)
    found = scrape(sink.port)
    sink.close()
    for name, labels, expected in (
        ("saves_started_total", {}, 3),
        ("saves_total", {"outcome": "published"}, 1),
        ("saves_total", {"outcome": "abandoned"}, 1),
        ("saves_in_flight", {}, 1),
        ("newest_step", {}, 7),
        ("newest_step_timestamp_seconds", {}, 1003),
        ("staged_bytes_total", {}, 200),
        ("written_bytes_total", {}, 90),
        ("save_stall_seconds_count", {}, 2),
        ("save_stall_seconds_bucket", {"le": "0.025"}, 0),
        ("save_stall_seconds_bucket", {"le": "0.05"}, 2),
        ("save_write_seconds_sum", {}, 1.5),
        ("save_duration_seconds_sum", {}, 3),
        ("save_write_rate_bytes_per_second_sum", {}, 6e8),
        ("restores_total", {"outcome": "restored"}, 1),
        ("restores_total", {"outcome": "failed"}, 1),
        ("restored_bytes_total", {"source": "own_memory"}, 10),
        ("restored_bytes_total", {"source": "neighbour_memory"}, 20),
        ("restored_bytes_total", {"source": "storage"}, 30),
        ("restore_duration_seconds_count", {}, 1),
        ("damaged_steps_total", {}, 3),
        ("restarts_total", {}, 1),
        ("restart_duration_seconds_sum", {}, 2.5),
        ("sections_late_total", {}, 1),
        ("steps_kept", {}, 3),
        ("steps_removed_total", {}, 2),
        ("exports_total", {"outcome": "done"}, 1),
        ("exports_total", {"outcome": "failed"}, 1),
        ("mirror_copies_total", {"outcome": "done"}, 2),
        ("mirror_copies_total", {"outcome": "failed"}, 1),
        ("newest_mirrored_step", {}, 7),
        ("events_dropped_total", {}, 6),
    ):
        assert value_of(found, name, 0, **labels) == expected, (name, labels)


def test_series_of_a_rank_begin_at_zero_and_are_few(tmp_path: Path) -> None:
    sink = _sink(tmp_path)
    sink(events.SaveStarted(1000.0, 3, 1))
    found = scrape(sink.port)
    assert value_of(found, "saves_total", 3, outcome="abandoned") == 0
    assert value_of(found, "damaged_steps_total", 3) == 0
    assert value_of(found, "newest_step_timestamp_seconds", 3) == 1000
    for event in _saved(1, rank=3):
        sink(event)
    assert len([name for name, _ in scrape(sink.port) if not name.endswith("_created")]) < 100
    sink.close()


def test_a_save_that_died_with_its_process_is_not_in_flight(tmp_path: Path) -> None:
    sink = _sink(tmp_path)
    metrics = sink._server.metrics
    metrics.take(events.SaveStarted(1000.0, 1, 5), pid=10)
    metrics.take(events.SaveStarted(1000.0, 1, 6), pid=10)
    assert value_of(scrape(sink.port), "saves_in_flight", 1) == 2
    metrics.take(events.SaveStarted(1000.0, 1, 5), pid=11)
    assert value_of(scrape(sink.port), "saves_in_flight", 1) == 1
    sink.close()


def test_an_address_that_is_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}.*give Prometheus\(port="):
            Prometheus("lm", port=port, directory=tmp_path)
    sink = Prometheus("lm", port=port, directory=tmp_path)  # the lock is free again
    assert sink.port == port
    sink.close()


def test_the_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"ckpt-sinks-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"ckpt-sinks-{os.getuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="mode 0700"):
        Prometheus("lm", port=0)
    (tmp_path / f"ckpt-sinks-{os.getuid()}").chmod(0o700)
    Prometheus("lm", port=0).close()


def test_a_registry_of_the_program_gets_the_metrics(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    sink = _sink(tmp_path, registry=registry)
    sink(events.SaveStarted(1000.0, 0, 1))
    assert b'ckpt_saves_started_total{rank="0",run="lm"} 1.0' in generate_latest(registry)
    sink.close()
    assert b"ckpt" not in generate_latest(registry)


def _lead(rank: int, world_size: int, folder: Path) -> int | None:
    sink = Prometheus("lm", port=0, directory=folder)
    port: int | None = sink.port
    sink.close()
    return port


def test_a_second_sink_of_a_process_leaves_the_first_one_in_place(tmp_path: Path) -> None:
    """A function that is called again after a restart makes one again."""
    with contextlib.closing(Prometheus("lm", port=0, directory=tmp_path)) as first:
        second = Prometheus("lm", port=0, directory=tmp_path)
        assert second.port is None
        second(_saved(1)[0])
        second.close()
        (result,) = run_ranks(_lead, 1, tmp_path, init_process_group=False)
        assert result.value is None, "another process does not lead"
        deadline = time.monotonic() + 20
        while value_of(scrape(first.port), "saves_started_total", 0) != 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_files_of_a_long_job_are_not_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd-tmpfiles removes what is older than ten days; without the socket other ranks would lose their events."""
    monkeypatch.setattr("ckpt.sinks.prometheus._TOUCH_S", 0.02)
    folder = tmp_path / "sinks"
    folder.mkdir()
    with contextlib.closing(Prometheus("lm", port=0, directory=folder)):
        files = [folder, *folder.iterdir()]
        assert len(files) == 3, "a directory, a lock and a socket"
        for file in files:
            os.utime(file, (1000, 1000))
        deadline = time.monotonic() + 20
        while min(file.stat().st_mtime for file in files) <= 1000:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _save_on_two_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist

    sink = _sink(folder)
    dist.barrier()  # the first has become the server
    with ckpt.observe(sink) as handle, ckpt.Checkpointer(folder / "root") as checkpointer:
        for step in range(1, 4):
            checkpointer.save({"w": torch.ones(1000)}, step)
        port = sink.port
        if port is None:
            handle.close()
        dist.barrier()
        found = None
        if port is not None:
            found = _until(port, "saves_total", 3)
    return {"port": port, "found": found, "dropped": handle.dropped}


def _until(port: int, name: str, expected: float) -> Samples:
    """Scrape until the own rank and the other one have the value; the sinks' threads are on their way."""
    deadline = time.monotonic() + 20
    while True:
        found = scrape(port)
        values = [value for (key, labels), value in found.items() if key == f"ckpt_{name}" and value == expected]
        if len(values) == 2:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_ranks_of_a_node_have_one_server(tmp_path: Path) -> None:
    results = [result.value for result in run_ranks(_save_on_two_ranks, 2, tmp_path, init_process_group=True)]
    (serving,) = [result for result in results if result["port"] is not None]
    for rank in range(2):
        assert value_of(serving["found"], "saves_total", rank, outcome="published") == 3
        assert value_of(serving["found"], "saves_in_flight", rank) == 0
        assert value_of(serving["found"], "events_dropped_total", rank) == 0


def _lead_in_turn(rank: int, world_size: int, folder: Path) -> None:
    sink = _sink(folder)
    print(f"leads {sink.port is not None}", flush=True)
    for step in range(1000):
        while not (folder / f"go{step}").exists():
            time.sleep(0.02)
        sink(events.SaveStarted(1000.0, rank, step))
        print(f"step {step}: {sink.port}", flush=True)


def test_if_the_process_that_serves_is_killed_another_one_does(tmp_path: Path) -> None:
    with launch_ranks(_lead_in_turn, 2, tmp_path) as group:
        led = [group.wait_for_output(rank, r"leads (\w+)")[1] == "True" for rank in range(2)]
        assert sorted(led) == [False, True]
        leader, other = led.index(True), led.index(False)
        (tmp_path / "go0").touch()
        group.wait_for_output(leader, r"step 0: \d+")
        group.wait_for_output(other, "step 0: None")
        pidfd = os.pidfd_open(group.pid(leader))
        group.kill(leader)
        with open(pidfd, "rb"):
            assert select.select([pidfd], [], [], 30)[0]
        (tmp_path / "go1").touch()
        port = int(group.wait_for_output(other, r"step 1: (\d+)")[1])
        found = scrape(port)
        assert value_of(found, "saves_started_total", other) == 1
        group.kill(other)


def _lead_and_fork(rank: int, world_size: int, folder: Path, port: int) -> None:
    sink = Prometheus("lm", port=port, directory=folder)
    if sink.port is not None and os.fork() == 0:  # like a worker of a data loader
        deadline = time.monotonic() + 60
        while not (folder / "end").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(0)
    print(f"leads {sink.port is not None}", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.02)
    sink(events.SaveStarted(1000.0, rank, 1))
    print(f"serves {sink.port}", flush=True)
    time.sleep(60)


def test_a_child_of_the_process_that_served_does_not_keep_another_one_from_it(tmp_path: Path) -> None:
    port = free_port()
    with launch_ranks(_lead_and_fork, 2, tmp_path, port) as group:
        led = [group.wait_for_output(rank, r"leads (\w+)")[1] == "True" for rank in range(2)]
        leader, other = led.index(True), led.index(False)
        pidfd = os.pidfd_open(group.pid(leader))
        group.kill(leader)
        with open(pidfd, "rb"):
            assert select.select([pidfd], [], [], 30)[0]
        (tmp_path / "go").touch()
        serves = group.wait_for_output(other, r"serves (\w+)")[1]
        (tmp_path / "end").touch()
        assert serves == str(port)
        assert value_of(scrape(port), "saves_started_total", other) == 1
        group.kill(other)
