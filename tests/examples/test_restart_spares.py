"""The example with spares: a killed rank is replaced by the spare of its node."""

import signal
from pathlib import Path

from tests.support import run_ranks

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "restart_spares.py"


def test_the_spare_of_the_node_takes_over() -> None:
    results = run_ranks(SCRIPT, 4, init_process_group=False, returncodes={2: -signal.SIGKILL})
    assert [result.stdout.splitlines() for result in results] == [
        [
            "iteration 0: process 0 is rank 0 of 2",
            "iteration 1: process 0 is rank 0 of 2",
            "process 0: sum over the active ranks 2",
        ],
        ["process 1: was a spare"],
        ["iteration 0: process 2 is rank 1 of 2"],
        ["iteration 1: process 3 is rank 1 of 2", "process 3: sum over the active ranks 2"],
    ]
