"""The example with the Trainer ends, goes on when it is asked for more, and is what its page shows."""

from pathlib import Path

import pytest

import ckpt
from tests.examples.pages import assert_page_shows
from tests.support import run_ranks
from tests.support.frameworks import TRANSFORMERS
from tests.support.selection import needs

needs("transformers", "accelerate")

pytestmark = pytest.mark.timeout(200)  # the first test imports transformers

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "with_transformers.py"


def test_it_goes_on(tmp_path: Path) -> None:
    for steps, kept in (10, [10]), (35, [20, 30, 35]):
        args = (SCRIPT, 2, tmp_path, "--max-steps", steps)
        results = run_ranks(*args, timeout=90, init_process_group=False, imports=TRANSFORMERS)
        root = tmp_path / "checkpoints"
        assert results[0].stdout.splitlines()[-1] == f"step {steps} of {root}"
        with ckpt.Checkpointer(root, read_only=True) as checkpointer:
            assert checkpointer.all_steps() == kept
    with ckpt.open(root) as checkpoint:
        assert checkpoint.summary["continues"]["step"] == 30
    assert (tmp_path / "model.safetensors").exists()


def test_the_page_shows_it() -> None:
    assert_page_shows("docs/integrations/transformers.md", SCRIPT)
