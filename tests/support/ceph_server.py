"""Another real server of the S3 protocol on loopback: Ceph's gateway, before a cluster of one node that is in memory.

    radosgw ---> ceph-osd (memstore)
       \\----------> ceph-mon

Needs Debian's packages ceph-mon, ceph-osd and radosgw, neither root nor systemd.
"""

import contextlib
import hashlib
import hmac
import http.client
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tests.support.object_server import KEY_ID, REGION, SECRET_KEY
from tests.support.ranks import free_port

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "setpriv")
_START_S = 45.0
_CONFIG = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
mon data = {folder}/mon
mon data avail crit = 1
mon allow pool size one = true
mon allow pool delete = true
paxos propose interval = 0.05
paxos min wait = 0.02
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
rgw data = {folder}
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dynamic resharding = false
run dir = {folder}
admin socket =
log file = {folder}/$name.log
"""


def missing_ceph() -> str | None:
    """Return the packages that are missing to run the server; None if it can be run."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)} not found: apt-get install ceph-mon ceph-osd radosgw" if missing else None


class CephServer:
    """Three processes, which end with this one. A context manager."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="test_ceph_"))
        self._running: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder, fsid, mon_port = self._folder, str(uuid.uuid4()), free_port()
        (folder / "ceph.conf").write_text(_CONFIG.format(fsid=fsid, folder=folder, mon_port=mon_port, port=self.port))
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        address = f"v2:127.0.0.1:{mon_port}"
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, str(folder / "monmap"))
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))
        self._serve("ceph-mon", "-f", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd)
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        self._serve("ceph-osd", "-f", "-i", "0")
        keys = ("--access-key", KEY_ID, "--secret", SECRET_KEY)
        self._run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)
        self._serve("radosgw", "-f", "-n", "client.rgw")
        self._wait(self._answers)

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "CEPH_CONF": str(self._folder / "ceph.conf")}

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, env=self._environment(), capture_output=True, timeout=_START_S, check=False, cwd=self._folder
        )
        assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-1000:])

    def _serve(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.txt").open("wb") as output:
            self._running.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environment(),
                    cwd=self._folder,
                )
            )

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            ended = [process.args for process in self._running if process.poll() is not None]
            late = time.monotonic() >= deadline
            assert not ended, (ended, self._logs())
            assert not late, self._logs()
            time.sleep(0.05)

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-500:] for path in sorted(self._folder.glob("*.log")))

    def _answers(self) -> bool:
        try:
            return self.request("GET", "/")[0] == 200
        except OSError:
            return False

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send one request straight to the server, with a signature of version 4."""
        now = datetime.now(UTC)
        host, digest = f"127.0.0.1:{self.port}", hashlib.sha256(body).hexdigest()
        headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ")}
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        canonical = "\n".join((method, path, "", lines, names, digest))
        scope = (now.strftime("%Y%m%d"), REGION, "s3", "aws4_request")
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        text = "\n".join(("AWS4-HMAC-SHA256", headers["x-amz-date"], "/".join(scope), hashed))
        key = f"AWS4{SECRET_KEY}".encode()
        for word in scope:
            key = hmac.digest(key, word.encode(), "sha256")
        credential = f"Credential={KEY_ID}/{'/'.join(scope)}, SignedHeaders={names}"
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 {credential}, Signature={hmac.digest(key, text.encode(), 'sha256').hex()}"
        )
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def __enter__(self) -> "CephServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, and delete what they have written. Idempotent."""
        for process in reversed(self._running):
            process.kill()
            process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)
