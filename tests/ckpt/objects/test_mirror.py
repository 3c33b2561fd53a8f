"""Mirrors in an S3 bucket: what is sent again, faults, credentials, ranks."""

import functools
import os
import shutil
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

import ckpt
from ckpt.storage.roots import open_root
from tests.ckpt.mirroring.support import Jobs, assert_state, files_of, mirror_of, mirror_process, state_of
from tests.ckpt.mirroring.support import job as start_job
from tests.support import is_gone, launch_ranks
from tests.support.object_server import Answer, Bucket, Request, slow_down
from tests.support.selection import FULL, full_only

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def job(queue: ckpt.AsyncCallsQueue) -> Jobs:
    """Start a job that has the writer of others."""
    return functools.partial(start_job, queue=queue)


def _objects(bucket: Bucket) -> dict[str, bytes]:
    """Return the objects of the only step, by their names in it."""
    (place,) = [open_root(bucket.url).source_of(step).path for step in open_root(bucket.url).steps()]
    prefix = place.removeprefix(f"s3://{bucket.name}/")
    import re

    _, text = bucket.server.request("GET", f"/{bucket.name}?list-type=2&max-keys=1000&prefix={prefix}/")
    keys = re.findall("<Key>([^<]*)</Key>", text.decode())
    return {key.removeprefix(f"{prefix}/"): bucket.server.request("GET", f"/{bucket.name}/{key}")[1] for key in keys}


def _puts(bucket: Bucket, of: str) -> list[str]:
    return [each.key for each in bucket.proxy.requests if each.method == "PUT" and of in each.key]


@pytest.mark.parametrize("compression", [None, pytest.param("zstd", marks=full_only)])
def test_a_copy_is_bit_for_bit_the_step(bucket: Bucket, tmp_path: Path, job: Jobs, compression: str | None) -> None:
    with job(tmp_path, mirror_of(bucket.url), compression=compression) as run:
        run.save(1)
    assert run.copied == [1]
    assert _objects(bucket) == files_of(tmp_path / "step_00000001")
    written = _puts(bucket, "/saves/") + _puts(bucket, "/records/")
    assert len(written) == len(set(written)) == len(files_of(tmp_path / "step_00000001")) + 1
    puts = [each.key for each in bucket.proxy.requests if each.method == "PUT"]
    last_of_step = max(number for number, key in enumerate(puts) if "/saves/" in key)
    assert [number for number, key in enumerate(puts) if "/records/" in key] > [last_of_step]
    assert_state(ckpt.load(bucket.url), 1)


def test_what_is_only_in_the_bucket_is_read_by_ranges(bucket: Bucket, tmp_path: Path, job: Jobs) -> None:
    first = tmp_path / "nvme"
    with job(first, mirror_of(bucket.url, keep=ckpt.Latest(2)), keep=ckpt.Latest(1)) as run:
        run.copy(5, 6, 7)
        run.wait(lambda: open_root(bucket.url).steps() == [6, 7])
    assert open_root(first).steps() == [7]
    shutil.rmtree(first)
    begin = len(bucket.proxy.requests)
    with job(first, mirror_of(bucket.url)) as run:
        assert run.restore() == (7, bucket.url)
        assert any("range" in each.headers for each in bucket.proxy.requests[begin:])
        assert not list(first.glob("step_*")), "nothing is copied back"
        assert run.restore(6) == (6, bucket.url)


def test_kill_in_the_middle_and_resume(bucket: Bucket, tmp_path: Path, job: Jobs) -> None:
    """The process is killed when some pack files are in the bucket; the next one sends the others only."""
    stalled = threading.Event()
    go = threading.Event()
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def rule(request: Request) -> Answer:
        if request.method == "PUT" and "/packs/" in request.key and not go.is_set():
            with lock:
                counts[request.key] += 1
                is_late = len(counts) > 2
            if is_late:
                stalled.set()
                go.wait(60)
                return "reset"
        return None

    bucket.proxy.rule = rule
    with job(tmp_path, mirror_of(bucket.url)) as run:
        run.save(1)
        run.wait(stalled.is_set)
        process = mirror_process()
        process.kill()
        process.wait(30)
        present = {key for key in counts if bucket.server.request("HEAD", f"/{bucket.name}/{key}")[0] == 200}
        assert len(present) == 2
        assert open_root(bucket.url).steps() == []
        begin = len(bucket.proxy.requests)
        go.set()
        run.wait(lambda: run.copied == [1])
    sent = {each.key for each in bucket.proxy.requests[begin:] if each.method == "PUT" and "/packs/" in each.key}
    files = files_of(tmp_path / "step_00000001")
    assert sent.isdisjoint(present)
    assert len(sent | present) == sum(name.startswith("packs/") for name in files)
    assert _objects(bucket) == files


_PUTS = ("probe", "owner/", "intent", "index.json", "packs/", "parts/", "state.json", "zarr.json", "records/")
_CELLS = [(put, answer) for put in _PUTS for answer in ("reset", "lost")]
_REPRESENTATIVE = {("intent", "lost"), ("zarr.json", "reset"), ("records/", "lost")}


