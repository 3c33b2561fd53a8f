"""How the ranks of a job find the server of its coordination store, and learn its secret.

    alone (a world of 1)                     nothing to find
    torchrun, and launchers built on it      rank 0 writes the address into the store that the launcher's agent serves
    MASTER_ADDR and MASTER_PORT, as srun,    rank 0 serves a store of torch at MASTER_PORT until all have read it, and
    mpirun or a shell set them               then frees the port, which belongs to the wrapped function

At MASTER_PORT the ranks of another job may come, too. So each rank claims its number there, and rank 0 tells the
address to one process for each number, which is most likely of its own job (see `claims`). All others get an error.

With INPROCESS_SECRET in the environment of all ranks, the secret is derived from that and never leaves a process.
Otherwise any process that can connect to those stores at that moment can read it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import secrets
import time
from collections.abc import Callable, Set
from datetime import timedelta
from typing import Any

from inprocess.bounded_waits import bounded_call
from inprocess.coordination.claims import RankClaim, RankClaims
from inprocess.coordination.wire import Access
from inprocess.exception import RestartError, StoreError
from inprocess.ipc.proofs import job_secret
from inprocess.rank_environment import scheduled_ranks
from inprocess.unblock.store_waits import connect_store

_SECRET = "INPROCESS_SECRET"
_PAUSE_S = 0.05
_BETTER_CLAIMS_S = 5.0  # how long rank 0 waits for claims that are more like its own
_REFUSED_READ_S = 1.0
_LOOK_S = 2.0
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
        scheduled = scheduled_ranks()
        job = scheduled.job if scheduled is not None and scheduled.world_size == world_size else ""
        self._prefix = f"inprocess/{_launch()}/{job}/{_calls}"
        self._is_certain = bool(job)
        self._claim = RankClaim.of_this_process(rank, world_size)
        self._address = _launcher_address()
        self._has_agent = os.environ.get("TORCHELASTIC_RUN_ID") is not None and _agent is not None

    def exchange(self, access: Access | None) -> Access:
        """Publish `access` on rank 0, wait for it on the others (which pass None); return it. StoreError."""
        if self._world_size == 1:
            assert access is not None
            return access
        if self._address is None:
            raise StoreError(
                f"this is rank {self._rank} of {self._world_size}, and MASTER_ADDR and MASTER_PORT, which tell the "
                "ranks where to meet, are not set: start the processes with torchrun or ckpt_launcher, or set both for "
                "all; or RANK=0 and WORLD_SIZE=1 for a process that is alone"
            )
        if access is None:
            return self._read()
        self._write(access)
        return access

    def lacks_rank_0(self) -> bool:
        """Return whether the rank 0 that was to publish the address has not, under a launcher. StoreError."""
        return self._has_agent and not self._served_store().check([f"{self._prefix}/access"])

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _write(self, access: Access) -> None:
        document = access.to_document()
        if job_secret(access.job) is not None:
            document["secret"] = ""  # the others derive it, too
        if self._has_agent:
            self._served_store().set(f"{self._prefix}/access", json.dumps(document))
        else:
            self._admit(json.dumps(document))

    def _admit(self, document: str) -> None:
        """Serve a store at MASTER_PORT until one process for each rank has read the document there."""
        store, own = self._own_store(), self._claim
        claims, admitted = RankClaims(own, certain=self._is_certain), {own.id}
        desk = _Desk(store, self._prefix, claims)
        better_s = min(_BETTER_CLAIMS_S, self._timeout_s / 4)
        store.set(f"{self._prefix}/rank_0", own.encode())
        changed_s, taken = time.monotonic(), claims.taken

        def is_settled() -> bool:
            nonlocal changed_s, taken
            desk.take_claims()
            if claims.taken != taken:
                changed_s, taken = time.monotonic(), claims.taken
            return claims.is_full and (claims.is_alike or time.monotonic() - changed_s >= better_s)

        self._wait(is_settled, claims.missing)
        admitted |= {claim.id for claim in taken.values()}
        desk.answer(admitted, document)

        def is_read() -> bool:
            desk.take_claims()
            desk.answer(admitted, document)  # that is, refuse who comes now
            return int(store.add(f"{self._prefix}/read", 0)) >= self._world_size - 1

        self._wait(
            is_read, lambda: f"{int(store.add(f'{self._prefix}/read', 0)) + 1} of {self._world_size} ranks have read it"
        )
        deadline = time.monotonic() + _REFUSED_READ_S
        while int(store.add(f"{self._prefix}/refused", 0)) < desk.refused and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

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
            rival = self._rival()
            if rival is not None:
                raise StoreError(self._shared_port(f"{rival.name} is rank 0 there"))
            time.sleep(_PAUSE_S)  # the previous job may just be ending
        raise StoreError(f"rank 0 cannot listen at MASTER_PORT {port}; is another job using it? {problem}")

    def _rival(self) -> RankClaim | None:
        """Return the process that serves the meeting at MASTER_PORT as rank 0, if one does; it learns of this one."""
        dist: Any = importlib.import_module("torch.distributed")
        assert self._address is not None
        host, port = self._address

        def look() -> RankClaim | None:
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=1), wait_for_workers=False)
            if not store.check([f"{self._prefix}/rank_0"]):
                return None
            rival = RankClaim.decode(store.get(f"{self._prefix}/rank_0"))
            _put_claim(store, self._prefix, self._claim)
            return rival

        try:
            return bounded_call(look, _LOOK_S, "inprocess-store-look")
        except (RuntimeError, ValueError, RestartError):
            return None  # another program, or it has just freed the port

    # -- the others ----------------------------------------------------------------------------------------------------

    def _read(self) -> Access:
        document = self._read_published() if self._has_agent else self._read_admitted()
        document["secret"] = document["secret"] or job_secret(document["job"])
        if document["secret"] is None:
            raise StoreError(f"rank 0 has {_SECRET} in its environment, and rank {self._rank} has not: set it for all")
        return Access.from_document(document)

    def _read_published(self) -> Any:
        store = self._served_store()
        key = f"{self._prefix}/access"
        self._wait(lambda: bool(store.check([key])), lambda: "rank 0 has published nothing")
        return json.loads(store.get(key))

    def _read_admitted(self) -> Any:
        """Claim this rank, and return the document from rank 0. StoreError if that has taken another process."""
        problem = "no store is served there"
        while time.monotonic() < self._deadline:
            store = self._served_store()
            try:
                key = f"{self._prefix}/answer/{_put_claim(store, self._prefix, self._claim)}"
                self._wait(functools.partial(store.check, [key]), lambda: "rank 0 has answered nothing")
                answer = json.loads(store.get(key))
                store.add(f"{self._prefix}/{'read' if 'access' in answer else 'refused'}", 1)
            except RuntimeError as error:  # rank 0 of another job, which has freed the port; or ours has died
                problem = f"the store there has ended: {error}"
                time.sleep(_PAUSE_S)
                continue
            if "access" in answer:
                return answer["access"]
            raise StoreError(self._shared_port(answer["refused"]))
        raise self._failure(problem)

    def _shared_port(self, reason: str) -> str:
        host, port = self._address or ("", 0)
        return (
            f"MASTER_PORT {port} at {host} is used by two jobs at once: this process, rank {self._rank} of "
            f"{self._world_size}, is not of the job that meets there ({reason}). Give each job a MASTER_PORT of its own"
        )

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


class _Desk:
    """Claims at the store that this process serves, and the answers to them."""

    def __init__(self, store: Any, prefix: str, claims: RankClaims) -> None:
        self.refused = 0
        self._store = store
        self._prefix = prefix
        self._claims = claims
        self._expected: set[int] = set()  # numbers of claims that are announced
        self._unanswered: dict[int, RankClaim] = {}
        self._count = 0

    def take_claims(self) -> None:
        """Read new claims. One that cannot be of this job is refused at once."""
        count = int(self._store.add(f"{self._prefix}/claims", 0))
        self._expected |= set(range(self._count + 1, count + 1))
        self._count = count
        for number in sorted(self._expected):
            if not self._store.check([f"{self._prefix}/claim/{number}"]):
                continue
            self._expected.discard(number)
            claim = RankClaim.decode(self._store.get(f"{self._prefix}/claim/{number}"))
            refusal = self._claims.add(claim)
            if refusal is None:
                self._unanswered[number] = claim
            elif claim.rank != 0:  # another rank 0 does not wait for an answer
                self._refuse(number, refusal)

    def answer(self, admitted: Set[str], document: str) -> None:
        """Answer all claims: the document for those that are `admitted`."""
        access = [number for number, claim in self._unanswered.items() if claim.id in admitted]
        if access:
            answers = [f'{{"access": {document}}}'] * len(access)
            self._store.multi_set([f"{self._prefix}/answer/{number}" for number in access], answers)
        for number, claim in self._unanswered.items():
            if claim.id not in admitted:
                self._refuse(number, f"another process is rank {claim.rank} there")
        self._unanswered = {}

    def _refuse(self, number: int, reason: str) -> None:
        self.refused += 1
        self._store.set(f"{self._prefix}/answer/{number}", json.dumps({"refused": reason}))


def _put_claim(store: Any, prefix: str, claim: RankClaim) -> int:
    """Write a claim, and return its number."""
    number = int(store.add(f"{prefix}/claims", 1))
    store.set(f"{prefix}/claim/{number}", claim.encode())
    return number


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
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
    return "/".join(os.environ.get(name, "") for name in names)
