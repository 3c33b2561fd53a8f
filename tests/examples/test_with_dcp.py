"""The example of torch.distributed.checkpoint continues on another number of ranks, and the page shows its lines."""

import re
from pathlib import Path

import pytest

import ckpt
from tests.support import run_ranks

pytestmark = pytest.mark.timeout(270)  # it starts Python with torch several times

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "with_dcp.py"


def _train(root: Path, steps: int, ranks: int) -> str:
    return run_ranks(SCRIPT, ranks, "--root", str(root), "--steps", str(steps), timeout=80)[0].stdout


def test_a_run_in_two_parts_ends_like_one_run(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole", 6, 2)
    assert whole.startswith("from step None to 6, loss ")
    _train(tmp_path / "parts", 4, 2)
    again = _train(tmp_path / "parts", 6, 1)
    assert again.startswith("from step 4 to 6, loss ")
    assert float(again.split()[-1]) == pytest.approx(float(whole.split()[-1]), rel=1e-3)
    assert ckpt.Checkpointer(tmp_path / "parts").all_steps() == [4, 6]


def test_the_page_shows_lines_of_the_example() -> None:
    page = (REPOSITORY / "docs" / "integrations" / "dcp.md").read_text()
    example = {line.strip() for line in SCRIPT.read_text().splitlines()}
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    shown = [line.strip() for line in block.splitlines() if line.strip() not in ("", "...")]
    assert len(shown) > 10
    assert [line for line in shown if line not in example] == []
