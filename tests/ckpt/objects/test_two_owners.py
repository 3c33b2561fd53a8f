"""Two jobs on one root in a bucket: the second must never lose a step, whatever request of the first is late.

`make test` plays some requests with real jobs, `make test-faults` all; `test_interleavings` has every order of all.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.ranks.failure import Failure
from ckpt.storage.roots import open_root
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions
from tests.support.loads import as_another_program
from tests.support.object_server import Bucket, Request
from tests.support.selection import FULL, full_only


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.arange(3000.0) * value, "value": value}


_COMPLETE = ("/zarr.json", "/records/")  # then all parts are there


class _Held:
    """Holds the first request to a key with this text, until `release`."""

    def __init__(self, bucket: Bucket, text: str) -> None:
        self.arrived = threading.Event()
        self._released = threading.Event()
        self._text = text
        bucket.proxy.rule = self

    def __call__(self, request: Request) -> None:
        if request.method == "PUT" and self._text in request.path and not self.arrived.is_set():
            self.arrived.set()
            assert self._released.wait(40), "the test did not release the request"

    def release(self) -> None:
        self._released.set()


Queues = tuple[ckpt.AsyncCallsQueue, ckpt.AsyncCallsQueue]


@pytest.fixture
def queues(queue: ckpt.AsyncCallsQueue, other_queue: ckpt.AsyncCallsQueue) -> Queues:
    """The writers of the earlier and of the later owner: one of them is held up."""
    return queue, other_queue


@pytest.mark.parametrize(
    "text", ["/intent.json", "/packs/", "/parts/", *_COMPLETE] if FULL else ["/parts/", *_COMPLETE]
)
def test_a_request_of_the_earlier_owner_is_late(job_bucket: Bucket, text: str, queues: Queues) -> None:
    with ckpt.Checkpointer(job_bucket.url, queue=queues[1]) as later:
        earlier = as_another_program(ckpt.Checkpointer(job_bucket.url, queue=queues[0]))
        earlier.save(_state(1), 1)
        held = _Held(job_bucket, text)
        earlier.async_save(_state(2), 2)
        assert held.arrived.wait(20)
        assert later.restore(_state(0)) == 1
        later.save(_state(22), 2)
        assert later.all_steps() == [1, 2]
        held.release()
        outcome: Any = None
        try:
            outcome = earlier.maybe_finalize(blocking=True)
        except ckpt.CheckpointError as error:
            outcome = error
        if text in _COMPLETE:
            assert outcome == [2], "complete, it was published by the later owner, before that one began a branch"
        else:
            assert isinstance(outcome, ckpt.FencedError), outcome
        with pytest.raises(ckpt.FencedError):
            earlier.save(_state(3), 3)
        with pytest.raises(ckpt.FencedError):
            earlier.delete(1)
        earlier.close()
        later.save(_state(4), 4)
        assert later.all_steps() == [1, 2, 4]
        for step, value in ((1, 1), (2, 22), (4, 4)):
            assert ckpt.load(job_bucket.url, step)["value"] == value
    root = open_root(job_bucket.url)
    assert len(root.superseded()) == (text in _COMPLETE)
    assert root.pending() == []


def test_a_late_save_that_the_later_owner_has_abandoned(job_bucket: Bucket, tmp_path: Path, queues: Queues) -> None:
    """Its job is told that the root is lost to it, not the reason in the record, after which training could go on."""
    done = tmp_path / "the writer is done"
    deletes, looked = threading.Event(), threading.Event()

    def rule(request: Request) -> None:
        if request.method == "DELETE" or (request.method == "POST" and "?delete" in request.path):
            deletes.set()
            assert looked.wait(40), "no process has looked for the intent"
        elif request.method == "HEAD" and request.path.endswith("/intent.json"):
            looked.set()
            assert _becomes_true(done.exists), "the writer does not end"

    with ckpt.Checkpointer(job_bucket.url, queue=queues[1]) as later:
        earlier = as_another_program(ckpt.Checkpointer(job_bucket.url, queue=queues[0]))
        earlier.save(_state(1), 1)
        later.restore(_state(0))
        later.save(_state(2), 2)
        job_bucket.proxy.rule = rule
        earlier.async_save(_state(3), 3)
        queues[0].schedule_async_request(ckpt.AsyncRequest(done.touch, (), []))
        assert deletes.wait(20)
        root = open_root(job_bucket.url)
        (save,) = root.pending()
        root.clean_records()  # has listed the intent, and looks for it when it is deleted
        assert save in root.abandoned()
        with pytest.raises(ckpt.FencedError, match="is owned by a job that started later"):
            earlier.maybe_finalize(blocking=True)
        earlier.close()


def _becomes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 40
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_what_a_late_writer_has_put_is_deleted(job_bucket: Bucket) -> None:
    """Of a save that was abandoned: nothing that it puts later can be a part of a step, and none of it stays."""
    with ckpt.Checkpointer(job_bucket.url) as checkpointer:  # at the end of its writer, everything is deleted
        checkpointer.save(_state(1), 1)
        held = _Held(job_bucket, "/packs/")
        checkpointer.async_save(_state(2), 2)
        assert held.arrived.wait(20)
        root = open_root(job_bucket.url)
        (save,) = root.pending()
        reason = Failure(0, "StorageError", "given up by the test")
        root.pending_save(save).abandon(reason)
        held.release()
        with pytest.raises(ckpt.errors.SaveAbandonedError, match="given up by the test"):
            checkpointer.maybe_finalize(blocking=True)
        checkpointer.save(_state(3), 3)
        assert checkpointer.all_steps() == [1, 3]
    assert save in root.abandoned()
    assert root.pending() == []
    assert root.removed() == []


def test_a_record_that_comes_after_the_step_was_removed_and_forgotten(job_bucket: Bucket, queues: Queues) -> None:
    """The earlier owner was stopped for more than an hour, with the request that publishes already on its way."""
    with ckpt.Checkpointer(job_bucket.url, keep=1, queue=queues[1]) as later:
        earlier = as_another_program(ckpt.Checkpointer(job_bucket.url, queue=queues[0]))
        held = _Held(job_bucket, "/records/")
        earlier.async_save(_state(2), 2)
        assert held.arrived.wait(20)
        later.save(_state(4), 4)  # publishes the complete save of the earlier owner, and removes it
        assert later.all_steps() == [4]
        store = open_store(job_bucket.url, StorageOptions.of(job_bucket.options, 20.0))
        # What the owner does: first the objects, an hour later the record.
        for prefix in ("saves/", "records/"):
            store.delete([each.key for each in store.below(prefix) if "step_00000002-" in each.key])
        held.release()
        with pytest.raises(ckpt.CheckpointError):
            earlier.maybe_finalize(blocking=True)
        earlier.close()
        assert later.all_steps() == [4]
        assert later.restore(_state(0)) == 4


_EARLIER = {"user_agent": "earlier"}


class _Stopped:
    """Holds a request of the earlier owner that creates a record of this step, and its repetitions, until `release`.

    `number` is that of the record, counted from 0 after those that are there.
    """

    def __init__(self, bucket: Bucket, step: int, number: int) -> None:
        self.arrived = threading.Event()
        self._released = threading.Event()
        self._text = f"/records/step_{step:08d}-"
        self._before = number
        self._seen: set[str] = set()
        bucket.proxy.rule = self

    def __call__(self, request: Request) -> None:
        is_mine = request.headers.get("user-agent") == _EARLIER["user_agent"]
        if request.method != "PUT" or self._text not in request.path or not is_mine:
            return
        self._seen.add(request.path)
        if len(self._seen) > self._before:
            self.arrived.set()
            assert self._released.wait(40), "the test did not release the request"

    def release(self) -> None:
        self._released.set()


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("retention", 0),
        pytest.param("retention", 1, marks=full_only),
        pytest.param("delete", 0, marks=full_only),
        ("delete", 1),
    ],
)
def test_the_step_that_a_later_owner_continues_is_not_removed(
    bucket: Bucket, how: str, number: int, queues: Queues
) -> None:
    """The earlier one has looked at the token, and its request to remove step 10 is late."""
    keep = 1 if how == "retention" else None
    earlier = as_another_program(ckpt.Checkpointer(bucket.url, keep=keep, storage_options=_EARLIER, queue=queues[0]))
    with ckpt.Checkpointer(bucket.url, queue=queues[1]) as later, ThreadPoolExecutor(1) as pool:
        earlier.save(_state(5), 5)
        earlier.save(_state(10), 10)
        assert later.restore(_state(0)) == 10
        held = _Stopped(bucket, 10, number)
        if how == "retention":
            earlier.async_save(_state(20), 20)
            act: Callable[[], Any] = lambda: earlier.maybe_finalize(blocking=True)  # noqa: E731
        else:
            act = lambda: earlier.delete(10)  # noqa: E731
        acting = pool.submit(act)
        assert held.arrived.wait(20)
        later.save(_state(30), 30)
        held.release()
        if how == "retention":
            assert acting.result(30) == [20]  # it is published; that it cannot remove another one is logged
        else:
            with pytest.raises(ckpt.FencedError):
                acting.result(30)
        earlier.close()
        assert later.all_steps() == [10, 30] if how == "retention" else [5, 10, 30]
        for step in (10, 30):
            assert ckpt.load(bucket.url, step)["value"] == step
        later.save(_state(40), 40)
        assert ckpt.load(bucket.url, 10)["value"] == 10


@pytest.mark.parametrize("number", [pytest.param(0, marks=full_only), 1])
def test_the_step_that_a_later_owner_continues_is_not_superseded(bucket: Bucket, number: int, queues: Queues) -> None:
    with ckpt.Checkpointer(bucket.url, queue=queues[0]) as first:
        first.save(_state(10), 10)
        first.save(_state(20), 20)
    earlier = as_another_program(ckpt.Checkpointer(bucket.url, storage_options=_EARLIER, queue=queues[0]))
    with ckpt.Checkpointer(bucket.url, queue=queues[1]) as later:
        assert earlier.restore(_state(0), 10) == 10
        held = _Stopped(bucket, 20, number)
        earlier.async_save(_state(11), 11)
        assert held.arrived.wait(20)
        assert later.restore(_state(0)) == 20  # until both records are there, it is the newest step
        later.save(_state(30), 30)
        held.release()
        assert earlier.maybe_finalize(blocking=True) == [11]  # complete, it was published by the later owner
        earlier.close()
        assert set(later.all_steps()) >= {10, 20, 30}
        assert later.restore(_state(0)) == 30
        assert ckpt.load(bucket.url, 20)["value"] == 20
