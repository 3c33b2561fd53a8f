"""The benchmark of a save runs, and its table and document are complete."""

import json
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main

pytestmark = pytest.mark.timeout(180)  # it starts Python with torch several times


@full_only
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, document = tmp_path / "disk", tmp_path / "result.json"
    folder.mkdir()
    assert main(["save", "--gb", "0.004", "--rounds", "1", "--folder", str(folder), "--json", str(document)]) == 0
    assert list(folder.iterdir()) == []

    result = json.loads(document.read_text())
    assert result["tensors"] == 404
    assert 0.8 < result["staged_bytes"] / 4e6 < 1.2
    rows = {row["title"]: row for row in result["rows"]}
    targets = {title: row["target"] for title, row in rows.items() if row["target"] is not None}
    assert {targets["stall, steady"], targets["durable and published, after the stall"]} == {1.5}
    assert {"memory beside the state, at rest", "memory beside the state, both slots in use"} <= set(targets)
    assert all(value > 0 for row in rows.values() for value in row["values"] if "costs training" not in row["title"])

    table = capsys.readouterr().out
    assert all(title in table for title in rows)


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["save", "--rounds", "0"])
    assert "--rounds" in capsys.readouterr().err
