"""The benchmark of validation runs, and its table and document are complete."""

import json
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main
from tools.bench.validate import COMMANDS

pytestmark = pytest.mark.timeout(180)  # it starts Python with torch several times


@full_only
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, document = tmp_path / "disk", tmp_path / "result.json"
    folder.mkdir()
    small = ["validate", "--gb", "0.004", "--rounds", "1", "--tensors", "16"]
    assert main([*small, "--folder", str(folder), "--json", str(document)]) == 0
    assert list(folder.iterdir()) == []

    result = json.loads(document.read_text())
    rows = {row["title"]: row for row in result["rows"]}
    assert {f"16 tensors: {name}" for name in COMMANDS} < rows.keys()
    assert rows["validate, page cache cold"]["target"] == 0.8
    assert all(value > 0 for row in rows.values() for value in row["values"])
    speed = rows["validate, page cache cold"]
    assert speed["met"] == (speed["ratio"] >= 0.8)

    table = capsys.readouterr().out
    assert all(title in table for title in rows)


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["validate", "--tensors", "0"])
    assert "--tensors" in capsys.readouterr().err
