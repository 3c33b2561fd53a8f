"""Real etcd clusters for tests: one member, or three for a quorum."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from inprocess.coordination.etcd import EtcdClient
from inprocess.coordination.etcd_gateway import EtcdCluster
from inprocess.exception import StoreError
from tests.support import free_port

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)")

_START_S = 30.0


class Etcd:
    """An etcd cluster of `size` members on this machine; a context manager. `options` are more arguments of etcd."""

    def __init__(self, directory: Path, size: int = 1, options: tuple[str, ...] = (), scheme: str = "http") -> None:
        self._directory = directory
        self._options = options
        self._clients = [f"{scheme}://127.0.0.1:{free_port()}" for _ in range(size)]
        self._peers = [f"http://127.0.0.1:{free_port()}" for _ in range(size)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * size

    @property
    def endpoints(self) -> list[str]:
        """The client URLs of all members."""
        return list(self._clients)

    def __enter__(self) -> Self:
        try:
            for member in range(len(self._clients)):
                self.start(member)
            if not self._options:
                self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self, member: int) -> None:
        """Start a member, with the data it had, if it ran before."""
        arguments = {
            "name": f"m{member}",
            "data-dir": str(self._directory / f"m{member}"),
            "listen-client-urls": self._clients[member],
            "advertise-client-urls": self._clients[member],
            "listen-peer-urls": self._peers[member],
            "initial-advertise-peer-urls": self._peers[member],
            "initial-cluster": ",".join(f"m{index}={url}" for index, url in enumerate(self._peers)),
            "initial-cluster-token": self._directory.name,
        }
        with open(self._directory / f"m{member}.log", "ab") as log:
            self._processes[member] = subprocess.Popen(
                ["etcd", *(f"--{name}={value}" for name, value in arguments.items()), *self._options],
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMAXPROCS": "2"},
            )

    def wait_ready(self) -> None:
        """Wait until the cluster has a leader. With the logs, if it gets none."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                with EtcdClient(EtcdCluster(tuple(self._clients)), "is it there?"):
                    return
            except StoreError:
                if time.monotonic() > deadline:
                    for log in sorted(self._directory.glob("*.log")):
                        print(log.read_text(errors="replace")[-2000:])
                    raise

    def kill(self, member: int) -> None:
        """Kill a member; its data stays."""
        process, self._processes[member] = self._processes[member], None
        if process is not None:
            process.kill()
            process.wait()

    def freeze(self, member: int) -> None:
        """Stop a member as a machine that hangs: its connections stay, and nothing is answered."""
        process = self._processes[member]
        assert process is not None
        process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """Kill all."""
        for member in range(len(self._processes)):
            self.kill(member)


@contextmanager
def running_etcd(size: int = 1) -> Iterator[Etcd]:
    """A cluster in a folder of its own, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="etcd-") as folder, Etcd(Path(folder), size) as etcd:
        yield etcd
