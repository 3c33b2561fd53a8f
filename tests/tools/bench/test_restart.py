"""The benchmark of restarts runs, and its table and document are complete."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tests.support.template import quick_python
from tools.bench.__main__ import main
from tools.bench.harness import percentile
from tools.bench.restart import FAULTS
from tools.bench.restart_burdens import BURDENS

pytestmark = pytest.mark.timeout(180)  # it starts Python with torch several times

REPOSITORY = Path(__file__).resolve().parents[3]


@full_only
def test_a_small_run(tmp_path: Path) -> None:
    document = tmp_path / "result.json"
    small = ["--ranks", "2", "--restarts", "1", "--soft-timeout", "1.1", "--idle", "0.5"]
    command = [quick_python(), "-m", "tools.bench", "restart", *small, "--json", str(document)]
    # In a process of its own: it forks, which pytest's process is not made for.
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr

    measured = json.loads(document.read_text())
    assert measured["restarts"].keys() == {*FAULTS, *BURDENS}
    for restarts in measured["restarts"].values():
        (restart,) = restarts
        assert 0 < restart["detected"] < restart["running"] < restart["ready"]
        assert restart["floor"] > 0
        assert {"outcome", "last_call", "aborted", "barrier", "assignment", "begin"} <= restart["phases"].keys()
    titles = [row["title"] for row in measured["rows"]]
    assert {f"{kind}: running again on all ranks" for kind in FAULTS} < set(titles)
    assert {f"exception, {burden}: running again on all ranks" for burden in BURDENS} < set(titles)
    assert [title for title in titles if title.startswith("idle")] == [
        "idle: active rank",
        "idle: active monitor process",
        "idle: spare rank",
        "idle: spare monitor process",
    ]
    assert [title for title in titles if title not in result.stdout] == []


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 0.95) == 95.0
    assert percentile([7.0], 0.95) == 7.0


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["restart", "--ranks", "1"])
    assert "--ranks" in capsys.readouterr().err
