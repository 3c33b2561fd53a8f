"""The helpers themselves: a helper that overlooks a failure hides every other one."""

import json
import os
import re
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

from ckpt.async_calls.writer_main import CODEC
from ckpt.keeper.trainer_side import Keeper, Worker
from inprocess.ipc.deadline import Deadline
from tests.support import LeakCheck, RanksFailed, is_gone, launch_ranks, run_ranks
from tests.support.quick_keepers import ForkedKeeper
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


def _started_keeper() -> Keeper:
    """A keeper that has forked a worker, which has ended."""
    keeper = Keeper()
    keeper.start()
    worker = Worker(keeper, "writer", CODEC)
    worker.end(Deadline(30.0))
    assert keeper.generation == 1
    return keeper


def _facts(pid: int | None) -> list[object]:
    """The properties that a process has from the one that started it."""
    assert pid is not None
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    names = ("Name", "Umask", "Uid", "Gid", "SigBlk", "SigIgn", "SigCgt", "Threads")
    links = [re.sub(r"\d+", "N", os.readlink(link)) for link in Path(f"/proc/{pid}/fd").iterdir()]
    cwd = os.readlink(f"/proc/{pid}/cwd")
    return [*((name, status[name]) for name in names), os.getsid(pid) == pid, sorted(links), cwd]


@pytest.mark.skipif(FULL, reason="keepers are not forked")
def test_a_forked_keeper_has_what_one_that_is_started_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    monkeypatch.chdir(tmp_path)
    keepers, earlier = [], os.umask(0o027)
    try:
        keepers.append(_started_keeper())
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # an interpreter would look for `sitecustomize` there
        keepers.append(_started_keeper())
        assert isinstance(keepers[0]._process, ForkedKeeper)
        assert isinstance(keepers[1]._process, subprocess.Popen)
        deadline = time.monotonic() + 20  # they may still have the worker's pidfd
        while (facts := [_facts(keeper.pid) for keeper in keepers])[0] != facts[1]:
            assert time.monotonic() < deadline, facts
            time.sleep(0.02)
    finally:
        os.umask(earlier)
        for keeper in keepers:
            keeper.close(Deadline(20.0))
    assert [keeper.pid for keeper in keepers] == [None, None]


def _leaves_a_keeper(rank: int, world_size: int) -> int | None:
    check = LeakCheck()
    keeper = _started_keeper()
    pid = keeper.pid
    assert any(line.startswith(f"child process {pid}: ") for line in check.difference())
    keeper._process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
    return pid


def test_a_keeper_of_a_rank_that_stays_is_found_and_killed() -> None:
    with launch_ranks(_leaves_a_keeper, 1, init_process_group=False) as group:
        (result,) = group.wait()
        assert [process.pid for process in group.survivors()] == [result.value]
    assert is_gone(result.value)


def test_a_directory_beside_shared_memory_is_no_leak() -> None:
    """Another program may use the file system of shared memory as a fast disk."""
    check = LeakCheck()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert not [line for line in check.difference() if folder in line]
