"""A save to an object store, and a restore, beside plain puts and gets of the same bytes by the same client.

One rank. By default the store is a server on this machine (moto, in memory), which is slow: ratios say more than times.
With `--root` it is yours, as the environment describes it; what is written below that URL is removed.
"""

import argparse
import contextlib
import http.client
import io
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from ckpt import Checkpointer
from tools.bench.harness import Row, add_size_options, print_report, rounds, write_json
from tools.bench.limits import CopyLimit
from tools.bench.processes import free_port
from tools.bench.workload import make_state, size_of, tensors

_OBJECT_BYTES = 64 << 20
_THREADS = 8  # as many as a writer has
_POLL_S = 0.001
_REQUESTS_EACH = 4
_START_S = 30.0
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1])).start()
sys.stdin.read()
"""


@dataclass(frozen=True)
class _Round:
    """Seconds of what is measured once per round; of one save its requests, -1 if unknown, and processor seconds."""

    copy: float
    put: float
    stall: float
    durable: float
    torch_save: float
    dcp_save: float
    get: float
    restore: float
    requests: int
    cpu: float


class _Measurement:
    """The state, and the limits. `count` returns the number of requests so far."""

    def __init__(self, total_bytes: float, url: str, count: Callable[[], int]) -> None:
        import obstore.store

        self._obstore = obstore
        self._url = url.rstrip("/")
        self._count = count
        self._state = make_state(total_bytes)
        self.tensors = sum(1 for _ in tensors(self._state))
        self.staged_bytes = size_of(tensors(self._state))
        self._copy = CopyLimit(tensors(self._state))
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        self._store = obstore.store.from_url(self._url, client_options={"allow_http": plain})
        self._bytes = memoryview(os.urandom(1 << 20) * math.ceil(self.staged_bytes / (1 << 20)))[: self.staged_bytes]
        self._step = 0
        self._plain = plain

    def round(self, backwards: bool) -> _Round:
        """Measure everything once; limits and saves take turns in one order or the other."""
        with Checkpointer(f"{self._url}/steps", keep=1) as checkpointer:
            checkpointer.warmup(self._state)
            self._save(checkpointer)
            saved: dict[str, float] = {}
            turns: dict[str, Callable[[], Any]] = {
                "copy": self._copy.measure,
                "put": self._put,
                "save": lambda: saved.update(self._save(checkpointer)),
                "torch_save": self._torch_save,
                "dcp_save": self._dcp_save,
            }
            found = {name: turns[name]() for name in (reversed(turns) if backwards else turns)}
        del found["save"]
        turns = {"get": self._get, "restore": self._restore}
        found |= {name: turns[name]() for name in (reversed(turns) if backwards else turns)}
        return _Round(**found, **saved)  # type: ignore[arg-type]

    def close(self) -> None:
        """Remove all objects."""
        self._copy.close()
        keys = [about["path"] for batch in self._obstore.list(self._store) for about in batch]
        if keys:
            self._obstore.delete(self._store, keys)

    def _save(self, checkpointer: Checkpointer) -> dict[str, float]:
        self._step += 1
        before, cpu = self._count(), _cpu()
        begin = time.perf_counter()
        checkpointer.async_save(self._state, self._step)
        stall = time.perf_counter() - begin
        while not checkpointer.maybe_finalize():
            time.sleep(_POLL_S)
        durable = time.perf_counter() - begin
        requests = self._count() - before if before >= 0 else -1
        return {"stall": stall, "durable": durable, "requests": requests, "cpu": _cpu() - cpu}

    def _restore(self) -> float:
        with Checkpointer(f"{self._url}/steps", read_only=True) as checkpointer:
            begin = time.perf_counter()
            checkpointer.restore(self._state)
            return time.perf_counter() - begin

    def _ranges(self) -> list[tuple[str, int, int]]:
        starts = range(0, self.staged_bytes, _OBJECT_BYTES)
        return [(f"plain/{first}", first, min(first + _OBJECT_BYTES, self.staged_bytes)) for first in starts]

    def _put(self) -> float:
        def put(piece: tuple[str, int, int]) -> None:
            self._obstore.put(self._store, piece[0], self._bytes[piece[1] : piece[2]], use_multipart=False)

        return self._timed(put)

    def _get(self) -> float:
        return self._timed(lambda piece: len(self._obstore.get(self._store, piece[0]).bytes()))

    def _timed(self, work: Callable[[tuple[str, int, int]], object]) -> float:
        with ThreadPoolExecutor(_THREADS) as pool:
            begin = time.perf_counter()
            list(pool.map(work, self._ranges()))
            return time.perf_counter() - begin

    def _torch_save(self) -> float:
        begin = time.perf_counter()
        with io.BytesIO() as stream:
            torch.save(self._state, stream)
            self._obstore.put(self._store, "peer.pt", stream.getbuffer())
        return time.perf_counter() - begin

    def _dcp_save(self) -> float:
        """Return the seconds of `dcp.save` with its writer for fsspec, over the same client."""
        from obstore.fsspec import register
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        scheme = self._url.partition(":")[0]
        register(scheme)
        options: dict[str, Any] = {"client_options": {"allow_http": self._plain}}
        writer = FsspecWriter(f"{self._url}/dcp", sync_files=False, overwrite=True, thread_count=_THREADS, **options)
        begin = time.perf_counter()
        save(self._state, storage_writer=writer, no_dist=True)
        return time.perf_counter() - begin


def _cpu() -> float:
    """Return the processor time of this process and of all below it, but for the server."""
    found = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += 0.0 if "ThreadedMotoServer" in " ".join(process.cmdline()) else times.user + times.system
    return found


@contextlib.contextmanager
def _moto() -> Iterator[tuple[str, Callable[[], int]]]:
    """Run a server, set the environment for it; give a URL in it, and a function that counts the requests."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-c", _SERVER, str(port)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "bench",
                "AWS_SECRET_ACCESS_KEY": "bench",
            }
            _make_bucket(port, time.monotonic() + _START_S)

            def count() -> int:
                return len(re.findall(rb'" \d{3} -', os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)))

            yield "s3://bench/run", count
        finally:
            process.kill()
            process.wait()


