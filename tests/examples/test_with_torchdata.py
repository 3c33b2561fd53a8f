"""The example with a data loader ends with the weights of a run that was not killed."""

import signal
from pathlib import Path

import pytest

from tests.examples.pages import assert_page_shows
from tests.support import run_ranks
from tests.support.frameworks import TORCHDATA
from tests.support.selection import needs

needs("torchdata")
pytestmark = pytest.mark.timeout(240)  # it starts Python with torch several times

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "with_torchdata.py"


def weights(root: Path, *more: str, first: int, died: bool = False) -> list[str]:
    codes = {0: -signal.SIGKILL, 1: -signal.SIGKILL} if died else None
    options = {"init_process_group": False, "timeout": 100, "returncodes": codes, "imports": TORCHDATA}
    results = run_ranks(SCRIPT, 2, f"--root={root}", *more, **options)
    lines = [result.stdout.strip() for result in results]
    assert died or all(line.startswith(f"rank {rank} from step {first}: ") for rank, line in enumerate(lines))
    return [line.partition("weights ")[2].partition(",")[0] for line in lines]


def test_killed_and_continued(tmp_path: Path) -> None:
    whole = weights(tmp_path / "whole", first=1)
    weights(tmp_path / "killed", "--die-at=8", first=1, died=True)
    assert weights(tmp_path / "killed", first=6) == whole


def test_the_page_shows_it() -> None:
    assert_page_shows("docs/integrations/torchdata.md", SCRIPT)
