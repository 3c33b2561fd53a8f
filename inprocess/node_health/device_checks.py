"""Checks of the devices of this node: GPUs, NVLinks, network cards, and the clock."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

from inprocess.hardware import Gpu, Port, all_ports, open_gpus
from inprocess.node_health.interface import CheckResult, NodeCheck, failed, failed_if, not_applicable, ok
from inprocess.process_end import KERNEL_LOG, next_record

# Errors of the hardware that a program cannot cause: double-bit ECC, failed row remapping, NVLink, fallen off the bus,
# uncontained ECC, no answer from the GPU's system processor.
_XIDS = {48, 64, 74, 79, 95, 119, 120}
_XID_LINE = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_TIME_ERROR = 5  # of adjtimex: the clock is not synchronized


class GpuCheck(NodeCheck):
    """Fails if a GPU is lost, asks for a reset, or has uncorrected errors of memory or rows to be remapped."""

    name = "gpu"
    is_cheap = True

    def run(self) -> CheckResult:
        defects = []
        with open_gpus() as gpus:
            for name, gpu in gpus.items():
                self.doing = f"querying GPU {name}"
                found = [f"cannot be queried: {gpu}"] if isinstance(gpu, str) else _defects(gpu)
                defects += [f"GPU {name}: {defect}" for defect in found]
        return failed_if(self, defects) if gpus else not_applicable(self, "no GPU is visible to NVML")


def _defects(gpu: Gpu) -> list[str]:
    try:
        return gpu.defects() + gpu.memory_errors()
    except Exception as error:  # of NVML, for a GPU that is lost
        return [f"cannot be queried: {error}"]


class NvLinkCheck(NodeCheck):
    """Fails if a GPU has fewer NVLinks than another one of the node, or than it had before.

    Links that no GPU has, and GPUs without links, are how the node was built.
    """

    name = "nvlink"
    is_cheap = True

    def __init__(self) -> None:
        self._most: dict[str, int] = {}

    def run(self) -> CheckResult:
        with open_gpus() as gpus:  # one that cannot be opened is a matter of `GpuCheck`
            links = {name: len(gpu.active_links()) for name, gpu in gpus.items() if isinstance(gpu, Gpu)}
        self._most = {name: max(count, self._most.get(name, 0)) for name, count in links.items()}
        most = max(self._most.values(), default=0)
        if most == 0:
            return not_applicable(self, "no GPU has NVLinks")
        return failed_if(
            self,
            [
                f"GPU {name} has {count} links of {most}"
                for name, count in links.items()
                if self._most[name] > 0 and count < most
            ],
        )


class XidCheck(NodeCheck):
    """Fails if the driver has reported an error of the hardware (an Xid) in the kernel's log since the first run.

    Those of GPUs that this process does not see belong to other jobs.
    """

    name = "xid"
    is_cheap = True

    def __init__(self, path: str | os.PathLike[str] = KERNEL_LOG) -> None:
        self._path = path
        self._fd: int | None = None
        self._found: list[tuple[str, int]] = []

    def run(self) -> CheckResult:
        if self._fd is None:
            with open_gpus() as gpus:
                if not gpus:
                    return not_applicable(self, "no GPU is visible to NVML")
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._fd, 0, os.SEEK_END)
            except OSError as error:
                return not_applicable(self, f"the kernel's log cannot be read: {error}")
        self._read(self._fd)
        if not self._found:
            return ok(self)
        visible = _bus_ids()
        ours = [(place, xid) for place, xid in self._found if visible is None or place.lower() in visible]
        return failed_if(self, [f"GPU at PCI {place}: Xid {xid}" for place, xid in dict.fromkeys(ours)])

    def _read(self, fd: int) -> None:
        while record := next_record(fd):
            for place, xid in _XID_LINE.findall(record):
                if int(xid) in _XIDS:
                    self._found.append((place.decode(), int(xid)))


def _bus_ids() -> set[str] | None:
    """Return the PCI addresses of the visible GPUs as the kernel's log has them; None if one cannot be queried."""
    found = set()
    with open_gpus() as gpus:
        for gpu in gpus.values():
            try:
                if isinstance(gpu, str):
                    return None
                found.add(gpu.bus_id.rpartition(".")[0])
            except Exception:  # of NVML: this may be the GPU that the log is about
                return None
    return found or None


class NetworkCardCheck(NodeCheck):
    """Fails if a link of an InfiniBand or RoCE card is down that was up before, or has counted errors while it works.

    Links that are down at the first run are not in use. Before a node joins, a link that is up again is in order: a
    switch that was restarted must not cost the job all its nodes. `sys_root` is the path of /sys.
    """

    name = "network card"
    is_cheap = True
    limit_s = 10.0

    def __init__(self, sys_root: str | os.PathLike[str] = "/sys") -> None:
        self._sys_root = Path(sys_root)
        self._before: dict[Port, dict[str, int]] | None = None

    def run(self) -> CheckResult:
        if self._before is None:
            self._before = {port: port.errors() for port in all_ports(self._sys_root) if port.is_active()}
        if not self._before:
            return not_applicable(self, "no link of an InfiniBand or RoCE card is up")
        bad = []
        for port, before in self._before.items():
            now = self._before[port] = port.errors()
            grown = [f"{name} +{now[name] - count}" for name, count in before.items() if now.get(name, 0) > count]
            if not port.is_active():
                bad.append(f"{port.name} is down")
            elif grown and self.is_working:
                bad.append(f"{port.name} has errors: {', '.join(grown)}")
        return failed_if(self, bad)


class ClockCheck(NodeCheck):
    """Fails if the kernel's clock is not synchronized (NTP, PTP), or may be wrong by more than `max_error_s`.

    The time service of the node tells the kernel the largest error that the clock may have, and the kernel lets it grow
    until the service corrects the clock again. `read` returns the state and that error, see `read_clock`.
    """

    name = "clock"

    def __init__(self, max_error_s: float, read: Callable[[], tuple[bool, float]] | None = None) -> None:
        self._max_error_s = max_error_s
        self._read = read or read_clock

    def run(self) -> CheckResult:
        try:
            is_synchronized, error_s = self._read()
        except OSError as error:
            return not_applicable(self, f"the kernel does not tell the state of its clock: {error}")
        if not is_synchronized:
            return failed(self, "the clock is not synchronized; is a time service (chronyd, ntpd) running?")
        if error_s > self._max_error_s:
            return failed(self, f"the clock may be wrong by {error_s:.3f} s, more than {self._max_error_s:g} s")
        return ok(self)


class _Timex(ctypes.Structure):
    """The beginning of `struct timex` (adjtimex(2)), and space for the rest."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # microseconds
        ("rest", ctypes.c_char * 256),
    ]


def read_clock() -> tuple[bool, float]:
    """Return whether the kernel's clock is synchronized, and by how many seconds it may be wrong. OSError."""
    found = _Timex()  # modes 0: only read
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return state != _TIME_ERROR, found.maxerror / 1e6
