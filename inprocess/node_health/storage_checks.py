"""Checks of the storage of this node: space and a written file below given paths, and the mounts of shared storage."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
from pathlib import Path

from inprocess.node_health.interface import CheckResult, NodeCheck, failed, failed_if, not_applicable, ok

_PROBE_BYTES = 1 << 20
_READ_BYTES = 4096
_SHARED_KINDS = {"beegfs", "ceph", "gpfs", "lustre", "nfs", "nfs4", "wekafs"}


class StoragePathCheck(NodeCheck):
    """Fails if `path` cannot be used, or its file system has less than `min_free_bytes` left for this user.

    A directory is used by a file of 1 MiB with a name of its own (`.node_health.HOST.PID.RANDOM`), which is written,
    synchronized, read again and removed. Of a file the beginning is read. No other file is changed.
    """

    def __init__(self, path: str, min_free_bytes: int = 0, limit_s: float = 60.0) -> None:
        self.name = f"storage {path}"
        self.limit_s = limit_s
        self._path = path
        self._min_free_bytes = min_free_bytes

    def run(self) -> CheckResult:
        try:
            return self._use()
        except FileNotFoundError as error:
            return failed(self, f"{error.filename} does not exist")
        except OSError as error:
            return failed(self, f"{self.doing}: {error.strerror}")

    def _use(self) -> CheckResult:
        self.doing = f"looking at {self._path}"
        if not stat.S_ISDIR(os.stat(self._path).st_mode):
            self.doing = f"reading {self._path}"
            with open(self._path, "rb") as file:
                file.read(_READ_BYTES)
            return ok(self)
        self.doing = f"asking for the free space of {self._path}"
        found = os.statvfs(self._path)
        free = found.f_bavail * found.f_frsize
        if free < self._min_free_bytes:
            return failed(self, f"{free / 1e9:.2f} GB are free, of at least {self._min_free_bytes / 1e9:.2f} GB")
        name = f".node_health.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        return self._write_and_read(os.path.join(self._path, name))

    def _write_and_read(self, path: str) -> CheckResult:
        self.doing = f"creating {path}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            data = secrets.token_bytes(_PROBE_BYTES)
            self.doing = f"writing {path}"
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            self.doing = f"synchronizing {path}"
            os.fsync(fd)
            with contextlib.suppress(OSError, AttributeError):  # so that it is read from storage, where possible
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self.doing = f"reading {path}"
            is_same = _read_all(fd, len(data)) == data
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(fd)  # last: on NFS it may be what fails
        return ok(self) if is_same else failed(self, f"{path} had other bytes when it was read than were written")


def _read_all(fd: int, size: int) -> bytes:
    found = b""
    while len(found) < size and (part := os.pread(fd, size - len(found), len(found))):
        found += part
    return found


class SharedMountsCheck(NodeCheck):
    """Fails if a mount of a shared file system does not answer, or Lustre says that it is not healthy.

    `mounts` and `lustre` are the paths in /proc and /sys that tell them.
    """

    name = "shared mounts"

    def __init__(
        self,
        limit_s: float = 60.0,
        mounts: str | os.PathLike[str] = "/proc/self/mounts",
        lustre: str | os.PathLike[str] = "/sys/fs/lustre/health_check",
    ) -> None:
        self.limit_s = limit_s
        self._mounts = Path(mounts)
        self._lustre = Path(lustre)

    def run(self) -> CheckResult:
        entries = [line.split() for line in self._mounts.read_text().splitlines()]
        names = [entry[1] for entry in entries if len(entry) > 2 and entry[2] in _SHARED_KINDS]
        # The kernel writes spaces and the like in names as \040.
        places = [re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name) for name in names]
        if not places:
            return not_applicable(self, "no shared file system is mounted")
        bad = []
        for place in places:
            self.doing = f"asking for the free space of {place}"
            try:
                os.statvfs(place)
            except OSError as error:
                bad.append(f"{place}: {error.strerror}")
        with contextlib.suppress(OSError):
            state = self._lustre.read_text().strip()
            if state != "healthy":
                bad.append(f"Lustre is {state}")
        return failed_if(self, bad)
