"""Stores for the wrapper: torch stores with the verbs of the coordination store.

    class MyStore(StoreMixin, torch.distributed.SomeStore): ...

defines another one. A store that is passed to torch must outlive the process groups that use it: torch keeps the C++
part of a Python store alive, but not the Python part.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from inprocess.coordination import Access, CoordinationStore, StoreMixin, StoreServer, StoreVerbs, VerbCall
from inprocess.coordination.etcd import EtcdClient
from inprocess.coordination.etcd_gateway import EtcdCluster
from inprocess.coordination.namespace import PrefixView
from inprocess.coordination.server_process import PORT_WAIT_S
from inprocess.coordination.wire import Op
from inprocess.exception import BarrierError, BarrierOverflow, BarrierTimeout, StoreError, StoreTimeoutError
from inprocess.ipc import unix_sockets
from inprocess.ipc.proofs import job_secret
from inprocess.rank_environment import ranks_of_environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore as TorchFileStore
    from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore
    from torch._C._distributed_c10d import Store as TorchStore
else:
    TorchFileStore, TorchPrefixStore, TorchStore = dist.FileStore, dist.PrefixStore, dist.Store

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "EtcdStore",
    "FileStore",
    "PrefixStore",
    "StoreMixin",
    "TCPStore",
]

_WORKERS = "__workers__"
_TRY_S = 1.0
_DEFAULT_TIMEOUT = timedelta(seconds=300)


class _ClientStore(StoreMixin, TorchStore):
    """A torch store whose work is done by a torch-free `client`."""

    client: CoordinationStore | EtcdClient
    critical_ranks: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        client = getattr(self, "client", None)
        if client is not None:
            client.close()

    def clone(self) -> Self:
        """Return this store: threads can share it."""
        return self

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` are supported."""
        return True

    def perform(self, call: VerbCall) -> tuple[bytes, ...]:
        if call.op is Op.GET and call.timeout is None:
            call = call._replace(timeout=self.timeout)  # which torch may have changed
        return self.client.perform(call)

    def perform_all(self, calls: Sequence[VerbCall]) -> list[tuple[bytes, ...]]:
        return self.client.perform_all(calls)

    # The names by which the C++ side of torch calls these two.
    deleteKey = StoreVerbs.delete_key  # noqa: N815
    getNumKeys = StoreVerbs.num_keys  # noqa: N815


class TCPStore(_ClientStore):
    """The coordination store as a store of torch; see `StoreClient` for its guarantees.

    The wrapper passes `access`; the server is then a process that rank 0 has started. Without `access` the process with
    RANK 0 hosts the store, at `host_name` and `port`, and `critical_ranks` is (0,): that process must outlive the
    others. `client` is the torch-free client that does the work.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
        *,
        access: Access | None = None,
        patience: timedelta = timedelta(seconds=30),
        ping_interval: timedelta | None = None,
    ) -> None:
        """Connect to the server, or host it. StoreError if there is none within `timeout`.

        `host_name`, `port` and `world_size` are by default MASTER_ADDR, MASTER_PORT and WORLD_SIZE. The secret is
        derived from INPROCESS_SECRET in the environment; without that, it is shared by the processes of this user on
        this machine. With `wait_for_workers`, RANK 0 waits until `world_size` stores have connected; StoreTimeoutError
        if they do not. If the server is silent for `patience`, the store is lost. `multi_tenant` and `use_libuv` are
        accepted for compatibility with torch and have no effect.
        """
        super().__init__()
        self.set_timeout(timeout)
        is_first = (access is None or wait_for_workers) and ranks_of_environment().rank == 0
        self._server: StoreServer | None = None
        try:
            if access is None:
                name = host_name or os.environ["MASTER_ADDR"]
                access = Access(name, int(os.environ["MASTER_PORT"]) if port is None else port, "", _own_secret())
                self.critical_ranks = (0,)
                if is_first:
                    self._server = StoreServer(access)
                    access = self._server.start(port_wait_s=min(PORT_WAIT_S, timeout.total_seconds()))
            self.client = CoordinationStore(
                access, timeout=timeout, connect_timeout=timeout, patience=patience, ping_interval=ping_interval
            )
            if wait_for_workers:
                self._count_workers(world_size or ranks_of_environment().world_size, timeout, wait=is_first)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; if this process hosts the store, end it. Idempotent."""
        super().close()
        if self._server is not None:
            self._server.close()

    def _count_workers(self, world_size: int, timeout: timedelta, *, wait: bool) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        size = self.arrive(_WORKERS, uuid.uuid4().hex)
        while wait and size < world_size:
            try:
                size = self.wait_size(_WORKERS, world_size, timedelta(seconds=_TRY_S))
            except StoreTimeoutError:
                if time.monotonic() >= deadline:
                    raise


