"""What a trainer spends in checkpoints can be watched: as sections with time limits, for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.restart import report_sections


class Client:
    """Takes sections like a `RankMonitorClient`."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.seen.append(f"begin {name}")
        try:
            yield
        finally:
            self.seen.append(f"end {name}")


def test_phases_are_reported_around_what_they_name(tmp_path: Path) -> None:
    client = Client()
    state = {"w": torch.ones(10)}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        report_sections(checkpointer, client)  # type: ignore[arg-type]
        checkpointer.restore(state)
        assert client.seen == ["begin ckpt.restore", "end ckpt.restore"]
        client.seen.clear()
        request = checkpointer.save_request(state, 1)
        assert client.seen == ["begin ckpt.stage", "end ckpt.stage"]
        checkpointer.queue.schedule_async_request(request)
        client.seen.clear()
        checkpointer.maybe_finalize(blocking=True)
        assert client.seen == ["begin ckpt.finalize", "end ckpt.finalize"]


def test_a_phase_that_fails_is_ended(tmp_path: Path) -> None:
    client = Client()
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        report_sections(checkpointer, client)  # type: ignore[arg-type]
        with pytest.raises(ckpt.StateError):
            checkpointer.save_request({"lock": object()}, 1)
    assert client.seen == ["begin ckpt.stage", "end ckpt.stage"]
