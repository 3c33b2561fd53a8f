from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inprocess.fault_tolerance.launching import Job, LauncherServer
from tests.inprocess.fault_tolerance.workers import Node


@pytest.fixture(scope="session")
def launchers() -> Iterator[LauncherServer]:
    found = LauncherServer()
    yield found
    found.close()


@pytest.fixture
def job(launchers: LauncherServer, tmp_path: Path) -> Iterator[Job]:
    found = Job(launchers, tmp_path)
    yield found
    found.close()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("FT_LAUNCHER_IPC_SOCKET", raising=False)
    with Node(tmp_path) as found:
        monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", found.path)
        yield found
