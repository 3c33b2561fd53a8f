"""Groups that a training function destroys before its modules are freed."""

import subprocess

import pytest

from inprocess.unblock.process_groups import gloo_outlives_modules
from tests.support import free_port
from tests.support.template import quick_python

ROUNDS = 20  # without the context the ranks are blocked after a few
RANKS = 3
PROGRAM = f"""
import sys, torch
import torch.distributed as dist
from inprocess.unblock.process_groups import gloo_outlives_modules, release_gloo

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, {RANKS}, rank == 0)

def train(number):
    dist.init_process_group("gloo", rank=rank, world_size={RANKS}, store=dist.PrefixStore(str(number), store))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    model(torch.randn(4, 8)).sum().backward()  # notes an object of Python in each later operation of the thread
    dist.barrier()
    dist.destroy_process_group()
    if number % 2:
        raise ValueError("a fault")  # its traceback keeps the module for a while

for number in range({ROUNDS}):
    failure = None
    try:
        with gloo_outlives_modules():
            train(number)
    except ValueError as error:
        failure = error.__traceback__
    while failure is not None:
        failure.tb_frame.f_code.co_name == "train" and failure.tb_frame.clear()
        failure = failure.tb_next
    release_gloo()
store.set(f"done/{{rank}}", "")
if rank == 0:
    store.wait([f"done/{{other}}" for other in range({RANKS})])
"""


@pytest.mark.timeout(120)
def test_ddp_is_freed_after_its_group_was_destroyed() -> None:
    port = str(free_port())
    ranks = [subprocess.Popen([quick_python(), "-c", PROGRAM, str(rank), port]) for rank in range(RANKS)]
    try:
        assert [process.wait(60) for process in ranks] == [0] * RANKS
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_torch_is_left_as_it_was() -> None:
    import torch.distributed.distributed_c10d as groups

    before = groups._update_default_pg
    with gloo_outlives_modules():
        assert groups._update_default_pg is not before
        with gloo_outlives_modules():
            pass
    assert groups._update_default_pg is before
