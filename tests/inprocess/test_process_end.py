"""The end of a process, as others can see it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inprocess.process_end import KernelEvidence, OomKills, describe_status, exit_status, kernel_lines
from tests.support.memory_groups import EATS_MEMORY, memory_group


@pytest.mark.parametrize("is_reaped", [False, True])
@pytest.mark.parametrize(
    ("last", "expected"),
    [("os.kill(os.getpid(), 9)", "SIGKILL"), ("os._exit(3)", "exit code 3"), ("os._exit(0)", "exit code 0")],
)
def test_the_end_of_a_process_of_others(last: str, expected: str, is_reaped: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os, sys; sys.stdin.read(); {last}"], stdin=subprocess.PIPE
    )
    pidfd = os.pidfd_open(process.pid)
    try:
        assert process.stdin is not None
        process.stdin.close()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(30_000)
        if is_reaped:
            process.wait()
        found = describe_status(exit_status(process.pid, pidfd))
        assert found == expected or (is_reaped and found == "" and _release() < (6, 15))
    finally:
        os.close(pidfd)
        process.wait()


def _release() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


def test_names_of_ends() -> None:
    assert describe_status(None) == ""
    assert describe_status(signal.SIGRTMIN + 5) == f"signal {signal.SIGRTMIN + 5}"


def test_kills_for_lack_of_memory_are_counted() -> None:
    with memory_group(48 << 20) as group:
        process = subprocess.Popen([sys.executable, "-c", f"import sys; sys.stdin.read(); {EATS_MEMORY}"], stdin=-1)
        group.add(process.pid)
        kills, evidence = OomKills(process.pid), KernelEvidence(process.pid)
        assert kills.file is not None
        assert kills.new() == 0
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == -signal.SIGKILL
        assert kills.new() == 1
        assert kills.new() == 0
        lines, oom = evidence.gather()
        assert oom
        assert lines[-1] == f"the kernel has killed 1 of {kills.file}: memory was short"


def test_lines_of_the_kernel(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    now_us = int(time.monotonic() * 1e6)
    texts = [
        (now_us - 60_000_000, "NVRM: Xid (PCI:0000:3b:00): 48, an old one"),
        (now_us, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
        (now_us, "usb 1-1: new device 77"),
        (now_us, "Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB"),
        (now_us, "python[77]: segfault at 0"),
        (now_us, "python[778]: segfault at 0"),
    ]
    # The kernel returns one record per read. A pipe of packets does the same.
    reader, writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    try:
        for at_us, text in texts:
            os.write(writer, f"6,1234,{at_us},-;{text}\n SUBSYSTEM=pci\n".encode())
        found = kernel_lines(77, time.monotonic(), f"/proc/self/fd/{reader}")
    finally:
        os.close(reader)
        os.close(writer)
    assert found == tuple(texts[number][1] for number in (1, 3, 4))
    assert kernel_lines(77, 0.0, str(log)) == ()
