"""The benchmark of the coordination server runs, and its ranks send the requests of real ranks."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from inprocess.coordination import Access, RestartIndex, StoreServer
from inprocess.coordination.client import _Call
from inprocess.coordination.wire import Op
from tests.support.template import quick_python
from tools.bench.__main__ import main
from tools.bench.simulated_client import Receiver, SimulatedClient
from tools.bench.simulated_ranks import SimulatedRank

REPOSITORY = Path(__file__).resolve().parents[3]

_RECORDED = """
import json
from inprocess import Wrapper
from inprocess.coordination import CoordinationStore

asked = []
ask = CoordinationStore._ask

def recorded(self, *calls, **options):
    asked.extend((call.op.name, [field.decode(errors="replace") for field in call.fields]) for call in calls)
    return ask(self, *calls, **options)

CoordinationStore._ask = recorded
begun = []

def train():
    begun.append(len(asked))
    if len(begun) == 1:
        raise RuntimeError("once")

Wrapper()(train)()
print(json.dumps(asked[begun[0]:begun[1]]))
"""


def test_a_small_run(tmp_path: Path) -> None:
    document = tmp_path / "result.json"
    small = ["--ranks", "4", "--restarts", "1", "--idle", "0.2", "--json", str(document)]
    command = [quick_python(), "-m", "tools.bench", "coordination", *small]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=55)
    assert result.returncode == 0, result.stderr
    (measured,) = json.loads(document.read_text())["results"]
    assert measured["connections"] >= 8
    for kind in ("one", "all"):
        (restart,) = measured[kind]
        assert restart["cpu_s"] > 0
        assert restart["sent_bytes"] > 0
        assert sum(restart["requests"].values()) < 30 * 4
    assert "idle: share of a core" in result.stdout


class _Recording(SimulatedClient):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[tuple[str, list[str]]] = []

    def _ask(self, *calls: _Call, **options: Any) -> list[tuple[bytes, ...]]:
        for call in calls:
            self.asked.append((call.op.name, [field.decode(errors="replace") for field in call.fields]))
        return super()._ask(*calls, **options)


def _kinds(asked: list[tuple[str, list[str]]]) -> Counter[str]:
    """Count requests by operation and first key; without the wait for the outcome, which is made in slices."""
    guarded = {op.name for op in Op if op.changes or op.waits}
    counts = Counter(f"{op} {fields[2 if op in guarded else 0]}" for op, fields in asked)
    return Counter({key: n for key, n in counts.items() if not key.startswith("GET ") or "/outcome" not in key})


def test_the_simulation_sends_the_requests_of_a_rank() -> None:
    result = subprocess.run(
        [quick_python(), "-c", _RECORDED], cwd=REPOSITORY, capture_output=True, text=True, timeout=55
    )
    assert result.returncode == 0, result.stderr
    real = _kinds(json.loads(result.stdout.splitlines()[-1]))

    server = StoreServer(Access("127.0.0.1", 0))
    access = server.start()
    receiver = Receiver()
    rank = SimulatedRank(access, receiver, 0, 1, ping_s=100.0)
    rank.client.close()
    client = rank.client = _Recording(access, receiver, ping_s=100.0)
    RestartIndex(client).begin()
    rank.begin(1000.0)
    client.asked.clear()
    rank.restart(raises=True)
    rank.begin(1000.0)
    simulated = _kinds(client.asked)
    rank.close()
    server.close()
    assert simulated == real


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["coordination", "--ranks", "1"])
    assert "--ranks" in capsys.readouterr().err