@pytest.mark.parametrize(("put", "answer"), [cell for cell in _CELLS if FULL or cell in _REPRESENTATIVE])
def test_kill_at_each_put(bucket: Bucket, tmp_path: Path, job: Jobs, put: str, answer: str) -> None:
    """Before the put is done, or just after it. A half-copied step is never visible, and the copy is completed."""
    killed: list[int] = []
    lock = threading.Lock()

    def rule(request: Request) -> Answer:
        with lock:
            if killed or request.method != "PUT" or put not in request.key:
                return None
            process = mirror_process()
            process.kill()
            process.wait(30)
            killed.append(process.pid)
        return answer

    bucket.proxy.rule = rule
    with job(tmp_path, mirror_of(bucket.url)) as run:
        run.save(1)
        run.wait(lambda: killed)
        if put != "records/":
            assert open_root(bucket.url).steps() == []
        elif open_root(bucket.url).steps():
            assert _objects(bucket) == files_of(tmp_path / "step_00000001")
        run.wait(lambda: run.copied)
    assert open_root(bucket.url).steps() == [1]
    assert _objects(bucket) == files_of(tmp_path / "step_00000001")
    assert open_root(bucket.url).pending() == []


def test_damage_of_what_an_earlier_attempt_has_sent(bucket: Bucket, tmp_path: Path, job: Jobs) -> None:
    """It is sent again."""
    sent = threading.Event()

    def rule(request: Request) -> Answer:
        if request.method == "PUT" and "/parts/" in request.key:
            sent.set()
            return 403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        return None

    bucket.proxy.rule = rule
    with job(tmp_path, mirror_of(bucket.url)) as run:
        run.save(1)
        run.wait(lambda: sent.is_set() and run.failures)
        assert run.failures[0].again
        assert "AccessDenied" in run.failures[0].cause
        key = _puts(bucket, "/packs/")[0]
        _, data = bucket.server.request("GET", f"/{bucket.name}/{key}")
        bucket.server.request("PUT", f"/{bucket.name}/{key}", data[:50] + bytes([data[50] ^ 1]) + data[51:])
        bucket.proxy.rule = lambda request: None
        run.wait(lambda: run.copied == [1])
    assert _objects(bucket) == files_of(tmp_path / "step_00000001")
    assert _puts(bucket, "/packs/").count(key) == 2


def test_faults_of_the_store(bucket: Bucket, tmp_path: Path, job: Jobs) -> None:
    def rule(request: Request) -> Answer:
        kinds: tuple[Answer, ...] = (None, None, slow_down(), None, "reset", None, "lost")
        return kinds[request.number % len(kinds)]

    bucket.proxy.rule = rule
    with job(tmp_path, mirror_of(bucket.url)) as run:
        run.copy(1)
    bucket.proxy.rule = lambda request: None
    assert open_root(bucket.url).steps() == [1]
    assert_state(ckpt.load(bucket.url), 1)


def test_a_bucket_that_does_not_exist(bucket: Bucket, tmp_path: Path, job: Jobs) -> None:
    with job(tmp_path, mirror_of("s3://no-such-bucket-here/x", close_timeout=timedelta(0))) as run:
        run.save(1)
        run.wait(lambda: run.failures)
        assert "bucket does not exist" in run.failures[0].cause
        assert run.failures[0].again
        run.save(2, 3)
    assert run.checkpointer.root == str(tmp_path)


def test_the_options_are_those_of_the_mirror(bucket: Bucket, tmp_path: Path) -> None:
    secret = "a-very-secret-key-0123456789"
    options = bucket.options | {"secret_access_key": secret}
    for name in bucket.env:
        del os.environ[name]
    mirror = mirror_of(bucket.url, storage_options=options)
    with start_job(tmp_path / "nvme", mirror) as run:
        run.copy(1)
        process = mirror_process()
        assert secret not in " ".join(process.cmdline())
        assert secret not in " ".join(process.environ().values())
    shutil.rmtree(tmp_path / "nvme")
    with start_job(tmp_path / "nvme", mirror) as run:
        assert run.restore() == (1, bucket.url)


def test_from_a_bucket_to_a_directory(bucket: Bucket, tmp_path: Path, job: Jobs) -> None:
    with job(bucket.url, mirror_of(tmp_path)) as run:
        run.save(1)
        run.wait(lambda: run.copied == [1])
    assert _objects(bucket) == files_of(tmp_path / "step_00000001")
    state = state_of(0)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert_state(state, 1)


def _trainer(rank: int, world_size: int, first: str, second: str, close_s: float) -> None:
    mirror = ckpt.Mirror(second, close_timeout=timedelta(seconds=close_s))
    with ckpt.Checkpointer(first, mirror=mirror) as checkpointer:
        checkpointer.save(state_of(1), 1)
        print("pid", mirror_process().pid, flush=True)
        threading.Event().wait()


@pytest.mark.parametrize("close_s", [0.0, 60.0])
def test_kill_of_the_trainer(bucket: Bucket, tmp_path: Path, close_s: float) -> None:
    """Its mirror process ends, after what it was doing, or after the time for that."""
    stalled, go = threading.Event(), threading.Event()

    def rule(request: Request) -> Answer:
        if request.method == "PUT" and "/packs/" in request.key:
            stalled.set()
            go.wait(60)
        return None

    bucket.proxy.rule = rule
    arguments = str(tmp_path), bucket.url, close_s
    with launch_ranks(_trainer, 1, *arguments, env=bucket.env) as ranks:
        process = psutil.Process(int(ranks.wait_for_output(0, r"pid (\d+)")[1]))
        assert stalled.wait(40)
        ranks.kill(0)
        if close_s:
            go.set()
        deadline = time.monotonic() + 40
        while not is_gone(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    go.set()
    assert open_root(bucket.url).steps() == ([1] if close_s else [])