def _make_bucket(port: int, deadline: float) -> None:
    """Make the bucket when the server is there. Its name and region are all that moto takes from this request."""
    about = "AWS4-HMAC-SHA256 Credential=bench/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            try:
                connection.request("PUT", "/bench", headers={"Authorization": about})
                answer = connection.getresponse()
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
        if answer.status != 200:
            raise RuntimeError(f"the server did not make a bucket: {answer.status}")
        return


def _rows(taken: list[_Round], staged_bytes: int) -> list[Row]:
    def of(pick: Callable[[_Round], float]) -> list[float]:
        return [pick(each) for each in taken]

    copy, put, get = of(lambda r: r.copy), of(lambda r: r.put), of(lambda r: r.get)
    rows = [
        Row("limit: copy to warm memory, all threads", copy),
        Row("limit: puts of 64 MiB, 8 at once", put),
        Row("limit: gets of 64 MiB, 8 at once", get),
        Row("stall", of(lambda r: r.stall), copy, 1.1),
        Row("durable and published, from the call", of(lambda r: r.durable), put),
        Row("peer: torch.save, then one put (training waits)", of(lambda r: r.torch_save), put),
        Row("peer: dcp.save, its writer for fsspec (waits)", of(lambda r: r.dcp_save), put),
        Row("restore, checksums on", of(lambda r: r.restore), get),
        Row("processor time of a save, all processes", of(lambda r: r.cpu)),
        Row("  for each GB", of(lambda r: r.cpu / staged_bytes * 1e9)),
    ]
    if all(each.requests >= 0 for each in taken):
        most = float(math.ceil(staged_bytes / _OBJECT_BYTES) + _REQUESTS_EACH)
        rows.append(
            Row("requests of a save", of(lambda r: r.requests), [most] * len(taken), 1.0, show=lambda n: f"{n:g}")
        )
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add_size_options(parser, rounds=5)
    parser.add_argument("--root", help="an empty prefix of yours, like s3://bucket/bench (default: moto, started here)")


def run(options: argparse.Namespace) -> None:
    """Measure in rounds, and print a table."""
    taken: list[_Round] = []
    with contextlib.nullcontext((options.root, lambda: -1)) if options.root else _moto() as (url, count):
        measurement = _Measurement(1e9 * options.gb, url, count)
        try:
            for counts in rounds(options.rounds):
                found = measurement.round(backwards=len(taken) % 2 == 0)
                taken += [found] if counts else []
        finally:
            measurement.close()
    rows = _rows(taken, measurement.staged_bytes)
    print_report(f"{measurement.staged_bytes / 1e9:.2f} GB in {measurement.tensors} tensors, world size 1, {url}", rows)
    size = {"staged_bytes": measurement.staged_bytes, "tensors": measurement.tensors}
    write_json(options.json, {"rows": rows, **size, "rounds": [asdict(each) for each in taken]})
