"""Loops of known libraries, unchanged, inside the wrapped function: what they keep in globals is reset."""

import importlib.util
from pathlib import Path

import pytest

from tests.inprocess.unchanged.starting import Way, run_program
from tests.support.selection import full_only

PROGRAM_OF = {"accelerate": "with_accelerate", "transformers": "with_trainer", "lightning": "with_lightning"}
SURVIVES_DEATH = [Way.CKPT_LAUNCHER, Way.ENVIRONMENT]

pytestmark = pytest.mark.timeout(200)


def run_library(library: str, way: Way, folder: Path, ranks: int, faults: str, lost: tuple[int, ...] = ()) -> None:
    """Run the library's program, if it is there; it must have had the numbers of each iteration."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; the extra `frameworks` has it")
    ended = run_program(PROGRAM_OF[library], way, folder, ranks=ranks, faults=faults, lost=lost, timeout=180)
    for begins, seen in zip(ended.lines("begin"), ended.lines("ranks"), strict=True):
        numbers = {(line["pid"], line["call"]): (line["RANK"], line["WORLD_SIZE"]) for line in begins}
        for line in seen:
            assert numbers[line["pid"], line["call"]] == (str(line["rank"]), str(line["world_size"])), ended.output


def test_accelerate_after_rank_0_is_killed(tmp_path: Path) -> None:
    run_library("accelerate", Way.ENVIRONMENT, tmp_path, 2, "0:0:2:kill", lost=(0,))


@full_only
@pytest.mark.parametrize("library", PROGRAM_OF)
@pytest.mark.parametrize("kind", ["exception", "hang"])
def test_under_torchrun(library: str, kind: str, tmp_path: Path) -> None:
    run_library(library, Way.TORCHRUN, tmp_path, 2, f"0:1:2:{kind} 1:0:3:{kind}")


@full_only
@pytest.mark.parametrize("library", ["accelerate", "transformers"])
@pytest.mark.parametrize("way", SURVIVES_DEATH, ids=lambda way: way.value)
def test_all_kinds_one_after_the_other(library: str, way: Way, tmp_path: Path) -> None:
    run_library(library, way, tmp_path, 3, "0:1:2:exception 1:2:3:hang 2:0:2:kill", lost=(0,))


@full_only
def test_lightning_loses_its_last_rank(tmp_path: Path) -> None:
    run_library("lightning", Way.CKPT_LAUNCHER, tmp_path, 3, "0:1:2:exception 1:0:3:hang 2:2:2:kill", lost=(2,))
