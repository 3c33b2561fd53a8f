"""The example with background calls completes every save on both ranks."""

import json
from pathlib import Path

import pytest
import torch

from tests.examples.pages import assert_page_shows
from tests.support import run_ranks

pytestmark = pytest.mark.timeout(180)  # it starts Python with torch several times

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "with_async_calls.py"


def test_every_save_is_complete(tmp_path: Path) -> None:
    results = run_ranks(SCRIPT, 2, f"--root={tmp_path}", init_process_group=False, timeout=100)
    for result in results:
        assert result.stdout.startswith(f"rank {result.rank} is done, ")
    for step in (10, 20, 30):
        assert json.loads((tmp_path / str(step) / "complete.json").read_text()) == ["0.pt", "1.pt"]
        assert torch.load(tmp_path / str(step) / "1.pt")["weight"].shape == (64, 64)


def test_the_page_shows_it() -> None:
    assert_page_shows("docs/integrations/megatron.md", SCRIPT)
