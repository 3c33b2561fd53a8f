"""The example with Ray Train goes on after a fault of a worker, and its steps are Ray's checkpoints, without a copy."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from tests.examples.pages import REPOSITORY, assert_page_shows
from tests.support.ray_cluster import processes_of, running_ray
from tests.support.selection import full_only, needs

needs("ray")

SCRIPT = REPOSITORY / "examples" / "with_ray.py"
KILLED = REPOSITORY / "tests" / "ckpt" / "integrations" / "programs" / "ray_killed.py"
_LIMIT_S = 420  # a minute on a machine that has nothing else to do

pytestmark = pytest.mark.timeout(2 * _LIMIT_S + 120)  # Ray starts some twenty processes, most of them with torch


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with running_ray() as variables:
        yield variables


def _run(script: Path, environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = {pid: name for pid, name in processes_of(environment).items() if name.startswith("ckpt-")}
    assert not left, "keepers and writers end with Ray's workers"
    return done.stdout


@full_only
def test_it_goes_on_and_ray_takes_the_steps_where_they_are(environment: dict[str, str], tmp_path: Path) -> None:
    printed = _run(SCRIPT, environment, str(tmp_path), "--name", "run7", "--steps", "40", "--fail-at", "25")
    assert "began after step 20; trained to step 40" in printed
    printed = _run(SCRIPT, environment, str(tmp_path), "--name", "run7", "--steps", "50")
    assert "began after step 40; trained to step 50" in printed
    run = tmp_path / "run7"
    state = json.loads((run / "checkpoint_manager_snapshot.json").read_text())
    names = [each["checkpoint_dir_name"] for each in state["checkpoint_results"]]
    assert names == [f"steps/step_{step:08d}" for step in (40, 50)]
    assert state["checkpoint_results"][-1]["metrics"]["step"] == 50  # recorded with the step
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["steps"]  # nothing was copied
    assert ckpt.Checkpointer(run / "steps", read_only=True).all_steps() == [40, 50]  # Ray has removed the others


@full_only
def test_what_all_workers_have_staged_is_published_when_ray_kills_them(
    environment: dict[str, str], tmp_path: Path
) -> None:
    found = json.loads(_run(KILLED, environment, str(tmp_path)).splitlines()[-1])
    assert found["names"] == ["ckpt-keeper"] * 2 + ["ckpt-writer"] * 2
    assert found["all ended"]
    assert found["start"] == 20
    assert found["path"] == str(tmp_path / "killed" / "steps" / "step_00000020")
    assert "such as Ray Train, leave the wrapper out" in found["wrapper"]


def test_the_page_shows_it() -> None:
    assert_page_shows("docs/ray.md", SCRIPT)
