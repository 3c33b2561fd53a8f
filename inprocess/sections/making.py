"""Creates a board from the settings."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from inprocess.sections import board as at
from inprocess.sections.board import Board
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts


class SectionSettings(Protocol):
    """The settings that a board needs; `fault_tolerance.FaultToleranceConfig` has them."""

    rank_section_timeouts: dict[str, float | None]
    rank_out_of_section_timeout: float | None
    initial_rank_heartbeat_timeout: float | None
    rank_heartbeat_timeout: float | None
    num_warmup_iterations: int

    def to_dict(self) -> dict[str, Any]: ...


def configured_limits(config: SectionSettings) -> tuple[HeartbeatTimeouts, SectionTimeouts]:
    """Return the limits in the settings."""
    beats = HeartbeatTimeouts(config.initial_rank_heartbeat_timeout, config.rank_heartbeat_timeout)
    return beats, SectionTimeouts(config.rank_section_timeouts, config.rank_out_of_section_timeout)


def make_board(config: SectionSettings) -> tuple[Board, int]:
    """Create a board with the limits in these settings. Returns it with its descriptor, which the caller closes."""
    fd = _memory(list(config.rank_section_timeouts), config.to_dict(), config.num_warmup_iterations)
    try:
        board = Board.attach(fd)
        board.set_limits(*configured_limits(config))
    except BaseException:
        os.close(fd)
        raise
    return board, fd


def _memory(names: Sequence[str], config: Mapping[str, Any], num_warmup_iterations: int) -> int:
    """Return the descriptor of a new board without activity and limits. OSError."""
    blob = json.dumps({"names": list(names), "config": dict(config)}).encode()
    count = len(names)
    size = 8 * (at.SECTIONS + at.WORDS_PER_SECTION * count + 2 * at.RECENT) + len(blob)
    fd = os.memfd_create("inprocess-sections", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size + -size % 8)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with mmap.mmap(fd, 0) as memory:
            with memoryview(memory).cast("q") as words:
                words[at.MAGIC_AT] = at.MAGIC
                words[at.SECTION_COUNT], words[at.BLOB_BYTES] = count, len(blob)
                words[at.STEP_AGE] = words[at.ITERATION] = -1
                words[at.INITIAL_LIMIT] = words[at.BEAT_LIMIT] = words[at.OUT_LIMIT] = -1
                words[at.WARMUP_ITERATIONS] = num_warmup_iterations
                for index in range(count):
                    words[at.SECTIONS + at.WORDS_PER_SECTION * index + 1] = -1
            memory[size - len(blob) : size] = blob
    except BaseException:
        os.close(fd)
        raise
    return fd
