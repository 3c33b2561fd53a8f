"""The benchmark of lost nodes runs, and its table and document are complete."""

import json
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main
from tools.bench.nodes import WAYS


@full_only
@pytest.mark.timeout(900)  # processes begin to import in advance after half a minute, and it starts torch 24 times
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, document = tmp_path / "disk", tmp_path / "result.json"
    folder.mkdir()
    assert main(["nodes", "--gb", "0.004", "--rounds", "1", "--folder", str(folder), "--json", str(document)]) == 0
    assert list(folder.iterdir()) == []

    result = json.loads(document.read_text())
    (taken,) = result["rounds"]
    assert set(taken) == set(WAYS)
    for name, loss in taken.items():
        phases = loss["phases"]
        assert min(phases.values()) >= 0
        assert sum(phases.values()) == pytest.approx(loss["total"] + phases.get("silence", 0.0))
        assert ("silence" in phases) == (name != "relaunch")
    table = capsys.readouterr().out
    assert all(row["title"] in table for row in result["rows"])


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nodes", "--silence", "1"])
    assert "--silence" in capsys.readouterr().err
