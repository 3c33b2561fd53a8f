"""The benchmark of very many ranks runs, and its table and document are complete."""

import json
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main


@full_only
@pytest.mark.timeout(180)  # it starts Python with torch several times
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, document = tmp_path / "disk", tmp_path / "result.json"
    folder.mkdir()
    small = {"tensors": 20, "ranks": 8, "parts": 8, "repeats": 1, "names": 64, "different": 16}
    options = [word for name, number in small.items() for word in (f"--{name}", str(number))]
    assert main(["scale", *options, "--folder", str(folder), "--json", str(document)]) == 0
    assert list(folder.iterdir()) == []

    result = json.loads(document.read_text())
    assert result["scale"].keys() == {"planning", "commit", "open", "pipeline", "replicas", "experts"}
    assert all(seconds > 0 for seconds in result["scale"]["planning"]["first"])
    titles = [row["title"] for row in result["rows"]]
    assert len(titles) == 22
    table = capsys.readouterr().out
    assert all(title in table for title in titles)
