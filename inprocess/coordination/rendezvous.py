"""How the ranks of a job find the server of its coordination store, and learn its secret.

    alone (a world of 1)                     nothing to find
    torchrun, and launchers built on it      rank 0 writes the address into the store that the launcher's agent serves
    MASTER_ADDR and MASTER_PORT, as srun,    rank 0 serves a store of torch at MASTER_PORT until all have read it, and
    mpirun or a shell set them               then frees the port, which belongs to the wrapped function

With INPROCESS_SECRET in the environment of all ranks, the secret is derived from that and never leaves a process.
Otherwise any process that can connect to those stores at that moment can read it.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from inprocess.coordination.wire import Access
from inprocess.exception import StoreError
from inprocess.ipc.proofs import job_secret
from inprocess.unblock.stores import connect_store

__all__ = ["Rendezvous", "new_access"]

_SECRET = "INPROCESS_SECRET"
_PAUSE_S = 0.05
_calls = 0


def new_access(host_name: str | None, port: int | None) -> Access:
    """Return the address and secret for a new server: by default at MASTER_ADDR, and at a free port."""
    job = secrets.token_hex(8)
    host = host_name or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    return Access(host, port or 0, job, job_secret(job) or secrets.token_hex(32))


class Rendezvous:
    """The first meeting of the ranks of one call of the wrapper. Create it on all ranks, in the same order.

    The environment is read at construction: the wrapped function gets another MASTER_ADDR.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta) -> None:
        global _calls
        _calls += 1
        self._rank = rank
        self._world_size = world_size
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._timeout_s = timeout.total_seconds()
        self._prefix = f"inprocess/{_launch()}/{_calls}"
        self._address = _launcher_address()
        self._has_agent = os.environ.get("TORCHELASTIC_RUN_ID") is not None and _agent is not None

    def exchange(self, access: Access | None) -> Access:
        """Publish `access` on rank 0, wait for it on the others (which pass None); return it. StoreError."""
        if self._world_size == 1:
            assert access is not None
            return access
        if self._address is None:
            raise StoreError(
                f"WORLD_SIZE is {self._world_size}, and MASTER_ADDR and MASTER_PORT, which tell the ranks where to "
                "meet, are not set: start the processes with torchrun, ckpt_launcher or srun, or set both"
            )
        if access is None:
            return self._read()
        self._write(access)
        return access

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _write(self, access: Access) -> None:
        document = access.to_document()
        if job_secret(access.job) is not None:
            document["secret"] = ""  # the others derive it, too
        store = self._served_store() if self._has_agent else self._own_store()
        store.set(f"{self._prefix}/access", json.dumps(document))
        if not self._has_agent:
            self._wait(
                lambda: int(store.add(f"{self._prefix}/read", 0)) >= self._world_size - 1,
                lambda: f"{int(store.add(f'{self._prefix}/read', 0)) + 1} of {self._world_size} ranks have read it",
            )

    def _own_store(self) -> Any:
        dist: Any = importlib.import_module("torch.distributed")
        assert self._address is not None
        host, port = self._address
        problem: Exception | None = None
        while time.monotonic() < self._deadline:
            try:
                return dist.TCPStore(host, port, None, True, timedelta(seconds=self._timeout_s), wait_for_workers=False)
            except RuntimeError as error:
                problem = error
                time.sleep(_PAUSE_S)  # the previous job may just be ending
        raise StoreError(f"rank 0 cannot listen at MASTER_PORT {port}; is another job using it? {problem}")

    # -- the others ----------------------------------------------------------------------------------------------------

    def _read(self) -> Access:
        store = self._served_store()
        key = f"{self._prefix}/access"
        self._wait(lambda: bool(store.check([key])), lambda: "rank 0 has published nothing")
        document = json.loads(store.get(key))
        if not self._has_agent:
            store.add(f"{self._prefix}/read", 1)
        document["secret"] = document["secret"] or job_secret(document["job"])
        if document["secret"] is None:
            raise StoreError(f"rank 0 has {_SECRET} in its environment, and rank {self._rank} has not: set it for all")
        return Access.from_document(document)

    def _served_store(self) -> Any:
        """Connect to the store that another process serves, or will serve soon."""
        dist: Any = importlib.import_module("torch.distributed")
        assert self._address is not None
        host, port = self._address
        left = timedelta(seconds=max(0.0, self._deadline - time.monotonic()))
        arguments = {"host_name": host, "port": port, "is_master": False, "wait_for_workers": False}
        try:
            return connect_store(dist.TCPStore, left, arguments)
        except RuntimeError as error:
            raise self._failure(f"no store is served there: {error}") from None

    def _wait(self, condition: Callable[[], bool], problem: Callable[[], str]) -> None:
        """Poll until the condition holds, so that an exception reaches the main thread. StoreError at the deadline."""
        while not condition():
            if time.monotonic() >= self._deadline:
                raise self._failure(problem())
            time.sleep(_PAUSE_S)

    def _failure(self, problem: str) -> StoreError:
        host, port = self._address or ("", 0)
        return StoreError(
            f"rank {self._rank}: the {self._world_size} ranks did not meet at {host}:{port} (MASTER_ADDR and "
            f"MASTER_PORT) within {self._timeout_s:g} s: {problem}"
        )


def _address_of_environment() -> tuple[str, int] | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return None if not host or not port else (host, int(port))


_agent: tuple[str, int] | None = None


def _launcher_address() -> tuple[str, int] | None:
    """Return the address of the store that the launcher's agent serves, else that of MASTER_ADDR and MASTER_PORT.

    The wrapper changes these variables in each iteration, so the address of the agent is kept for the process.
    """
    global _agent
    if _agent is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _agent = _address_of_environment()
    return _agent or _address_of_environment()


def _launch() -> str:
    """Return a name that all processes started together share, and that differs from one start to the next."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return "/".join(os.environ.get(name, "") for name in names)
