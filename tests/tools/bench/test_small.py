"""The benchmark of many small tensors runs, and its table and document are complete."""

import json
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main

pytestmark = pytest.mark.timeout(180)


@full_only
def test_a_run_of_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, document = tmp_path / "disk", tmp_path / "result.json"
    folder.mkdir()
    assert main(["small", "--count", "400", "--rounds", "1", "--folder", str(folder), "--json", str(document)]) == 0
    assert list(folder.iterdir()) == []
    one, *others = json.loads(document.read_text())["rows"]
    assert one["title"] == "one tensor"
    assert one["target"] is None
    assert len(others) == 4
    assert all(row["target"] == 2.0 for row in others)
    assert all(value > 0 for row in (one, *others) for value in row["values"])
    assert len(one["values"]) == 1
    table = capsys.readouterr().out
    assert all(row["title"] in table for row in others)
