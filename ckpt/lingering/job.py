"""Which processes are of the same job, and where they find each other: in the private directory of this user.

    linger-JOB-NODE-NUMBER.sock     the socket of a holder: mode 0600
    linger-JOB-NODE-NUMBER.key      its secret: mode 0600, there as long as the socket listens

JOB is a hash of what identifies the job, and NODE of the node, as the directory may be seen by several nodes or
containers. A process of the job proves that it can read the secret. With INPROCESS_SECRET in the environment it also
proves that it knows that.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import secrets
import stat
from dataclasses import dataclass

from inprocess.ipc.proofs import job_secret
from inprocess.ipc.unix_sockets import private_directory, remove_socket

__all__ = ["Address", "Job"]

_KEY_CHARACTERS = 64
_NO_RUN_ID = ("", "none")  # the second one is torchrun's, if it is not told any


@dataclass(frozen=True, slots=True)
class Job:
    """What identifies a job on a node: its `name`, the checkpoint root, and the node."""

    name: str
    root: str
    node: str

    @classmethod
    def of(cls, linger_id: str | None, root: str, node: str) -> Job:
        """Return the job of this process: `linger_id`, or that of the launcher. ValueError if there is neither."""
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        name = linger_id if linger_id is not None else run_id
        if (linger_id is None and run_id in _NO_RUN_ID) or not name:
            raise ValueError(
                f"linger: nothing says which processes are of the same job (TORCHELASTIC_RUN_ID is {run_id!r}). Start "
                "it with ckpt_launcher or torchrun, and --standalone or --rdzv-id=ID; or give "
                "Snapshots(linger_id=...), a text that is the same after a restart of the job, and that no other job "
                "with this root has"
            )
        return cls(name, root, node)

    @property
    def digest(self) -> str:
        """A text without zero bytes that only this job on this node has."""
        return hashlib.sha256(f"{self.name}\0{self.root}\0{self.node}".encode(errors="surrogateescape")).hexdigest()

    def new_address(self) -> Address:
        """Return where a holder of this job can listen. OSError if there is no private directory."""
        return Address(os.path.join(private_directory(), f"{self._prefix}{secrets.token_hex(4)}"))

    def addresses(self) -> list[Address]:
        """Return the addresses of all holders of this job on this node. OSError."""
        pattern = os.path.join(glob.escape(private_directory()), f"{self._prefix}*.key")
        return [Address(path.removesuffix(".key")) for path in sorted(glob.glob(pattern))]

    @property
    def _prefix(self) -> str:
        node = hashlib.sha256(self.node.encode()).hexdigest()
        return f"linger-{self.digest[:12]}-{node[:6]}-"


@dataclass(frozen=True, slots=True)
class Address:
    """The files of one holder: `base` with two endings."""

    base: str

    @property
    def socket(self) -> str:
        """The path of the socket."""
        return f"{self.base}.sock"

    def write_key(self) -> str:
        """Make the secret of a holder that listens, and return what its greetings are made with. OSError."""
        key = secrets.token_hex(_KEY_CHARACTERS // 2)
        fd = os.open(f"{self.base}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.write(fd, key.encode())
        finally:
            os.close(fd)
        os.rename(f"{self.base}.new", f"{self.base}.key")
        return job_secret(key) or key

    def read_key(self) -> str:
        """Return what the greetings of this holder are made with. OSError; PermissionError if the file is not ours."""
        fd = os.open(f"{self.base}.key", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
                raise PermissionError(f"{self.base}.key is not a file that only this user can read")
            key = os.read(fd, _KEY_CHARACTERS + 1).decode("ascii", "replace")
        finally:
            os.close(fd)
        if len(key) != _KEY_CHARACTERS:
            raise OSError(f"{self.base}.key holds no key")
        return job_secret(key) or key

    def remove(self) -> None:
        """Remove what is there. Idempotent."""
        for ending in (".key", ".new"):
            with contextlib.suppress(OSError):
                os.unlink(self.base + ending)
        remove_socket(self.socket)
