"""`ckpt.Optimal` in simulated jobs: as good as the best fixed interval, which is not known beforehand.

A real job with so few faults says nothing about that; its test shows that the job restarts, restores and counts.
"""

from pathlib import Path

import pytest

from ckpt.pace import Optimal, Seconds
from tools.bench.goodput.pace import SETTINGS, PacedJob, best_fixed, lost
from tools.bench.pace import lost_in_a_job

_FAULTS, _SEED = 300, 5


@pytest.mark.parametrize("job", SETTINGS, ids=lambda job: job.name)
def test_optimal_loses_hardly_more_than_the_best_interval_of_a_sweep(job: PacedJob) -> None:
    _, least = best_fixed(job, _FAULTS, _SEED)
    for policy in (Optimal(), Optimal(mtbf=job.mtbf_s)):
        assert lost(job, policy.interval_s, _FAULTS, _SEED) <= 1.05 * least


def test_a_fixed_interval_can_be_far_worse() -> None:
    job = SETTINGS[3]
    _, least = best_fixed(job, _FAULTS, _SEED)
    assert lost(job, lambda _: 10_000.0, _FAULTS, _SEED) > 1.5 * least


@pytest.mark.timeout(120)
def test_a_real_job_loses_what_its_faults_destroy(tmp_path: Path) -> None:
    job = PacedJob("real", cost_s=0.01, latency_s=0.0, restart_s=0.0, mtbf_s=2.0)
    saved = lost_in_a_job(job, Seconds(0.2), tmp_path / "often", 2, _SEED)
    assert 0 < saved < 1
    assert lost_in_a_job(job, Seconds(3600), tmp_path / "never", 2, _SEED) == 1
