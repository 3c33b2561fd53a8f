"""How many saves in flight a death loses, by what is done about them. Printed; the assertions are about the policies.

A trainer dies at a random time after all ranks have staged a save; the other one recovers.
"""

import ctypes
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import rank_values
from tests.support.selection import FULL

_RUNS = 20 if FULL else 1
_LATEST_S = 0.2
# Of the others the numbers are printed only.
_POLICIES = ("drain", "abort", "writers killed") if FULL else ("drain",)


def _one_dies(rank: int, world_size: int, folder: Path, policy: str, after_s: float) -> dict[str, Any] | None:
    import torch
    import torch.distributed as dist

    import ckpt

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with the parent that forked it
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    checkpointer = ckpt.Checkpointer(folder / "root")
    state = {"w": [torch.ones(1 << 20) for _ in range(8)]}
    checkpointer.register(**state)
    checkpointer.save(state, 1)
    dist.barrier()
    checkpointer.async_save(state, 2)
    (folder / f"staged.{rank}").touch()
    while not (folder / f"staged.{1 - rank}").exists():
        time.sleep(0.001)
    time.sleep(after_s)
    if policy == "writers killed":
        for process in psutil.Process().children(recursive=True):
            if process.name() == "ckpt-writer":
                process.kill()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    checkpointer.bridge.recover_from_fault(None if policy == "abort" else timedelta(seconds=20))
    answer = {"step": checkpointer.resume_step, "s": time.monotonic() - begin}
    checkpointer.close()
    return answer


@pytest.mark.timeout(900)
def test_how_many_saves_in_flight_are_lost(tmp_path: Path) -> None:
    choose = random.Random(1)
    lost = dict.fromkeys(_POLICIES, 0)
    seconds: dict[str, list[float]] = {policy: [] for policy in _POLICIES}
    for number in range(_RUNS):
        after_s = choose.uniform(0, _LATEST_S)
        for policy in _POLICIES:
            folder = tmp_path / f"{policy} {number}"
            folder.mkdir()
            answer, _ = rank_values(_one_dies, 2, folder, policy, after_s, returncodes={1: -signal.SIGKILL}, timeout=45)
            lost[policy] += answer["step"] != 2
            seconds[policy].append(answer["s"])
    for policy in _POLICIES:
        median_ms = 1000 * sorted(seconds[policy])[_RUNS // 2]
        print(f"{policy}: {lost[policy]} of {_RUNS} saves lost, back after {median_ms:.0f} ms (median)")
    assert lost["drain"] == 0
