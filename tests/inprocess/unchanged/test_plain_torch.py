"""A function with a plain `init_process_group` meets anew after each restart, however its processes were started."""

from pathlib import Path

import pytest

from tests.inprocess.unchanged.starting import Way, run_program
from tests.support.selection import full_only

LAUNCHED = [Way.TORCHRUN, Way.CKPT_LAUNCHER, Way.ENVIRONMENT]
SURVIVES_DEATH = [Way.CKPT_LAUNCHER, Way.ENVIRONMENT]  # torchrun ends all ranks with the first that dies

pytestmark = pytest.mark.timeout(180)


def test_under_torchrun(tmp_path: Path) -> None:
    run_program("plain_torch", Way.TORCHRUN, tmp_path, faults="0:1:2:exception")


def test_rank_0_is_killed_under_our_launcher(tmp_path: Path) -> None:
    run_program("plain_torch", Way.CKPT_LAUNCHER, tmp_path, faults="0:0:6:kill", lost=(0,))


@full_only
def test_in_a_plain_environment(tmp_path: Path) -> None:
    run_program("plain_torch", Way.ENVIRONMENT, tmp_path, faults="0:1:6:exception 1:0:2:kill", lost=(0,))


def test_alone(tmp_path: Path) -> None:
    run_program("plain_torch", Way.ALONE, tmp_path, ranks=1, faults="0:0:2:exception 1:0:6:exception")


@full_only
@pytest.mark.parametrize("kind", ["exception", "hang"])
@pytest.mark.parametrize("way", LAUNCHED, ids=lambda way: way.value)
def test_two_faults_on_two_ranks(way: Way, kind: str, tmp_path: Path) -> None:
    run_program("plain_torch", way, tmp_path, faults=f"0:0:2:{kind} 1:2:6:{kind}")


@full_only
def test_a_hang_alone(tmp_path: Path) -> None:
    run_program("plain_torch", Way.ALONE, tmp_path, ranks=1, faults="0:0:2:hang")


@full_only
@pytest.mark.parametrize("step", [2, 6], ids=["in-ddp", "in-fsdp"])
@pytest.mark.parametrize("killed", [0, 1, 2])
@pytest.mark.parametrize("way", SURVIVES_DEATH, ids=lambda way: way.value)
def test_a_rank_is_killed(way: Way, killed: int, step: int, tmp_path: Path) -> None:
    run_program("plain_torch", way, tmp_path, faults=f"0:{killed}:{step}:kill", lost=(killed,))


@full_only
@pytest.mark.parametrize("way", SURVIVES_DEATH, ids=lambda way: way.value)
def test_all_kinds_one_after_the_other(way: Way, tmp_path: Path) -> None:
    faults = "0:1:6:exception 1:2:2:hang 2:0:6:kill 3:2:2:exception"
    run_program("plain_torch", way, tmp_path, faults=faults, lost=(0,))
