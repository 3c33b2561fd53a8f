from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run_ranks
from tests.tools.inspect_ckpt import states
from tests.tools.inspect_ckpt.commands import Commands


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Roots with two small steps of different content, with every kind of file. Tests must not change them."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(states.save_all, 1, folder)
    run_ranks(states.save_two_ranks, 2, folder)
    return {name: folder / name for name in states.NAMES}
