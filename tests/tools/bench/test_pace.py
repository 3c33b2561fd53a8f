"""`ckpt.Optimal` in simulated jobs: as good as the best fixed interval, which is not known beforehand."""

import pytest

from ckpt.pace import Optimal
from tools.bench.goodput.pace import SETTINGS, PacedJob, best_fixed, lost

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
