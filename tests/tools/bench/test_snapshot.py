"""The benchmarks of snapshots and of their replicas run, and tables and documents are complete."""

import json
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main

pytestmark = [full_only, pytest.mark.timeout(300)]  # they start several ranks, and restart them


def _run(kind: str, tmp_path: Path, *more: str) -> list[tuple[str, float | None]]:
    """Run a kind with little data, and return titles and targets of the rows of its document."""
    folder, document = tmp_path / "disk", tmp_path / "result.json"
    folder.mkdir()
    small = ["--gb", "0.004", "--rounds", "1", "--folder", str(folder), "--json", str(document)]
    assert main([kind, *small, *more]) == 0
    assert list(folder.iterdir()) == []
    return [(row["title"], row["target"]) for row in json.loads(document.read_text())["rows"]]


def test_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _run("snapshot", tmp_path)
    assert [target for _, target in rows if target is not None] == 2 * [1.1, 1.2, 1.03, 1.0]
    table = capsys.readouterr().out
    assert all(title in table for title, _ in rows)


def test_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _run("replicas", tmp_path, "--bandwidth", "0.1")
    assert [title for title, _ in rows if "without" in title] == [
        "no limit: a step and its snapshot, without replicas",
        "at most 0.1 GB/s: a step and its snapshot, without replicas",
    ]
    assert [target for _, target in rows if target is not None] == 2 * [1.3]
    table = capsys.readouterr().out
    assert all(title in table for title, _ in rows)
