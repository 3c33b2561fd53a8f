"""The state every hook gets."""

from __future__ import annotations

import dataclasses
import os
import threading

import pytest

from inprocess import FrozenState, Mode, State
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.state import Status

CURRENT = (
    "rank",
    "world_size",
    "active_rank",
    "active_world_size",
    "initial_rank",
    "initial_world_size",
    "iteration",
    "mode",
    "fn_exception",
)


@pytest.mark.parametrize("kind", [State, FrozenState])
def test_the_fields(kind: type) -> None:
    names = tuple(field.name for field in dataclasses.fields(kind))
    assert names == (*CURRENT, "interruptions")


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    state = State.from_env()
    assert (state.rank, state.world_size, state.initial_rank, state.initial_world_size) == (3, 8, 3, 8)
    assert (state.iteration, state.mode, state.active_rank, state.fn_exception) == (0, Mode.INITIALIZED, None, None)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    state = State.from_env()
    assert (state.rank, state.world_size) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number, not 'many'"):
        State.from_env()


def test_what_never_changes_defaults_to_the_start() -> None:
    state = State(rank=2, world_size=4, initial_rank=5, initial_world_size=8)
    assert (state.initial_rank, state.initial_world_size) == (5, 8)
    state.rank = 0
    assert state.initial_rank == 5


def test_writing_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "9")
    state = State(rank=2, world_size=4)
    state.activate_all_ranks()
    assert state.mode is Mode.ACTIVE
    state.set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "4")
    state.active_rank, state.active_world_size = 1, 2
    state.set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    state.active_rank = None  # a spare
    state.set_distributed_vars()
    assert os.environ["RANK"] == "2"
    state.rank = None
    state.set_distributed_vars()
    assert "RANK" not in os.environ


def test_going_on() -> None:
    why = (InterruptionRecord(1, Interruption.EXCEPTION),)
    state = State(rank=0, world_size=1, fn_exception=ValueError(), interruptions=why)
    state.advance()
    assert (state.iteration, state.fn_exception, state.interruptions) == (1, None, why)


def test_freezing_takes_everything_as_it_is() -> None:
    error = ValueError(threading.Lock())  # cannot be copied
    state = State(rank=1, world_size=2, iteration=3, mode=Mode.INACTIVE, fn_exception=error)
    state.store = object()
    frozen = state.freeze()
    assert frozen.fn_exception is error
    assert not hasattr(frozen, "store")
    assert frozen.freeze() is frozen
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.rank = 0  # type: ignore[misc]
    state.iteration = 4
    assert frozen.iteration == 3
    thawed = frozen.thaw()
    assert [getattr(thawed, name) for name in CURRENT] == [getattr(frozen, name) for name in CURRENT]


def test_copying_some_fields() -> None:
    state, other = State(rank=0, world_size=1), State(rank=3, world_size=8, iteration=5)
    state.copy_from(other, fields=["rank", "iteration"])
    assert (state.rank, state.world_size, state.iteration) == (3, 1, 5)
    state.copy_from(other.freeze())
    assert state == other


def test_the_older_names() -> None:
    state = State(rank=0, world_size=1)
    state.status = Status.ACTIVE
    assert state.mode is Mode.ACTIVE
    assert state.status is state.freeze().status is Mode.ACTIVE
    assert {mode.name for mode in Mode} == {"INITIALIZED", "ACTIVE", "INACTIVE", "TERMINATED"}
