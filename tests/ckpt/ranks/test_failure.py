"""The failure of one rank reaches the others: with its class, its message and its traceback, and never large."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ckpt import errors
from ckpt.errors import CheckpointCorruptError, CheckpointError, RemoteTraceback, StateError, StorageError
from ckpt.planning.tensors import MetaTensorError
from ckpt.ranks.collectives import StoreRanks
from ckpt.ranks.failure import Failure
from ckpt.ranks.group import Alone, Group

_LONG_S = 30.0
_CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CheckpointError)]


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("kind", _CLASSES)
def test_every_error_of_ckpt_keeps_its_class(kind: type[CheckpointError]) -> None:
    failure = Failure.of(_raised(kind("the disk is full")), 3)
    error = Failure.from_bytes(failure.to_bytes()).error("rank 3: the disk is full", step=7)
    assert type(error) is kind
    assert (error.rank, error.step) == (3, 7)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in _raised" in str(error.__cause__)


def test_an_error_of_a_class_that_is_not_public_is_of_the_public_one_that_it_derives_from() -> None:
    failure = Failure.of(MetaTensorError("no memory"), 0)
    assert (failure.kind, failure.error_class) == ("StateError", StateError)


def test_a_class_with_the_name_of_one_of_ckpt_is_not_taken_for_that() -> None:
    """Else the other ranks could go on with an older step, and this one not."""
    foreign = type("StorageError", (OSError,), {"__module__": "blobs"})
    failure = Failure.of(foreign("the service is busy"), 0)
    assert (failure.error_class, failure.text) == (CheckpointError, "blobs.StorageError: the service is busy")
    derived = type("StorageError", (StateError,), {"__module__": "blobs"})
    assert Failure.of(derived("x"), 0).error_class is StateError


@pytest.mark.parametrize("error", [ValueError("9"), KeyboardInterrupt(), CheckpointError("9")])
def test_an_error_of_another_class_is_a_checkpoint_error_elsewhere(error: BaseException) -> None:
    failure = Failure.of(error, 0)
    assert failure.kind == type(error).__name__
    assert type(failure.error("rank 0 failed")) is CheckpointError


def test_the_traceback_is_that_of_the_process_that_raised() -> None:
    error = CheckpointError("its writer failed")
    error.__cause__ = RemoteTraceback("of the writer")
    assert Failure.of(_raised(error), 1).traceback == "of the writer"


def test_a_failure_is_small_whatever_the_error_says() -> None:
    nasty = "a" + "\x00\U0001f600\ud800" * 100_000 + "z"
    failure = Failure.of(_raised(StorageError(nasty)), 1, "write")
    assert len(failure.to_bytes()) < 20_000
    assert (failure.message[0], failure.message[-1]) == ("a", "z")
    Failure.from_bytes(failure.to_bytes()).report.encode()  # can be printed


@pytest.mark.parametrize("failure", [Failure(None, "X", "y"), Failure(2, "X", "y", "z", is_known=False, action="read")])
def test_a_failure_is_the_same_after_a_way_as_bytes_and_as_a_document(failure: Failure) -> None:
    assert Failure.from_bytes(failure.to_bytes()) == failure
    assert Failure.from_document(failure.to_document()) == failure


def test_the_record_of_a_failure_is_as_earlier_versions_wrote_it() -> None:
    document = {"rank": 1, "kind": "StorageError", "message": "full", "traceback": ""}
    assert Failure(1, "StorageError", "full").to_document() == document
    assert Failure.from_document(document | {"known": False}) == Failure(1, "StorageError", "full", is_known=False)
    with pytest.raises(ValueError, match="is not a rank"):
        Failure.from_document(document | {"rank": "1"})


# -- blocks that raise on all ranks or on none -------------------------------------------------------------------------


def _on_all(act: Any, world_size: int = 3) -> list[Any]:
    """Return the result of `act(ranks)` on each rank, or what it raises."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            return act(StoreRanks(rank, world_size, store, _LONG_S))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_all_ranks_know_what_all_have_told() -> None:
    def act(ranks: Group) -> list[bytes]:
        with ranks.all_or_none("tell") as phase:
            phase.told = bytes([ranks.rank])
        return phase.answers

    assert _on_all(act) == [[b"\0", b"\1", b"\2"]] * 3


def test_all_ranks_raise_what_the_lowest_that_failed_raises() -> None:
    own = [StateError("zero"), CheckpointCorruptError("one"), OSError("two")]
    reached = threading.Event()

    def act(ranks: Group) -> None:
        with ranks.all_or_none("open", 8) as phase:
            if ranks.rank == 1:
                raise own[1]
            phase.action = "match"
            if ranks.rank == 2:
                raise own[2]
        reached.set()

    first, second, third = _on_all(act)
    assert second is own[1]
    for error in (first, third):
        assert type(error) is CheckpointCorruptError
        assert str(error) == "rank 1 could not open step 8: CheckpointCorruptError: one"
        assert (error.rank, error.step) == (1, 8)
    assert "raise own[1]" in str(first.__cause__)
    assert third.__cause__ is own[2]
    assert not reached.is_set()


def test_ranks_that_fail_in_the_same_way_raise_their_own_errors() -> None:
    own = [ValueError("zero"), OSError("one")]

    def act(ranks: Group) -> None:
        with ranks.all_or_none("load"):
            if ranks.rank < 2:
                raise own[ranks.rank]

    *failed, third = _on_all(act)
    assert failed == own
    assert type(third) is CheckpointError
    assert str(third) == "rank 0 could not load: ValueError: zero"


def test_the_result_of_rank_0_is_that_of_all() -> None:
    def fails(ranks: Group) -> Any:
        return ranks.result_of_first("look", lambda: 1 // (2 - ranks.rank))

    assert _on_all(lambda ranks: ranks.result_of_first("look", lambda: [ranks.rank, "x"])) == [[0, "x"]] * 3
    *others, failed = _on_all(fails)
    assert isinstance(failed, ZeroDivisionError)
    assert [type(error) for error in others] == [CheckpointError] * 2


def test_an_interrupt_leaves_the_block_without_a_collective() -> None:
    class NoCollective(Alone):
        def __call__(self, payload: bytes) -> list[bytes]:
            raise AssertionError

    with pytest.raises(KeyboardInterrupt), NoCollective(0).all_or_none("read"):
        raise KeyboardInterrupt
