"""The helpers themselves: a helper that overlooks a failure hides every other one."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.support import LeakCheck, RanksFailed, launch_ranks, run_ranks


def add_up(rank: int, world_size: int, offset: int) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return int(total)


def test_ranks_share_a_process_group_and_return_values() -> None:
    results = run_ranks(add_up, 2, 10)
    assert [result.value for result in results] == [21, 21]


def test_a_script_gets_rank_and_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:])")
    assert [result.stdout.strip() for result in run_ranks(script, 2, "--flag")] == ["0 2 --flag", "1 2 --flag"]


def test_one_failing_rank_fails_all_with_every_output() -> None:
    def fail(rank: int, world_size: int) -> None:
        print(f"output of {rank}", flush=True)
        if rank == 1:
            raise ValueError("broken on purpose")

    with pytest.raises(RanksFailed) as failure:
        run_ranks(fail, 2, init_process_group=False)
    for text in ("rank 1 ended with 1, not 0", "output of 0", "output of 1", "broken on purpose"):
        assert text in str(failure.value)


def test_a_hang_ends_at_the_deadline_with_stacks() -> None:
    def hang_here(rank: int, world_size: int) -> None:
        threading.Event().wait()

    with pytest.raises(RanksFailed, match=r"(?s)rank 0 still running after 1 s.*hang_here"):
        run_ranks(hang_here, 1, timeout=1, init_process_group=False)


def test_a_killed_rank_can_be_expected() -> None:
    def wait(rank: int, world_size: int) -> None:
        print("ready", flush=True)
        if rank == 0:
            threading.Event().wait()

    with launch_ranks(wait, 2, init_process_group=False) as group:
        group.wait_for_output(0, "^ready$")
        group.kill(0)
        results = group.wait(returncodes={0: -signal.SIGKILL})
    assert [result.returncode for result in results] == [-9, 0]


def test_an_orphan_in_its_own_session_is_found_and_killed() -> None:
    def leave_one(rank: int, world_size: int) -> int:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        return child.pid

    with launch_ranks(leave_one, 1, init_process_group=False) as group:
        pid = group.wait()[0].value
        with pytest.raises(RanksFailed, match=f"left running.*{pid}"):
            group.wait_for_no_survivors(timeout=0.2)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_leaks_of_every_kind_are_reported() -> None:
    check = LeakCheck()
    fd = os.memfd_create("left")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-thread")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        report = "\n".join(check.difference())
        with pytest.raises(AssertionError, match="left behind"):
            check.check(timeout=0)
    finally:
        os.close(fd)
        stop.set()
        thread.join()
        child.kill()
        child.wait()
    assert all(text in report for text in ("memfd:left", "left-thread", f"child process {child.pid}"))
    check.check()


def test_a_directory_beside_shared_memory_is_no_leak() -> None:
    """Another program may use the file system of shared memory as a fast disk."""
    check = LeakCheck()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert not [line for line in check.difference() if folder in line]
