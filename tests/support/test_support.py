"""The helpers themselves: a helper that overlooks a failure hides every other one."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import LeakCheck, RanksFailed, is_gone, launch_ranks, run_ranks
from tests.support.selection import FULL
from tests.support.template import quick_python, rank_template


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


@pytest.fixture
def forking_python() -> str:
    if FULL:
        pytest.skip("programs start in fresh interpreters")
    return quick_python()


def test_a_command_has_arguments_descriptors_variables_and_folder(forking_python: str, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv, os.environ['SAID'], os.getcwd(), sys.stdin.read()); sys.exit(3)"
    environment = {**os.environ, "SAID": "before"}
    done = subprocess.run(
        [forking_python, "-c", code, "a", "-b"],
        input="read",
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (3, f"['-c', 'a', '-b'] before {tmp_path} read\n"), done.stderr


def test_a_command_runs_scripts_and_modules_as_main(forking_python: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    program = "import sys, beside, torch; print(__name__, __file__, sys.argv[1:], beside.WORD, torch.ones(1).item())"
    (tmp_path / "program.py").write_text(program)
    for how in ([str(tmp_path / "program.py")], ["-u", "-m", "program"]):
        done = subprocess.run([forking_python, *how, "x"], text=True, capture_output=True, cwd=tmp_path)
        assert done.stdout == f"__main__ {tmp_path / 'program.py'} ['x'] found 1.0\n", done.stderr


@pytest.mark.parametrize(
    ("code", "returncode", "printed"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("import sys; sys.exit('a reason')", 1, "a reason"),
        ("import atexit; atexit.register(lambda: print('at the end'))", 0, "at the end"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_a_command_ends_as_its_program(forking_python: str, code: str, returncode: int, printed: str) -> None:
    done = subprocess.run([forking_python, "-c", code], text=True, capture_output=True)
    assert done.returncode == returncode
    assert printed in done.stdout + done.stderr


_TELLS_SIGNALS = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def test_signals_reach_the_program_of_a_command_and_it_dies_with_the_command(forking_python: str) -> None:
    with subprocess.Popen([forking_python, "-c", _TELLS_SIGNALS], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        command.send_signal(signal.SIGTERM)
        assert command.stdout.readline() == "asked\n"
        command.kill()
        assert command.stdout.readline() == "", "the pipe is closed: the program has ended"
    _wait_for(lambda: not Path(f"/proc/{pid}").exists())  # the template waits for its children


def test_a_signal_to_a_program_that_has_just_ended_is_lost(forking_python: str, tmp_path: Path) -> None:
    """And the process that forks goes on: all later tests need it."""
    template = rank_template()
    order = {"arguments": ["-c", _TELLS_SIGNALS], "environment": dict(os.environ), "folder": str(tmp_path)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as command, (tmp_path / "printed").open("w") as printed:
        command.settimeout(30)
        command.connect(str(template.commands / "socket"))
        socket.send_fds(command, [json.dumps(order).encode()], [0, printed.fileno(), 2])
        program = int(_first_line(tmp_path / "printed"))
        os.kill(template.pid, signal.SIGSTOP)
        try:
            os.kill(program, signal.SIGKILL)
            _wait_for(lambda: is_gone(program))
            command.send(str(int(signal.SIGTERM)).encode())
        finally:
            os.kill(template.pid, signal.SIGCONT)
        assert command.recv(64) == b"-9"
    assert subprocess.run([forking_python, "-c", ""]).returncode == 0


def _first_line(path: Path) -> str:
    _wait_for(lambda: "\n" in path.read_text())
    return path.read_text().splitlines()[0]


def _wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interpreter_option_takes_the_real_interpreter(forking_python: str) -> None:
    code = "import sys; print(sys.flags.isolated, 'torch' in sys.modules)"
    done = subprocess.run([forking_python, "-I", "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout == "1 False\n"


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
    _wait_for(lambda: is_gone(pid))


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
