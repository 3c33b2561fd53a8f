"""The phases of a launcher's restart, as one monitor sees them: logged for external readers, and nothing else.

UNINITIALIZED ─▶ INITIALIZE ◀──────────────────────────┐ (message: no change)
                     │ connection lost                  │
                     ▼                                  │
              HANDLING_START ─▶ HANDLING_PROCESSING ─▶ HANDLING_COMPLETED ─▶ HANDLING_START …
                     └───── lost again, or signal ─────▶ ABORTED ─▶ FINALIZED
"""

from __future__ import annotations

import enum
from typing import Any, Protocol


class RankMonitorState(enum.Enum):
    """Where the restarts of the job are."""

    UNINITIALIZED = "uninitialized"
    INITIALIZE = "initialize"
    HANDLING_START = "handling_start"
    HANDLING_PROCESSING = "handling_processing"
    HANDLING_COMPLETED = "handling_completed"
    FINALIZED = "finalized"
    ABORTED = "aborted"


_S = RankMonitorState
_HANDLING = (_S.HANDLING_START, _S.HANDLING_PROCESSING)
_TERMINAL = (_S.FINALIZED, _S.ABORTED)
_NEXT: dict[RankMonitorState, frozenset[RankMonitorState]] = {
    _S.UNINITIALIZED: frozenset({_S.INITIALIZE, _S.FINALIZED}),
    _S.INITIALIZE: frozenset({_S.HANDLING_START, _S.FINALIZED}),
    _S.HANDLING_START: frozenset({_S.HANDLING_PROCESSING, _S.HANDLING_COMPLETED, _S.ABORTED}),
    _S.HANDLING_PROCESSING: frozenset({_S.HANDLING_PROCESSING, _S.HANDLING_COMPLETED, _S.ABORTED}),
    _S.HANDLING_COMPLETED: frozenset({_S.HANDLING_START, _S.FINALIZED}),
    _S.ABORTED: frozenset({_S.FINALIZED}),
    _S.FINALIZED: frozenset({_S.FINALIZED}),
}
_WORDS: dict[RankMonitorState, tuple[str, str | None]] = {
    _S.INITIALIZE: ("initialize", None),
    _S.HANDLING_START: ("handling", "starting"),
    _S.HANDLING_PROCESSING: ("handling", "processing"),
    _S.HANDLING_COMPLETED: ("handling", "completed"),
    _S.FINALIZED: ("finalized", None),
    _S.ABORTED: ("aborted", None),
}


class InvalidStateTransitionException(Exception):
    """The present state has no transition to that one."""


class TakesEvents(Protocol):
    """The method that the machine needs of a logger."""

    def log_restarter_event(self, message: str) -> Any: ...


class RestarterLog:
    """Passes restart events on to an ordinary logger, on the one monitor of a node that is to log them."""

    def __init__(self, logger: Any, prints: bool) -> None:
        self._logger = logger
        self.prints = prints

    def log_restarter_event(self, message: str) -> None:
        """Log one line at INFO, or nothing."""
        if self.prints:
            self._logger.info(message)


class RankMonitorStateMachine:
    """The present phase; each change is logged as "[NestedRestarter] name=[InJob] state=... [stage=...]"."""

    def __init__(self, logger: TakesEvents) -> None:
        self._logger = logger
        self._state = RankMonitorState.UNINITIALIZED

    @property
    def state(self) -> RankMonitorState:
        """The present state."""
        return self._state

    def is_restarting(self) -> bool:
        """Whether a connection was lost and there was none since."""
        return self._state in _HANDLING

    def can_transition_to(self, state: RankMonitorState) -> bool:
        """Whether `transition_to` would accept the state."""
        return state in _NEXT[self._state]

    def transition_to(self, state: RankMonitorState) -> None:
        """Change the state, and log that. InvalidStateTransitionException if there is no such transition."""
        if not self.can_transition_to(state):
            raise InvalidStateTransitionException(f"no transition from {self._state.name} to {state.name}")
        self._state = state
        word, stage = _WORDS[state]
        line = f"[NestedRestarter] name=[InJob] state={word}"
        self._logger.log_restarter_event(line if stage is None else f"{line} stage={stage}")

    def handle_heartbeat_msg(self) -> None:
        """A rank has sent a heartbeat. AssertionError in a final state."""
        self._handle_message("heartbeat")

    def handle_section_msg(self) -> None:
        """A rank has opened or closed a section. AssertionError in a final state."""
        self._handle_message("section event")

    def handle_ipc_connection_lost(self) -> None:
        """The rank has disconnected. The second time without a message in between, the restart has failed."""
        if self._state in (_S.INITIALIZE, _S.HANDLING_COMPLETED):
            self.transition_to(_S.HANDLING_START)
        elif self._state in _HANDLING:
            self.transition_to(_S.ABORTED)

    def periodic_restart_check(self) -> None:
        """A restart is still going on. AssertionError if there is none."""
        if self._state not in _HANDLING:
            raise AssertionError(f"there is no restart in {self._state.name}")
        self.transition_to(_S.HANDLING_PROCESSING)

    def handle_signal(self) -> None:
        """The monitor is told to end."""
        if self._state in _HANDLING:
            self.transition_to(_S.ABORTED)
        elif self._state is not _S.UNINITIALIZED:
            self.transition_to(_S.FINALIZED)

    def _handle_message(self, what: str) -> None:
        if self._state in _TERMINAL:
            raise AssertionError(f"a {what} in {self._state.name}")
        if self._state is _S.UNINITIALIZED:
            self.transition_to(_S.INITIALIZE)
        elif self._state in _HANDLING:
            self.transition_to(_S.HANDLING_COMPLETED)
