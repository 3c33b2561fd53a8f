"""A real SSH server on loopback, with SFTP: OpenSSH's sshd, which admits one key and is known by another."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.ranks import free_port

_START_S = 30.0
_CONFIG = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
Subsystem sftp internal-sftp
MaxStartups 100
"""


def missing_sshd() -> str | None:
    """Return the packages that are missing to run the server; None if it can be run."""
    missing = [name for name in ("ssh-keygen", "sshd") if _program(name) is None]
    return f"{', '.join(missing)} not found: apt-get install openssh-server" if missing else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")


class SftpServer:
    """A process of sshd, and its folder with keys. A context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.port = free_port()
        for name in ("host_key", "user_key"):
            subprocess.run(
                [str(_program("ssh-keygen")), "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
            )
        host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}\n")
        (folder / "config").write_text(_CONFIG.format(port=self.port, folder=folder))
        self.options = {"private_key": str(folder / "user_key"), "known_hosts": str(folder / "known_hosts")}
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, path: Path) -> str:
        """Return the URL of a directory."""
        return f"sftp://{getpass.getuser()}@127.0.0.1:{self.port}{path}"

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            command = [str(_program("sshd")), "-D", "-e", "-f", str(self._folder / "config")]
            self._process = subprocess.Popen(command, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(f"sshd did not start: {(self._folder / 'log').read_text()[-1000:]}") from None
                time.sleep(0.05)
            else:
                return

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process, and those of its connections, so that none answers."""
        pids = self._pids()
        subprocess.run(["kill", "-STOP", *pids], check=False, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(["kill", "-CONT", *pids], check=False, capture_output=True)

    def _pids(self) -> list[str]:
        pids = [] if self._process is None else [str(self._process.pid)]
        for pid in pids:  # grows: a connection has a process for the user below another one
            with contextlib.suppress(OSError):
                pids += Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return pids

    def close(self) -> None:
        """End the process, and the connections that it has."""
        if self._process is not None:
            children = self._pids()[1:]
            self._process.kill()
            self._process.wait(30)
            for child in children:
                subprocess.run(["kill", "-KILL", child], check=False, capture_output=True)
            self._process = None

    def __enter__(self) -> "SftpServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
