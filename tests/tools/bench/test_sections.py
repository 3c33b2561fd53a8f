"""The benchmark of section monitoring runs, and its table and document are complete."""

import json
import subprocess
from pathlib import Path

from tests.support.selection import full_only
from tests.support.template import quick_python

REPOSITORY = Path(__file__).resolve().parents[3]


@full_only
def test_a_small_run(tmp_path: Path) -> None:
    document = tmp_path / "result.json"
    small = ["--pairs", "200", "--hangs", "2", "--seconds", "0.3", "--ranks", "2", "--json", str(document)]
    # In a process of its own: it forks, which pytest's process is not made for.
    command = [quick_python(), "-m", "tools.bench", "sections", *small]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=55)
    assert result.returncode == 0, result.stderr
    rows = {row["title"]: row["values"] for row in json.loads(document.read_text())["rows"]}
    for title in ("hang noticed late by", "hang noticed late by, beside them"):
        assert len(rows[title]) == 2
        assert all(0 <= late < 30 for late in rows[title])
    assert all(value > 0 for value in rows["start and end, shared memory"])
    assert all(share >= 0 for share in rows["monitor of 2 busy ranks, of a core"])
    assert len(rows["events of each rank"]) == 2
    assert rows["events lost"] == [0]
    assert all(title in result.stdout for title in rows)
