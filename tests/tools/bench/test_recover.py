"""The benchmark of recoveries runs, and its table and document are complete."""

import json
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main
from tools.bench.recover import SITUATIONS


@full_only
@pytest.mark.timeout(240)  # it starts Python with torch fourteen times
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, document = tmp_path / "disk", tmp_path / "result.json"
    folder.mkdir()
    small = ["recover", "--gb", "0.004", "--rounds", "1", "--repeats", "1"]
    assert main([*small, "--folder", str(folder), "--json", str(document)]) == 0
    assert list(folder.iterdir()) == []

    result = json.loads(document.read_text())
    (taken,) = result["rounds"]
    assert set(taken) == {*SITUATIONS, "relaunch", "raised", "killed"}
    for recovery in (recovery for recoveries in taken.values() for recovery in recoveries):
        assert sum(recovery["phases"].values()) == pytest.approx(recovery["total"])
    assert taken["memory"][0]["from_memory"], "restored from where the benchmark says"
    assert taken["raised"][0]["from_memory"]
    assert taken["killed"][0]["from_memory"]
    assert not taken["cold"][0]["from_memory"]

    rows = {row["title"]: row for row in result["rows"]}
    targets = {row["target"] for row in rows.values() if row["target"] is not None}
    assert targets == {0.1, 1.0, 1.5}
    table = capsys.readouterr().out
    assert all(title in table for title in rows)


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["recover", "--repeats", "0"])
    assert "--repeats" in capsys.readouterr().err
