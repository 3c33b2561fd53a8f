"""The example of Lightning: a second run continues from the last checkpoint, on another number of ranks."""

from pathlib import Path

import pytest

from tests.support import run_ranks
from tests.support.frameworks import LIGHTNING
from tests.support.selection import needs

needs("lightning")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "with_lightning.py"


@pytest.mark.timeout(200)
def test_it_continues(tmp_path: Path) -> None:
    first = run_ranks(SCRIPT, 2, tmp_path, 2, init_process_group=False, timeout=90, imports=LIGHTNING)
    assert "trained 2 epochs; best: epoch=1-step=16.ckpt, cpu" in first[0].stdout
    second = run_ranks(SCRIPT, 1, tmp_path, 3, init_process_group=False, timeout=90, imports=LIGHTNING)
    assert "trained 3 epochs; best: epoch=2-step=32.ckpt, cpu" in second[0].stdout
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {
        "epoch=1-step=16.ckpt",
        "epoch=2-step=32.ckpt",
        "last.ckpt",
    }