class EtcdStore(_ClientStore):
    """The coordination store in an etcd cluster: `Wrapper(store_factory=EtcdStore, store_kwargs={"endpoints": ...})`.

    The job survives the loss of any node, also that of rank 0, as long as the cluster has a quorum. The contents are
    deleted a quarter of an hour after the last process of the job has ended.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        job: str,
        user: str = "",
        password: str = "",
        ca_cert: str = "",
        cert: str = "",
        key: str = "",
        timeout: timedelta = _DEFAULT_TIMEOUT,
        patience: timedelta = timedelta(seconds=30),
    ) -> None:
        """Connect to the cluster. StoreError if it does not answer within `patience`, or refuses.

        `endpoints` are client URLs of its members, in a list or separated by commas. `user` and `password`, or the PEM
        files `cert` and `key`, must permit reading and writing under "/inprocess/"; `ca_cert` is the authority that has
        signed the certificates of the members. Without them, any process that reaches the cluster can end the job.
        `job` is the same for all processes of a job and was never used before; the wrapper passes it. After `patience`
        without an answer the store is lost.
        """
        super().__init__()
        self.set_timeout(timeout)
        urls = endpoints.split(",") if isinstance(endpoints, str) else endpoints
        cluster = EtcdCluster(tuple(urls), user, password, ca_cert, cert, key)
        self.client = EtcdClient(cluster, job, timeout=timeout, patience=patience)


class FileStore(StoreMixin, TorchFileStore):
    """A store in a file: `FileStore(file_name, world_size)`. It needs no server, so no rank is critical.

    The file grows with every change, and waits poll it; it is for tests and single machines.
    """

    critical_ranks: tuple[int, ...] = ()


class PrefixStore(PrefixView, StoreMixin, TorchPrefixStore):  # of both, `perform` of the view counts
    """A namespace of its own for each iteration: `PrefixStore(iteration, store)`. `base_store` is that store.

    That is a `TCPStore` or `FileStore` of this module, or another store with `StoreMixin`. For C++ this is a
    `torch.distributed.PrefixStore` with the same keys.
    """

    base_store: Any

    def __init__(self, iteration: int | str, store: Any) -> None:
        TorchPrefixStore.__init__(self, str(iteration), store)
        self.prefix = str(iteration)
        self.base_store = store

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """The critical ranks of the base store."""
        ranks: tuple[int, ...] = self.base_store.critical_ranks
        return ranks


def _own_secret() -> str:
    """Return the secret of stores that are opened without the wrapper: from the environment, or that of this user."""
    given = job_secret("")
    if given is not None:
        return given
    try:
        path = os.path.join(unix_sockets.private_directory(), "store-secret")
    except OSError as error:
        raise StoreError(f"{error}; or set INPROCESS_SECRET in the environment of all ranks") from error
    with contextlib.suppress(FileExistsError):
        fd = os.open(f"{path}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_hex(32).encode())
        finally:
            os.close(fd)
        try:
            os.link(f"{path}.{os.getpid()}", path)
        finally:
            os.unlink(f"{path}.{os.getpid()}")
    with open(path) as file:
        return file.read()
