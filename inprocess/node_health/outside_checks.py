"""Checks that others make: a service on this node, a command, and a decision of the scheduler."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inprocess.node_health.interface import CheckResult, NodeCheck, failed, failed_if, not_applicable, ok

_METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
_ARGUMENTS = ("--no-slurm",)
_SHOWN = 500  # characters of an output
_READ_BYTES = 4096
_KILLED_WAIT_S = 5.0


class CommandCheck(NodeCheck):
    """Fails unless a command of the shell ends with 0; what it has written is the reason."""

    name = "command"

    def __init__(self, command: str, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> CheckResult:
        self.doing = self._command
        with tempfile.TemporaryFile() as file:  # a daemon that it leaves behind would keep a pipe open
            process = self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            is_late = False
            try:
                process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                is_late = True
                self.stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILLED_WAIT_S)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _READ_BYTES))
            said = file.read(_READ_BYTES).decode(errors="replace").strip()[-_SHOWN:]
        if is_late:
            why = f"it has not ended within {self.limit_s:g} s and was killed"
            return failed(self, f"{why}: {said}" if said else why)
        if process.returncode != 0:
            return failed(self, f"{said or self._command} (exit code {process.returncode})")
        return ok(self)

    def stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class ServiceCheck(NodeCheck):
    """Fails if the health service at a Unix socket says so, or does not answer in time. gRPC; needs grpcio.

    The protocol is `nvhcd.proto` of nvidia_resiliency_ext: the node is healthy if `success` is set and `output` is JSON
    with a `fail_count` of 0. A node on which no service listens is not checked.
    """

    name = "service"

    def __init__(self, endpoint: str, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self._path = socket_path_of(endpoint)

    def run(self) -> CheckResult:
        import grpc

        if not os.path.exists(self._path):
            return not_applicable(self, f"no service listens at {self._path}")
        self.doing = f"asking the service at {self._path}"
        began = time.monotonic()
        with grpc.insecure_channel(f"unix://{self._path}") as channel:
            call = channel.unary_unary(_METHOD)
            try:
                answer = call(_request(_ARGUMENTS), timeout=self.limit_s)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return not_applicable(self, f"no service answers at {self._path}: {error.details()}")
                taken_s = time.monotonic() - began
                return failed(self, f"{error.code().name} after {taken_s:.1f} s: {error.details()}")
        return self._judge(answer)

    def _judge(self, answer: bytes) -> CheckResult:
        fields = dict(_fields(answer))
        output, error = (fields.get(number, b"").decode(errors="replace")[-_SHOWN:] for number in (3, 4))
        if not fields.get(1, 0):
            return failed(self, "; ".join(text for text in (error, output) if text) or "it does not say why")
        try:
            values = json.loads(fields.get(3, b""))
            count = values["fail_count"]
        except (ValueError, KeyError, TypeError):
            return failed(self, f"its output is not JSON with a fail_count: {output!r}")
        return failed_if(self, [] if count == 0 else [f"{count} failed: {values.get('failed_checks')}"])


def socket_path_of(endpoint: str) -> str:
    """Return the path of a Unix socket: "unix:///path" or a path. ValueError else."""
    path = endpoint.removeprefix("unix://")
    if "://" in path or not path.startswith(("/", "./")):
        raise ValueError(f"a health service is at a Unix socket, unix:///PATH, not {endpoint!r}")
    return os.path.abspath(path)


def _request(arguments: tuple[str, ...]) -> bytes:
    """Return `HealthCheckRequest{repeated string args = 1}` in the encoding of protocol buffers; short texts only."""
    return b"".join(bytes([1 << 3 | 2, len(text)]) + text.encode() for text in arguments)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message of protocol buffers: numbers, and texts as bytes. ValueError if it is cut."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        value, at = _number(message, at)
        if key & 7 == 2:
            if at + value > len(message):
                raise ValueError("a message is cut")
            yield key >> 3, message[at : at + value]
            at += value
        elif key & 7 == 0:
            yield key >> 3, value
        else:
            raise ValueError(f"a field of kind {key & 7}")


def _number(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        value |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return value, at
        shift += 7
    raise ValueError("a message is cut")


class SegmentDecisionCheck(NodeCheck):
    """Fails if a file in `folder` says that the allocation of this job is unfit. Read by process 0 of a Slurm job only.

    The contract is that of nvidia_resiliency_ext: `segment_health_check.JOB.TASK`, of the job array and its task, or
    twice the job; a file that is not empty excludes the nodes of the task. What cannot be read excludes none.
    """

    name = "segment"

    def __init__(self, folder: str, variables: Mapping[str, str] | None = None, limit_s: float = 20.0) -> None:
        self.limit_s = limit_s
        self._folder = Path(folder)
        self._variables = os.environ if variables is None else variables

    def run(self) -> CheckResult:
        job = self._variables.get("SLURM_ARRAY_JOB_ID") or self._variables.get("SLURM_JOB_ID")
        task = self._variables.get("SLURM_ARRAY_TASK_ID") or self._variables.get("SLURM_JOB_ID")
        if not job or not task or self._variables.get("SLURM_PROCID") != "0":
            return not_applicable(self, "only process 0 of a Slurm job reads decisions")
        path = self._folder / f"segment_health_check.{job}.{task}"
        self.doing = f"looking at {path}"
        try:
            found = path.stat()
        except FileNotFoundError:
            return ok(self)
        except OSError as error:
            return not_applicable(self, f"{path} cannot be read: {error.strerror}")
        if not stat.S_ISREG(found.st_mode):
            return not_applicable(self, f"{path} is not a file")
        return failed_if(self, [f"{path} excludes this allocation"] if found.st_size > 0 else [])
