"""Lightning with `CkptIO`: top-k, last, resume after a kill in a save, restarts; one rank, DDP and FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import RankResult, run_ranks
from tests.support.frameworks import LIGHTNING
from tests.support.selection import full_only, needs

needs("lightning")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Imports Lightning for these tests, and not in every process that collects them."""
    global jobs
    from tests.ckpt.integrations.programs import lightning_jobs as jobs


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns a hash of the weights after a run that nothing interrupts; it also tests its best checkpoint."""

    @functools.cache
    def weights(strategy: str) -> str:
        folder = tmp_path_factory.mktemp("whole")
        results = run_jobs(strategy, folder, None)
        assert [result.value for result in results] == [(results[0].value[0], jobs.EPOCHS)] * 2
        names = {path.name for path in folder.glob("*.ckpt")}
        assert names == {"epoch=2-step=12.ckpt", "epoch=3-step=16.ckpt", "last.ckpt"}
        assert [path.name for path in sorted(folder.glob("step_*"))] == [f"step_{n:08}" for n in (12, 16, 17)]
        return str(results[0].value[0])

    return weights


def run_jobs(
    strategy: str, folder: Path, ckpt_path: str | None, kill: tuple[int, int, str] | None = None
) -> list[RankResult]:
    codes = {} if kill is None else {kill[0]: -9, 1 - kill[0]: None}
    arguments = (strategy, folder, ckpt_path, kill)
    options = {"init_process_group": False, "timeout": 90, "imports": LIGHTNING}
    return run_ranks(jobs.train, 2, *arguments, returncodes=codes, **options)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "kill", "epochs_left"),
    [
        # The checkpoint of epoch 1 is absent: training continues after epoch 0.
        pytest.param("ddp", (0, 1, "staging"), 3, marks=full_only),
        pytest.param("ddp", (0, 1, "staged"), 2, marks=full_only),
        ("all ranks", (1, 1, "staging"), 3),
        pytest.param("fsdp2", (1, 1, "staging"), 3, marks=full_only),
        pytest.param("fsdp2", (1, 1, "staged"), 2, marks=full_only),
        ("fsdp2", (1, 0, "staging"), 4),  # there is no checkpoint at all: `last` starts from the beginning
    ],
)
def test_killed_in_a_save_and_resumed(
    strategy: str,
    kill: tuple[int, int, str],
    epochs_left: int,
    tmp_path: Path,
    whole_runs: Callable[[str], str],
) -> None:
    run_jobs(strategy, tmp_path, "last", kill)
    ended = run_jobs(strategy, tmp_path, "last")
    assert [result.value for result in ended] == [(whole_runs(strategy), epochs_left)] * 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=full_only), "fsdp2"])
def test_a_restart_in_the_same_processes_continues_from_the_last_step(
    strategy: str, tmp_path: Path, whole_runs: Callable[[str], str]
) -> None:
    program = Path(jobs.__file__).with_name("lightning_restart.py")
    results = run_ranks(program, 2, strategy, tmp_path, init_process_group=False, timeout=150, imports=LIGHTNING)
    for result in results:
        lines = [line for line in result.stdout.splitlines() if line.startswith(("iteration", "weights"))]
        assert lines == [
            *(f"iteration 0: epoch {epoch}" for epoch in range(3)),
            *(f"iteration 1: epoch {epoch}" for epoch in range(2, jobs.EPOCHS)),
            f"weights {whole_runs(strategy)}",
        ]
