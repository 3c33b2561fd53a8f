"""`Logging` and `TensorBoard`: records and curves of what a job does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import events
from ckpt.sinks import Logging, TensorBoard


def test_what_went_wrong_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="ckpt.events"),
        ckpt.observe(Logging()),
        ckpt.Checkpointer(tmp_path) as checkpointer,
    ):
        checkpointer.save({"w": torch.ones(1000)}, 1)
        with pytest.raises(ckpt.CheckpointExistsError):
            checkpointer.save({"w": torch.ones(1000)}, 1)
    records: list[Any] = [record for record in caplog.records if record.name == "ckpt.events"]
    names = [record.ckpt["event"] for record in records]
    saved = ["SaveStarted", "SaveStaged"]
    assert names == [*saved, "SavePublished", *saved, "SaveAbandoned", "Closed"]
    levels = [record.levelno for record in records]
    assert levels == [*[logging.INFO] * 5, logging.WARNING, logging.INFO]
    assert records[2].getMessage().startswith("SavePublished rank=0 step=1 bytes=")
    assert "already published" in records[5].getMessage()


def test_a_line_break_of_a_cause_begins_no_line(caplog: pytest.LogCaptureFixture) -> None:
    Logging()(events.SaveAbandoned(1.0, 0, 1, None, "StorageError", "first\nERROR forged"))
    assert "\n" not in caplog.records[0].getMessage()


def test_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    state = {"w": torch.ones(1000)}
    with (
        ckpt.observe(TensorBoard(tmp_path / "curves_{rank}")) as handle,
        ckpt.Checkpointer(tmp_path / "root") as checkpointer,
    ):
        for step in (10, 20):
            checkpointer.save(state, step)
        with pytest.raises(ckpt.CheckpointExistsError):
            checkpointer.save(state, 20)
        checkpointer.restore(state)
    assert handle.failed == 0
    found = EventAccumulator(str(tmp_path / "curves_0"))  # type: ignore[no-untyped-call]
    found.Reload()  # type: ignore[no-untyped-call]

    def curve(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in found.Scalars(f"ckpt/{name}")]  # type: ignore[no-untyped-call]

    assert [step for step, _ in curve("save_seconds")] == [10, 20]
    assert [step for step, _ in curve("stall_seconds")] == [10, 20, 20]
    assert all(rate > 0 for _, rate in curve("write_bytes_per_second"))
    assert curve("abandoned_saves") == [(20, 1.0)]
    assert [step for step, _ in curve("restore_seconds")] == [20]
