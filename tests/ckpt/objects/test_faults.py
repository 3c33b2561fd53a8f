"""A store that fails: what the library repeats, and what is an error on all ranks, after which training goes on."""

import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions, Store
from tests.ckpt.crash.killers import wait_until
from tests.support import launch_ranks, run_ranks
from tests.support.object_server import Bucket, Request, S3Server, slow_down
from tests.support.selection import full_only


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(50_000, dtype=torch.float32) * step, "step": step}


def _store(bucket: Bucket, timeout_s: float = 20.0) -> Store:
    return open_store(bucket.url, StorageOptions.of(bucket.options, timeout_s))


_FAULTS: tuple[Any, ...] = (slow_down(), (500, b""), "reset", "lost")


def test_faults_of_a_moment_are_not_noticed(job_bucket: Bucket, queue: ckpt.AsyncCallsQueue) -> None:
    """Every third request fails at first, in turn in each way, before or after the server has done what it asks for."""
    failed: set[tuple[str, str]] = set()

    def rule(request: Request) -> Any:
        what = request.method, request.path
        if what in failed or request.number % 3:
            return None
        failed.add(what)
        return _FAULTS[len(failed) % len(_FAULTS)]

    with ckpt.Checkpointer(
        job_bucket.url, staging=ckpt.Staging(file_bytes=20_000), timeout=timedelta(seconds=40), queue=queue
    ) as checkpointer:
        checkpointer.save(_state(1), 1)
        job_bucket.proxy.rule = rule
        checkpointer.save(_state(2), 2)
    state = _state(0)
    with ckpt.Checkpointer(job_bucket.url) as checkpointer:
        assert checkpointer.restore(state) == 2
        assert checkpointer.all_steps() == [1, 2]
    assert torch.equal(state["w"], _state(2)["w"])
    assert len(failed) > 2 * len(_FAULTS)


def _fail_then_go_on(rank: int, world_size: int, url: str) -> dict[str, Any]:
    with ckpt.Checkpointer(url, timeout=timedelta(seconds=6)) as checkpointer:
        checkpointer.save(_state(1), 1)
        answer: dict[str, Any] = {}
        begin = time.monotonic()
        try:
            checkpointer.save(_state(2), 2)
        except ckpt.CheckpointError as error:
            answer = {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
        checkpointer.save(_state(3), 3)
        return answer | {"steps": checkpointer.all_steps()}


def test_packs_that_cannot_be_put_end_the_save_on_all_ranks(bucket: Bucket) -> None:
    """Of rank 1, for longer than the timeout."""

    def rule(request: Request) -> Any:
        return slow_down() if "step_00000002-" in request.path and "rank_00001_" in request.path else None

    bucket.proxy.rule = rule
    results = run_ranks(_fail_then_go_on, 2, bucket.url, timeout=55, env=bucket.env)
    for result in results:
        assert result.value["steps"] == [1, 3]
        assert result.value["kind"] == "SaveAbandonedError"
        assert "rank 1" in result.value["text"]
        assert "SlowDown" in result.value["text"]
        assert result.value["seconds"] < 20


def test_training_does_not_wait_for_the_store(bucket: Bucket, queue: ckpt.AsyncCallsQueue) -> None:
    """No request is answered while saves are staged and scheduled."""
    released = threading.Event()

    def rule(request: Request) -> None:
        assert released.wait(40)

    with ckpt.Checkpointer(bucket.url, queue=queue) as checkpointer:
        checkpointer.save(_state(1), 1)
        bucket.proxy.rule = rule
        state = _state(2)
        checkpointer.async_save(state, 2)
        state["w"].zero_()
        assert checkpointer.maybe_finalize() == []
        checkpointer.async_save(_state(3), 3)
        released.set()
        assert checkpointer.maybe_finalize(blocking=True) == [2, 3]
    assert torch.equal(ckpt.load(bucket.url, 2)["w"], _state(2)["w"])


def _save_until_killed(rank: int, world_size: int, url: str) -> None:
    with ckpt.Checkpointer(url, timeout=timedelta(seconds=6), staging=ckpt.Staging(slots=2)) as checkpointer:
        checkpointer.save(_state(1), 1)
        checkpointer.async_save(_state(2), 2)
        checkpointer.async_save(_state(3), 3)
        print("saving", flush=True)
        threading.Event().wait()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=full_only)])
def test_writers_end_although_the_store_never_answers(how: str, bucket: Bucket) -> None:
    """Store and trainers are gone; the writers, which have two saves to write, give up some time after the timeout."""
    with S3Server() as server:
        assert server.request("PUT", "/bucket")[0] == 200
        env = bucket.env | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}
        with launch_ranks(_save_until_killed, 2, "s3://bucket/run7", env=env) as group:
            for rank in (0, 1):
                group.wait_for_output(rank, "saving")
            server.close() if how == "killed" else server.stop()
            for rank in (0, 1):
                group.kill(rank)
            group.wait_for_no_survivors(50)


