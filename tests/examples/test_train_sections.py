"""The example with sections recovers from each hang, and ends with the weights of a run without hangs."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inprocess.fault_tolerance.launching import Job, Launcher, LauncherServer
from tests.support.selection import full_only

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "train_sections.py"
STEPS = 12
LIMITS = "setup:60,step:5,checkpoint:5,ckpt.write:60"
HANGS = ["--hang=step:4", "--hang=checkpoint:9"]


@pytest.fixture(scope="module")
def warm() -> Iterator[LauncherServer]:
    found = LauncherServer("torch.nn.parallel", "ckpt.restart", "inprocess.wrap", "inprocess.fault_tolerance")
    yield found
    found.close()


@pytest.fixture
def example(warm: LauncherServer, tmp_path: Path) -> Iterator[Job]:
    found = Job(warm, tmp_path)
    yield found
    found.close()


def start(job: Job, name: str, *arguments: str, steps: int = STEPS) -> Launcher:
    options = [f"--ft-rank-section-timeouts={LIMITS}", "--ft-safety-factor=1000", "--max-restarts=3"]
    common = [f"--root={job.folder / name}", f"--steps={steps}", "--save-every=3", "--learn-after=6"]
    return job.run_example(SCRIPT, [*common, *arguments], *options)


def weights(launcher: Launcher, step: int = STEPS) -> str:
    found = re.search(rf"step {step}: weights sha256 (\w+)", launcher.log())
    assert found, launcher.log()
    return found[1]


@full_only
@pytest.mark.timeout(150)
def test_it_recovers_from_hangs_to_the_same_weights(example: Job) -> None:
    undisturbed = start(example, "undisturbed")
    assert undisturbed.wait(60) == 0
    assert "hangs" not in undisturbed.log()

    launched = start(example, "launched", *HANGS)
    assert launched.wait(100) == 0, launched.log()
    assert weights(launched) == weights(undisturbed)
    for said in ("hangs in section step, step 4", "hangs in section checkpoint, step 9", "cycle 2 begins"):
        assert said in launched.log()
    assert "begins after step 3" in launched.log()
    assert "root suspect: rank 1, in 'step'" in launched.log()
    assert "root suspect: rank 0" not in launched.log()
    assert re.search(r"begins after step [69], .*calculated_sections=\{'(step|checkpoint)', '", launched.log()), (
        "learned limits are restored with the checkpoint"
    )


@full_only
@pytest.mark.timeout(150)
def test_it_recovers_in_process(example: Job) -> None:
    undisturbed = start(example, "undisturbed")
    assert undisturbed.wait(60) == 0
    stayed = start(example, "stayed", "--in-process", f"--limits={LIMITS}", "--safety-factor=1000", *HANGS)
    assert stayed.wait(100) == 0, stayed.log()
    assert weights(stayed) == weights(undisturbed)
    assert "cycle 1 begins" not in stayed.log(), "the launcher has restarted no worker"
    assert stayed.log().count("begins after step") == 3


@full_only
@pytest.mark.timeout(150)
def test_sigterm_saves_and_ends_well_and_the_job_goes_on(example: Job) -> None:
    undisturbed = start(example, "undisturbed", steps=300)
    first = start(example, "stopped", steps=300)
    first.wait_log("begins after step 0")
    first.signal(signal.SIGTERM)
    assert first.wait(60) == 0, first.log()
    stopped_at = re.search(r"step (\d+): weights", first.log())
    assert stopped_at is not None
    assert int(stopped_at[1]) < 300
    second = start(example, "stopped", steps=300)
    assert second.wait(60) == 0
    assert f"begins after step {stopped_at[1]}" in second.log()
    assert undisturbed.wait(60) == 0
    assert weights(second, 300) == weights(undisturbed, 300)
