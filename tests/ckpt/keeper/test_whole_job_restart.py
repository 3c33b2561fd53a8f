"""All processes of a job are killed, and the launcher's next ones go on from what these had in memory."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.ckpt.keeper.support import no_keepers_are_left
from tests.support.selection import full_only
from tests.support.template import REPOSITORY, quick_python

_PROGRAM = Path(__file__).with_name("program.py")
_LAUNCHERS = {"ckpt_launcher": "inprocess.fault_tolerance.launcher", "torchrun": "torch.distributed.run"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["ckpt_launcher", pytest.param("torchrun", marks=full_only)])
def test_the_newest_snapshot_is_restored_from_memory(tmp_path: Path, runtime: Path, launcher: str) -> None:
    """Twice; and in the end nothing is left."""
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1"]
    plan = [5, 7, None]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Without that, torchrun gives all starts one store, in which gloo finds addresses of the last one.
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(runtime), "PYTHON_EXEC": quick_python()}
    done = subprocess.run(
        [quick_python(), "-m", _LAUNCHERS[launcher], *options, str(_PROGRAM), str(tmp_path), json.dumps(plan)],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [[json.loads((tmp_path / f"{start}-{rank}.json").read_text()) for rank in (0, 1)] for start in range(3)]
    assert found[0] == 2 * [[None, None, None, True]]
    assert found[1:] == [2 * [[step, "lingering memory", 0, True]] for step in (4, 6)]
    assert [path.name for path in (tmp_path / "root").rglob("*")] == [".owner", "root.json"], "nothing was saved"
    no_keepers_are_left(runtime)
