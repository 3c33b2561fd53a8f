"""A board out of the settings."""

from __future__ import annotations

from typing import Any, Protocol

from inprocess.sections.board import Board
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = ["SectionSettings", "configured_limits", "make_board"]


class SectionSettings(Protocol):
    """What a board is made of; `fault_tolerance.FaultToleranceConfig` has it."""

    rank_section_timeouts: dict[str, float | None]
    rank_out_of_section_timeout: float | None
    initial_rank_heartbeat_timeout: float | None
    rank_heartbeat_timeout: float | None
    num_warmup_iterations: int

    def to_dict(self) -> dict[str, Any]: ...


def configured_limits(config: SectionSettings) -> tuple[HeartbeatTimeouts, SectionTimeouts]:
    """Return the limits of the settings."""
    beats = HeartbeatTimeouts(config.initial_rank_heartbeat_timeout, config.rank_heartbeat_timeout)
    return beats, SectionTimeouts(config.rank_section_timeouts, config.rank_out_of_section_timeout)


def make_board(config: SectionSettings) -> tuple[Board, int]:
    """Return a board for these settings, with their limits, and its descriptor, which the caller closes."""
    board, fd = Board.create(list(config.rank_section_timeouts), config.to_dict(), config.num_warmup_iterations)
    board.set_limits(*configured_limits(config))
    return board, fd
