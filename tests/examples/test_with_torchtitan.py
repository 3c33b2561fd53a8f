"""The example for torchtitan goes on after a kill, and ends with the same weights as a run that was not killed."""

from pathlib import Path

import pytest
import torch

import ckpt
from tests.ckpt.integrations.programs import torchtitan_on_cpu
from tests.examples.pages import assert_page_shows
from tests.support import run_ranks
from tests.support.frameworks import TORCHTITAN_ON_CPU
from tests.support.selection import FULL

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(torchtitan_on_cpu.__file__)
SMALL = "--checkpoint.interval 2 --training.steps 4 --training.seq_len 32 --training.local_batch_size 2 --debug.seed 1"


def options(folder: Path, module: str, config: str) -> list[str]:
    return ["--module", module, "--config", config, "--dump_folder", str(folder), *SMALL.split()]


@pytest.mark.timeout(400)
def test_it_goes_on_after_a_kill_like_a_run_without(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.components.checkpointer", exc_type=ImportError)
    example = options(tmp_path / "killed", "examples.with_torchtitan", "debugmodel")
    whole = options(tmp_path / "whole", torchtitan_on_cpu.__name__, "with_override")
    how = {"timeout": 120, "imports": TORCHTITAN_ON_CPU}
    run_ranks(SCRIPT, 2, "3", *example, **how, returncodes={0: -9, 1: -9}, survivors_timeout=30)
    rank = run_ranks(SCRIPT, 2, "0", *example, **how)[0]

    said = rank.stdout + rank.stderr
    assert f"Loaded step 2 from {tmp_path}/killed/checkpoint" in said
    assert [path.name for path in sorted((tmp_path / "killed/checkpoint").glob("step*"))] == [
        "step_00000002",
        "step_00000004",
    ]
    if not FULL:  # test_torchtitan.py compares a job that was resumed with one that was not stopped
        return
    run_ranks(SCRIPT, 2, "0", *whole, **how)
    with ckpt.open(tmp_path / "killed/checkpoint") as one, ckpt.open(tmp_path / "whole/checkpoint") as other:
        assert one.values_by_name == other.values_by_name
        assert set(one) == set(other)
        assert len(one) == 192
        for name in one:
            assert torch.equal(torch.from_numpy(one[name].read()), torch.from_numpy(other[name].read())), name


def test_the_page_shows_it() -> None:
    assert_page_shows("docs/integrations/torchtitan.md", REPOSITORY / "examples/with_torchtitan.py")
