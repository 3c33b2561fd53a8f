"""Two more real object stores on loopback, from npm: Azurite honours conditional puts, s3rver ignores them.

`make test` installs them below build/servers, if npm is there.
"""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_SERVERS = Path(__file__).resolve().parents[2] / "build" / "servers"
_START_S = 30.0
_ACCOUNT = "devstoreaccount1"


def missing_server(name: str) -> str | None:
    """Return what lacks to run `name`; None if it can be run."""
    if shutil.which("node") is None:
        return "node is not installed"
    return None if _script(name).exists() else f"{name} is not in {_SERVERS}: make build/servers/.installed"


@contextlib.contextmanager
def azure_container(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Run Azurite; give the URL of a root in an empty container, and the environment that opens it."""
    key = base64.b64encode(uuid.uuid4().bytes).decode()
    options = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--location", str(folder)]
    options += ["--disableTelemetry", "--skipApiVersionCheck"]
    accounts = {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{key}"}
    with _running("azurite-blob", options, folder, r"listens on https?://127\.0\.0\.1:(\d+)", accounts) as port:
        container = f"test-{uuid.uuid4().hex[:12]}"
        _make_container(port, key, container)
        yield (
            f"az://{container}/team/run7",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": key,
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
            },
        )


@contextlib.contextmanager
def s3rver_bucket(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Run s3rver; give the URL of a root in an empty bucket, and the environment that opens it."""
    options = ["--address", "127.0.0.1", "--port", "0", "--directory", str(folder), "--configure-bucket", "bucket"]
    with _running("s3rver", options, folder, r"listening on (?:https?://)?127\.0\.0\.1:(\d+)", {}) as port:
        yield (
            "s3://bucket/run7",
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "S3RVER",
                "AWS_SECRET_ACCESS_KEY": "S3RVER",
            },
        )


def _script(name: str) -> Path:
    return _SERVERS / "node_modules" / ".bin" / name


@contextlib.contextmanager
def _running(name: str, options: list[str], folder: Path, ready: str, env: dict[str, str]) -> Iterator[int]:
    """Run a server, and give the port that it says it listens at."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{name}.txt"
    with log.open("wb") as output:
        command = [shutil.which("node") or "node", str(_script(name)), *options]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={"PATH": "/usr/bin:/bin", **env}
        )
    try:
        deadline = time.monotonic() + _START_S
        while (found := re.search(ready, log.read_text(errors="replace"))) is None:
            ended = process.poll() is not None or time.monotonic() >= deadline
            assert not ended, log.read_text(errors="replace")[-2000:]
            time.sleep(0.05)
        yield int(found[1])
    finally:
        process.kill()
        process.wait(30)


def _make_container(port: int, key: str, name: str) -> None:
    """Send the one request that obstore has no function for, with a signature of the kind Shared Key."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{header}:{value}\n" for header, value in sorted(headers.items()))
    text = "PUT" + "\n" * 12 + f"{signed}/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("PUT", f"/{_ACCOUNT}/{name}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 201, (answer.status, answer.read())
