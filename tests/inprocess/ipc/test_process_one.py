"""Process 1 of a pid namespace."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
_UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]
_ZOMBIES = """
import os, subprocess, sys, time
def states():
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                found[int(name)] = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0]
            except OSError:
                pass
    return found
def zombies():
    return [pid for pid, state in states().items() if state == "Z"]
"""


def run_as_process_one(script: str) -> "subprocess.CompletedProcess[str]":
    """Run a script as the first process of a container; skips the test where no namespace can be made."""
    if shutil.which("unshare") is None or subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode != 0:
        pytest.skip("no pid namespaces here")
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [*_UNSHARE, sys.executable, "-c", _ZOMBIES + textwrap.dedent(script)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)


def test_the_wrapper_warns_and_leaves_no_zombies() -> None:
    done = run_as_process_one("""
        import inprocess
        @inprocess.Wrapper(abort=None)
        def train():
            print("pid", os.getpid())
        for _ in range(3):
            train()
        print("zombies", zombies())
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["pid 1"] * 3 + ["zombies []"]
    assert "this rank is process 1 of its container" in done.stderr
    assert "docker run --init" in done.stderr


def test_children_that_other_code_waits_for_are_not_reaped() -> None:
    done = run_as_process_one("""
        from inprocess.ipc.process_one import reap_adopted
        def adopted(leads):
            ours, theirs = os.pipe()
            child = os.fork()
            if child == 0:
                if not leads:
                    os.setsid()
                if os.fork() == 0:
                    if leads:
                        os.setsid()
                    os.write(theirs, str(os.getpid()).encode())
                    os._exit(0)
                os._exit(0)
            os.waitpid(child, 0)
            return int(os.read(ours, 20))
        leader = subprocess.Popen(["sh", "-c", "exit 3"], start_new_session=True)
        plain = subprocess.Popen(["sh", "-c", "exit 4"])
        all_of_them = {"leader": leader.pid, "plain": plain.pid, "other": adopted(False), "own": adopted(True)}
        while len(zombies()) < 4:
            time.sleep(0.01)
        reap_adopted()
        print(sorted(name for name, pid in all_of_them.items() if pid in zombies()))
        reap_adopted({leader.pid})
        print(sorted(name for name, pid in all_of_them.items() if pid in zombies()))
        print(leader.wait(), plain.wait())
    """)
    assert done.stdout.splitlines() == ["['leader', 'own', 'plain']", "['leader', 'plain']", "3 4"], done.stderr


def test_a_process_that_is_not_the_first_one_reaps_nothing_and_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    from inprocess.ipc.process_one import reap_adopted, warn_if_process_one

    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(5)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    reap_adopted(set())
    warn_if_process_one()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert not caplog.records
