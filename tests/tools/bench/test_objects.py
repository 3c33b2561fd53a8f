"""The benchmark of object stores runs against a server of its own, and its table and document are complete."""

import json
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]  # of torch.distributed.checkpoint


@full_only
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server", reason="needs moto[server]")
    pytest.importorskip("obstore", reason="needs obstore")
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")  # the command sets them
    document = tmp_path / "result.json"
    assert main(["objects", "--gb", "0.004", "--rounds", "1", "--json", str(document)]) == 0
    result = json.loads(document.read_text())
    assert result["tensors"] == 404
    rows = {row["title"]: row for row in result["rows"]}
    assert "requests of a save" in rows
    assert all(value >= 0 for row in rows.values() for value in row["values"])
    table = capsys.readouterr().out
    assert all(title in table for title in rows)