def test_a_bucket_that_is_gone(bucket: Bucket, queue: ckpt.AsyncCallsQueue) -> None:
    gone = 404, b"<Error><Code>NoSuchBucket</Code><Message>gone</Message></Error>"
    with ckpt.Checkpointer(bucket.url, timeout=timedelta(seconds=6), queue=queue) as checkpointer:
        checkpointer.save(_state(1), 1)
        bucket.proxy.rule = lambda request: gone
        with pytest.raises(ckpt.CheckpointError, match="bucket does not exist"):
            checkpointer.save(_state(2), 2)
        with pytest.raises(ckpt.StorageError, match="bucket does not exist"):
            checkpointer.all_steps()
        bucket.proxy.rule = lambda request: None
        checkpointer.save(_state(3), 3)
        assert checkpointer.all_steps() == [1, 3]


def _train_while_the_store_is_away(rank: int, world_size: int, url: str, away: str, back: str) -> Any:
    """As a training loop does, without a `try`."""
    answers = []
    with ckpt.Checkpointer(url, timeout=timedelta(seconds=16), on_failed_save="warn") as checkpointer:
        for step in (1, 2, 3):
            if step > 1:
                print(f"at {step}", flush=True)
                wait_until(Path(away if step == 2 else back).exists, "the store to be away, or back")
            checkpointer.async_save(_state(step), step)
            answers.append((checkpointer.maybe_finalize(blocking=True), checkpointer.failed_steps))
        return [*answers, checkpointer.all_steps()]


@pytest.mark.timeout(90)
def test_training_goes_on_while_the_store_is_away(bucket: Bucket, tmp_path: Path) -> None:
    """Each connection is broken off, of both ranks, for longer than the library repeats requests."""
    away, back = tmp_path / "away", tmp_path / "back"
    arguments = bucket.url, str(away), str(back)
    with launch_ranks(_train_while_the_store_is_away, 2, *arguments, env=bucket.env) as group:
        for rank in (0, 1):
            group.wait_for_output(rank, "^at 2")
        bucket.proxy.rule = lambda request: "reset"
        away.touch()
        for rank in (0, 1):
            group.wait_for_output(rank, "^at 3", timeout=60)
        bucket.proxy.rule = lambda request: None
        back.touch()
        for result in group.wait():
            assert result.value == [([1], []), ([], [2]), ([3], []), [1, 3]]
    assert ckpt.load(bucket.url)["step"] == 3


_REFUSED = {
    "renew them": (400, "ExpiredToken"),
    "clock of this host is off": (403, "RequestTimeTooSkewed"),
}


@pytest.mark.parametrize("hint", _REFUSED)
def test_requests_that_are_refused(bucket: Bucket, hint: str, queue: ckpt.AsyncCallsQueue) -> None:
    """The credentials have expired, or the clock is wrong, which S3 tells by the time that a request was signed."""
    status, code = _REFUSED[hint]
    answer = status, f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode()
    with ckpt.Checkpointer(bucket.url, timeout=timedelta(seconds=20), queue=queue) as checkpointer:
        checkpointer.save(_state(1), 1)
        bucket.proxy.rule = lambda request: answer if request.method == "PUT" else None
        with pytest.raises(ckpt.CheckpointError, match=hint):
            checkpointer.save(_state(2), 2)
        bucket.proxy.rule = lambda request: None
        checkpointer.save(_state(3), 3)
        assert checkpointer.all_steps() == [1, 3]


def test_a_store_that_ignores_conditions_is_refused(bucket: Bucket, queue: ckpt.AsyncCallsQueue) -> None:
    bucket.proxy.hidden_headers = {"if-none-match"}
    with (
        ckpt.Checkpointer(bucket.url, timeout=timedelta(seconds=20), queue=queue) as checkpointer,
        pytest.raises(ckpt.StorageError, match="ignores the condition of puts"),
    ):
        checkpointer.save(_state(1), 1)
    bucket.proxy.hidden_headers = set()
    assert [each.key for each in _store(bucket).below("")] == []


def test_a_create_whose_answer_is_lost_is_its_own(any_bucket: Bucket) -> None:
    """The library repeats the put; the object that it finds then is the one that it has put itself."""
    answers = iter(["lost"])
    any_bucket.proxy.rule = lambda request: next(answers, None) if request.method == "PUT" else None
    store = _store(any_bucket)
    assert store.create("a", b"mine")
    assert not store.create("a", b"another")
    assert store.get("a", 100) == b"mine"


def test_a_conflict_of_conditional_puts_is_settled(any_bucket: Bucket) -> None:
    """S3 may refuse both of two puts that go on at the same time."""
    conflict = 409, b"<Error><Code>ConditionalRequestConflict</Code><Message>try again</Message></Error>"
    answers: Iterator[Any] = iter([conflict, conflict])
    any_bucket.proxy.rule = lambda request: next(answers, None) if request.method == "PUT" else None
    store = _store(any_bucket)
    assert store.create("a", b"mine")
    assert store.get("a", 100) == b"mine"


def test_no_error_shows_what_was_sent(bucket: Bucket) -> None:
    answer = b"<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>test-key-id</AWSAccessKeyId></Error>"
    bucket.proxy.rule = lambda request: (403, answer)
    with pytest.raises(ckpt.StorageError, match="the access key is unknown") as raised:
        _store(bucket).put("a", b"x")
    text = "".join(traceback.format_exception(raised.value))
    for secret in ("test-key-id", "test-secret-key"):
        assert secret not in text
    assert isinstance(raised.value.__cause__, OSError)
