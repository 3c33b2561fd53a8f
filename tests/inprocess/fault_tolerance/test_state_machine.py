from collections.abc import Callable

import pytest

from inprocess.fault_tolerance import InvalidStateTransitionException, RankMonitorState, RankMonitorStateMachine

S = RankMonitorState
PATHS: dict[S, list[S]] = {
    S.UNINITIALIZED: [],
    S.INITIALIZE: [S.INITIALIZE],
    S.HANDLING_START: [S.INITIALIZE, S.HANDLING_START],
    S.HANDLING_PROCESSING: [S.INITIALIZE, S.HANDLING_START, S.HANDLING_PROCESSING],
    S.HANDLING_COMPLETED: [S.INITIALIZE, S.HANDLING_START, S.HANDLING_COMPLETED],
    S.FINALIZED: [S.FINALIZED],
    S.ABORTED: [S.INITIALIZE, S.HANDLING_START, S.ABORTED],
}
EVENTS: dict[str, dict[S, S | None]] = {  # None: AssertionError; not named: no change
    "message": {
        S.UNINITIALIZED: S.INITIALIZE,
        S.HANDLING_START: S.HANDLING_COMPLETED,
        S.HANDLING_PROCESSING: S.HANDLING_COMPLETED,
        S.FINALIZED: None,
        S.ABORTED: None,
    },
    "lost": {
        S.INITIALIZE: S.HANDLING_START,
        S.HANDLING_COMPLETED: S.HANDLING_START,
        S.HANDLING_START: S.ABORTED,
        S.HANDLING_PROCESSING: S.ABORTED,
    },
    "check": {
        **dict.fromkeys(S),
        S.HANDLING_START: S.HANDLING_PROCESSING,
        S.HANDLING_PROCESSING: S.HANDLING_PROCESSING,
    },
    "signal": {
        **dict.fromkeys(S, S.FINALIZED),
        S.HANDLING_START: S.ABORTED,
        S.HANDLING_PROCESSING: S.ABORTED,
        S.UNINITIALIZED: S.UNINITIALIZED,
    },
}
DIRECT = {
    (S.UNINITIALIZED, S.INITIALIZE),
    (S.UNINITIALIZED, S.FINALIZED),
    (S.INITIALIZE, S.HANDLING_START),
    (S.INITIALIZE, S.FINALIZED),
    (S.HANDLING_START, S.HANDLING_PROCESSING),
    (S.HANDLING_START, S.HANDLING_COMPLETED),
    (S.HANDLING_START, S.ABORTED),
    (S.HANDLING_PROCESSING, S.HANDLING_PROCESSING),
    (S.HANDLING_PROCESSING, S.HANDLING_COMPLETED),
    (S.HANDLING_PROCESSING, S.ABORTED),
    (S.HANDLING_COMPLETED, S.HANDLING_START),
    (S.HANDLING_COMPLETED, S.FINALIZED),
    (S.ABORTED, S.FINALIZED),
    (S.FINALIZED, S.FINALIZED),
}


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log_restarter_event(self, message: str) -> None:
        self.lines.append(message)


def machine_in(state: S, log: Lines | None = None) -> RankMonitorStateMachine:
    machine = RankMonitorStateMachine(log or Lines())
    for step in PATHS[state]:
        machine.transition_to(step)
    assert machine.state is state
    return machine


def calls(machine: RankMonitorStateMachine, event: str) -> list[Callable[[], None]]:
    return {
        "message": [machine.handle_heartbeat_msg, machine.handle_section_msg],
        "lost": [machine.handle_ipc_connection_lost],
        "check": [machine.periodic_restart_check],
        "signal": [machine.handle_signal],
    }[event]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", S)
def test_events(event: str, state: S) -> None:
    expected = EVENTS[event].get(state, state)
    for index in range(len(calls(machine_in(state), event))):
        machine = machine_in(state)
        call = calls(machine, event)[index]
        if expected is None:
            with pytest.raises(AssertionError):
                call()
        else:
            call()
            assert machine.state is expected


@pytest.mark.parametrize("source", S)
@pytest.mark.parametrize("target", S)
def test_direct_transitions(source: S, target: S) -> None:
    machine = machine_in(source)
    assert machine.can_transition_to(target) == ((source, target) in DIRECT)
    if (source, target) in DIRECT:
        machine.transition_to(target)
    else:
        with pytest.raises(InvalidStateTransitionException):
            machine.transition_to(target)
    assert machine.is_restarting() == (machine.state in (S.HANDLING_START, S.HANDLING_PROCESSING))


def test_lines() -> None:
    log = Lines()
    machine = machine_in(S.HANDLING_COMPLETED, log)
    machine.handle_signal()
    assert log.lines == [
        "[NestedRestarter] name=[InJob] state=initialize",
        "[NestedRestarter] name=[InJob] state=handling stage=starting",
        "[NestedRestarter] name=[InJob] state=handling stage=completed",
        "[NestedRestarter] name=[InJob] state=finalized",
    ]
