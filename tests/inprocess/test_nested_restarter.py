"""The lines an outer launcher follows."""

import logging

import pytest

from inprocess.abort import Abort
from inprocess.completion import Completion
from inprocess.initialize import Initialize
from inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterCallback,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
    NestedRestarterLogger,
)
from inprocess.state import FrozenState
from inprocess.terminate import Terminate

HOOKS = (
    (NestedRestarterHandlingCompleted, Initialize),
    (NestedRestarterHandlingStarting, Abort),
    (NestedRestarterFinalized, Completion),
    (NestedRestarterAborted, Terminate),
)


def lines(caplog: pytest.LogCaptureFixture, initial_rank: int, special_rank: int = 0) -> list[str]:
    caplog.set_level(logging.INFO, "inprocess")
    state = FrozenState(rank=0, world_size=2, initial_rank=initial_rank)
    initialize, abort, completion, terminate = (hook(special_rank=special_rank) for hook, _ in HOOKS)
    for hook in (initialize, abort, initialize, completion, terminate):
        assert hook(state) is state
    return [record.getMessage() for record in caplog.records]


def test_every_phase_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, initial_rank=0) == [
        "[NestedRestarter] name=[InProcess] state=initialize",
        "[NestedRestarter] name=[InProcess] state=handling stage=starting",
        "[NestedRestarter] name=[InProcess] state=handling stage=completed",
        "[NestedRestarter] name=[InProcess] state=finalized",
        "[NestedRestarter] name=[InProcess] state=aborted",
    ]


def test_only_one_initial_rank_writes(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, initial_rank=1) == []
    assert len(lines(caplog, initial_rank=1, special_rank=1)) == 5


def test_a_callback_writes_words_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inprocess")
    state = FrozenState(rank=0, world_size=1, initial_rank=0)
    logger = NestedRestarterLogger()
    logger.set_connected_rank(0)
    logger.log_restarter_event("%d line", 1)
    assert NestedRestarterCallback("waiting")(state) is state
    assert NestedRestarterCallback("waiting", restarter_stage="long", logger=logger, special_rank=0)(state) is state
    assert [record.getMessage() for record in caplog.records] == [
        "1 line",
        "[NestedRestarter] name=[InProcess] state=waiting",
        "[NestedRestarter] name=[InProcess] state=waiting stage=long",
    ]


@pytest.mark.parametrize(("hook", "kind"), HOOKS)
def test_they_pass_for_what_they_are(hook: type, kind: type) -> None:
    assert isinstance(hook(), kind)


def test_words_and_logger_can_be_chosen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mine")
    hook = NestedRestarterAborted(restarter_state="gone", restarter_stage="late", logger=logging.getLogger("mine"))
    hook(FrozenState(rank=0, world_size=1, initial_rank=0))
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("mine", "[NestedRestarter] name=[InProcess] state=gone stage=late")
    ]
