"""The end of a process: its signal or exit code, and whether the kernel has killed it because memory was short.

All of it is best effort. What the kernel does not show to this process, as in some containers, stays unknown.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import time
from pathlib import Path

__all__ = [
    "KERNEL_LOG",
    "KernelEvidence",
    "OomKills",
    "describe_code",
    "describe_status",
    "exit_status",
    "kernel_lines",
    "next_record",
]

_INFO = struct.Struct("<QQ11Ii")  # `struct pidfd_info` of the kernel: mask, control group, ids, exit code
_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO
_INFO_EXIT = 8  # the exit code is there: Linux 6.15, of a process that was reaped
KERNEL_LOG = "/dev/kmsg"
_RECORD_BYTES = 8192  # the kernel returns one record per read, and none is longer
_READ_S = 0.5
_CLOCK_SLACK_S = 5.0  # the clock of the kernel log is not adjusted as that of `time.monotonic` is
_MOST_LINES = 8
_LINE_CHARS = 300


def exit_status(pid: int, pidfd: int) -> int | None:
    """Return the wait status of a process that has ended, a child or not: see `os.waitpid`. None if it is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if state == b"Z":  # else the process id is that of another one already
            return int(fields[-1])
    buffer = bytearray(_INFO.size)
    _INFO.pack_into(buffer, 0, _INFO_EXIT, *(0 for _ in range(13)))
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, buffer)
        mask, *_, status = _INFO.unpack(buffer)
        if mask & _INFO_EXIT:
            return int(status)
    return None


def describe_status(status: int | None) -> str:
    """Return how a process has ended: "SIGKILL", "exit code 1"; empty if that is unknown."""
    return "" if status is None else describe_code(os.waitstatus_to_exitcode(status))


def describe_code(code: int) -> str:
    """Return how a process has ended, as `describe_status` does; `code` is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class OomKills:
    """The processes of the control group of process `pid` that the kernel kills because memory is short.

    Both versions of control groups count them. Without such a count there are none.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.file = _counting_file("self" if pid is None else str(pid))
        self._seen = self._count()

    def new(self) -> int:
        """Return how many there were since the object was made, or since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen - before

    def _count(self) -> int:
        if self.file is not None:
            with contextlib.suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", self.file.read_text(), re.MULTILINE)
                return int(found[1]) if found else 0
        return 0


def _counting_file(pid: str) -> Path | None:
    """Return the file with the count of the control group of a process, if there is one."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    path_of = {controllers: path for _, controllers, path in (line.split(":", 2) for line in groups)}
    first = next((path for controllers, path in path_of.items() if "memory" in controllers.split(",")), None)
    for mount in mounts:
        kind, *_, options = mount[mount.index("-") + 1 :]  # the source between them may be empty
        is_first = kind == "cgroup" and "memory" in options.split(",")
        path = first if is_first else path_of.get("") if kind == "cgroup2" else None
        if path is None:
            continue
        inner = os.path.relpath(path, mount[3])  # a container may see a part of the hierarchy
        if inner.startswith(".."):
            inner = "."
        file = Path(mount[4], inner, "memory.oom_control" if is_first else "memory.events")
        if os.path.exists(file):
            return file
    return None


def kernel_lines(pid: int, since_s: float, path: str = KERNEL_LOG) -> tuple[str, ...]:
    """Return lines of the log of the kernel, where it is readable, since a time of `time.monotonic`.

    Those about an error of a GPU, and those about this process, such as that it was killed.
    """
    wanted = re.compile(rf"NVRM: Xid|(\[|pid=|process ){pid}\b")
    found: list[str] = []
    with contextlib.suppress(OSError, ValueError, IndexError):  # evidence is welcome, not needed
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + _READ_S
            while len(found) < _MOST_LINES and time.monotonic() < deadline and (record := next_record(log)):
                head, _, text = record.decode(errors="replace").partition(";")
                line = text.partition("\n")[0][:_LINE_CHARS]
                at_s = float(head.split(",")[2]) / 1e6
                if at_s >= since_s - _CLOCK_SLACK_S and wanted.search(line):
                    found.append(line)
        finally:
            os.close(log)
    return tuple(found)


def next_record(log: int) -> bytes:
    """Return the next record of the log of the kernel, "priority,number,microseconds,flags;text"; empty at its end."""
    while True:
        try:
            return os.read(log, _RECORD_BYTES)
        except BrokenPipeError:  # overwritten meanwhile; the next read continues behind it
            continue
        except BlockingIOError:
            return b""


class KernelEvidence:
    """Evidence of the kernel about process `pid` and its control group, since `begin`. One thread at a time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.begin()

    def begin(self) -> None:
        """Forget what was before."""
        self._kills = OomKills(self._pid)
        self._since_s = time.monotonic()

    def gather(self, pid: int | None = None, *, reads_log: bool = True) -> tuple[tuple[str, ...], bool]:
        """Return lines of evidence, and whether the kernel has killed a process of the group for lack of memory.

        `pid` is another process of the group. `reads_log`: lines of the log of the kernel, too, which takes some
        milliseconds.
        """
        kills = self._kills.new()
        lines = kernel_lines(self._pid if pid is None else pid, self._since_s) if reads_log else ()
        if kills > 0:
            lines += (f"the kernel has killed {kills} of {self._kills.file}: memory was short",)
        return lines, kills > 0
