"""The process that serves the coordination store: `python -m inprocess.coordination.server_process`, started by rank 0.

It is neither a rank nor a monitor process, so the death of one of these does not end the job; its own death does. It
imports no torch. Its configuration, with the secret, is a line of JSON on standard input, never on a command line; it
answers with the port in another line. The end of the input means that rank 0 no longer needs it, or is dead: then it
serves the remaining clients, and ends with the last of them. If rank 0 has died before the others have come, they, and
a process in the place of rank 0, have a moment to come.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from inprocess.coordination.server import StoreServer
from inprocess.coordination.wire import Access
from inprocess.exception import StoreError
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import in_forked_children
from inprocess.ipc.process import end_process, start_module

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 60.0
PORT_WAIT_S = 20.0
"""How long a given port is waited for, if it is in use."""

_END_TIMEOUT_S = 1.0
_PAUSE_S = 0.05
_FIRST_CLIENTS_S = 10.0
_GARBAGE = 100_000  # new objects between two searches for cycles: requests make none, and waiters are many
_ADDRESS_HINT = (
    "`store_kwargs={'host_name': ..., 'port': ...}` names an address of this machine that the others can reach; "
    "the default is MASTER_ADDR, and any free port"
)


class ServerProcess:
    """The server process, as rank 0 handles it. `access` has the real port once it has started.

    It must have descriptors for this number of `clients`; one that is silent for `silence_s` is disconnected. A port
    that is in use is waited for, at most `port_wait_s`.
    """

    def __init__(
        self,
        access: Access,
        *,
        clients: int,
        silence_s: float,
        logfile: str | None = None,
        port_wait_s: float = PORT_WAIT_S,
    ) -> None:
        self.access = access
        self._config = {"clients": clients, "silence_s": silence_s, "logfile": logfile, "port_wait_s": port_wait_s}
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        in_forked_children(self._close_input)  # its end tells the server that rank 0 has ended

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def start(self) -> None:
        """Start the process without waiting for it."""
        process = start_module("inprocess.coordination.server_process", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = process
        assert process.stdin is not None
        line = json.dumps({**self._config, "access": self.access.to_document()})
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()

    def wait_started(self) -> Access:
        """Return the access with the real port once it listens. StoreError if it cannot."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            answer = _read_line(process.stdout)
        except BaseException:
            process.kill()
            self.close()
            raise
        if "port" not in answer:
            self.close()
            raise StoreError(f"the coordination store cannot be served: {answer.get('error', 'its process ended')}")
        end_process(process, Deadline(_START_TIMEOUT_S))  # this one has forked the server and ends
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(answer["pid"])
        self.access = replace(self.access, port=int(answer["port"]))
        return self.access

    def expect_no_more(self) -> None:
        """Let the process end with its last client, also if this process dies: all ranks have connected."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"all\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """Let the process end as soon as it has no clients. Idempotent; waits up to a second for that."""
        self.expect_no_more()
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        end_process(process, Deadline(_START_TIMEOUT_S))
        if self._pidfd >= 0:
            if not select.select([self._pidfd], [], [], _END_TIMEOUT_S)[0]:
                _log.debug("the server of the coordination store still has clients; it ends by itself")
            os.close(self._pidfd)
            self._pidfd = -1


def _read_line(stream: Any) -> dict[str, Any]:
    """Return the document on the next line; an empty one at the end of the stream. StoreError if none comes in time."""
    if not select.select([stream], [], [], _START_TIMEOUT_S)[0]:
        raise StoreError(f"the process of the coordination store did not start within {_START_TIMEOUT_S:g} s")
    line = stream.readline()
    document: dict[str, Any] = json.loads(line) if line else {}
    return document


def main() -> int:
    """Serve until rank 0 has ended, and then until no client is connected."""
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(
            number, signal.SIG_IGN
        )  # sent by a terminal or launcher to all processes; this one must end after all ranks
    config = json.loads(sys.stdin.buffer.readline() or b"null")
    if config is None or os.fork():  # the child outlives rank 0, which could not wait for it
        return 0
    _log_to(config["logfile"])
    access = Access.from_document(config["access"])
    server = StoreServer(access, silence_s=config["silence_s"])
    try:
        port = server.start(config["clients"], port_wait_s=config["port_wait_s"], is_wanted=_is_wanted).port
    except (OSError, StoreError) as error:
        _answer({"error": f"{error}: {access.host}:{access.port}; {_ADDRESS_HINT}"})
        return 1
    _answer({"port": port, "pid": os.getpid()})
    gc.set_threshold(_GARBAGE)
    all_came = bool(sys.stdin.buffer.read())
    deadline = time.monotonic() + (0.0 if all_came else _FIRST_CLIENTS_S)
    while server.client_count or time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    server.close()
    return 0


def _is_wanted() -> bool:
    """Return whether rank 0 lives and needs a server."""
    return not select.select([sys.stdin], [], [], 0)[0]


def _answer(document: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{json.dumps(document)}\n")
        sys.stdout.flush()


def _log_to(logfile: str | None) -> None:
    root = logging.getLogger("inprocess")
    root.propagate = False
    handler: logging.Handler = logging.NullHandler()
    if logfile is not None:
        os.makedirs(os.path.dirname(logfile), exist_ok=True)
        handler = logging.FileHandler(logfile)
        handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | store server | %(name)s | %(message)s"))
    root.addHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
