"""The example with accelerate ends, goes on when it is asked for more, and is what its page shows."""

from pathlib import Path

import pytest

import ckpt
from tests.examples.pages import assert_page_shows
from tests.support import run_ranks
from tests.support.frameworks import TRANSFORMERS
from tests.support.selection import needs

needs("transformers", "accelerate")

pytestmark = pytest.mark.timeout(200)  # the first test imports transformers

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "with_accelerate.py"


def test_it_goes_on(tmp_path: Path) -> None:
    for epochs, steps in (1, 16), (3, 48):
        args = (SCRIPT, 2, tmp_path, "--epochs", epochs)
        results = run_ranks(*args, timeout=90, init_process_group=False, imports=TRANSFORMERS)
        assert results[0].stdout.splitlines()[-1] == f"trained to step {steps}"
    with ckpt.open(tmp_path) as checkpoint:
        assert checkpoint.step == 40
        assert checkpoint.values_by_name["custom/epoch"] == 2
        assert checkpoint.values_by_name["custom/batch"] == 8


def test_the_page_shows_it() -> None:
    assert_page_shows("docs/integrations/accelerate.md", SCRIPT)
