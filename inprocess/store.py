"""Stores for the wrapper: torch stores with the logical contents of `StoreMixin`.

    class MyStore(StoreMixin, torch.distributed.SomeStore): ...

makes one more. A store that is given to torch must outlive the process groups that use it: torch keeps the C++ half of
a Python store alive, not the Python half.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from inprocess.coordination.mixin import StoreMixin
from inprocess.coordination.namespace import CoordinationStore, PrefixView
from inprocess.coordination.server import StoreServer
from inprocess.coordination.wire import Host
from inprocess.exception import StoreError, StoreTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore as TorchFileStore
    from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore
    from torch._C._distributed_c10d import Store as TorchStore
else:
    TorchFileStore, TorchPrefixStore, TorchStore = dist.FileStore, dist.PrefixStore, dist.Store

__all__ = ["FileStore", "PrefixStore", "StoreMixin", "TCPStore"]

_WORKERS = "__workers__"
_TRY_S = 1.0
_DEFAULT_TIMEOUT = timedelta(seconds=300)


class TCPStore(StoreMixin, TorchStore):  # the operations are those defined here
    """The coordination store as torch store. What it guarantees is told at `StoreClient`.

    Normally the monitor process of rank 0 hosts it at MASTER_ADDR:MASTER_PORT. Where nobody listens there, the process
    with RANK 0 does so itself; then `critical_ranks` is (0,) on all ranks: that process must outlive the others.

    `session` keeps apart stores that follow each other on the same port: a client waits while the server there is of
    another session. `client` is the torch-free client that does the work.
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
        session: str = "",
    ) -> None:
        """Connect to the store, or host it. StoreError if there is none within `timeout`.

        The defaults are MASTER_ADDR, MASTER_PORT and WORLD_SIZE. With `wait_for_workers`, RANK 0 waits until
        `world_size` stores have connected; StoreTimeoutError if they do not. `multi_tenant` and `use_libuv` are
        accepted for torch's sake and have no meaning here.
        """
        super().__init__()
        self.set_timeout(timeout)
        self._server: StoreServer | None = None
        address = self.server_address(host_name=host_name, port=port)
        is_first = os.environ.get("RANK", "0") == "0"
        self.client = self._connect(address, session, timeout, may_host=is_first)
        self.critical_ranks: tuple[int, ...] = (0,) if self.client.host_embedded else ()
        if wait_for_workers:
            try:
                self._count_workers(world_size or int(os.environ.get("WORLD_SIZE", "1")), timeout, wait=is_first)
            except BaseException:
                self.close()
                raise

    @classmethod
    def server_address(cls, host_name: str | None = None, port: int | None = None, **_: Any) -> Host:
        """Return where the primary server of a store with these keywords must be hosted."""
        name = os.environ["MASTER_ADDR"] if host_name is None else host_name
        return Host(0, name, int(os.environ["MASTER_PORT"]) if port is None else port)

    def client_spec(self) -> dict[str, Any]:
        """Return, in types of JSON, from what `CoordinationStore.from_spec` makes a client in another process."""
        return self.client.spec()

    def close(self) -> None:
        """Close the connections; if this process hosts the store, end it. Idempotent."""
        self.client.close()
        if self._server is not None:
            self._server.close()

    def clone(self) -> Self:
        """Return this store, which threads can share."""
        return self

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there."""
        return True

    def set(self, key: str, value: str | bytes) -> None:
        self.client.set(key, value)

    def get(self, key: str) -> bytes:
        return self.client.get(key, self.timeout)

    def add(self, key: str, amount: int) -> int:
        return self.client.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self.client.append(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self.client.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.client.wait(keys, self.timeout if timeout is None else timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self.client.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self.client.delete_key(key)

    def num_keys(self) -> int:
        return self.client.num_keys()

    # What torch's C++ side calls these two.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.client.multi_get(keys, self.timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.client.multi_set(keys, values)

    def delete_prefix(self, prefix: str) -> int:
        return self.client.delete_prefix(prefix)

    def forget(self, prefix: str) -> None:
        self.client.forget(prefix)

    def arrive(self, name: str, member: str) -> int:
        return self.client.arrive(name, member)

    def wait_size(self, name: str, size: int, timeout: timedelta | None = None) -> int:
        return self.client.wait_size(name, size, self.timeout if timeout is None else timeout)

    def members(self, name: str) -> frozenset[str]:
        return self.client.members(name)

    def _connect(self, address: Host, session: str, timeout: timedelta, *, may_host: bool) -> CoordinationStore:
        """Connect; the process that may host tries that again and again, until the port is free or serves us."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            if may_host:
                self._server = _host(address, session)
            left = max(0.0, deadline - time.monotonic())
            patience = timedelta(seconds=min(left, _TRY_S) if may_host else left)
            try:
                return CoordinationStore([address], session=session, timeout=timeout, connect_timeout=patience)
            except BaseException as error:
                if self._server is not None:
                    self._server.close()
                if not isinstance(error, StoreError) or time.monotonic() >= deadline:
                    raise

    def _count_workers(self, world_size: int, timeout: timedelta, *, wait: bool) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        size = self.arrive(_WORKERS, uuid.uuid4().hex)
        while wait and size < world_size:
            try:
                size = self.wait_size(_WORKERS, world_size, timedelta(seconds=_TRY_S))
            except StoreTimeoutError:
                if time.monotonic() >= deadline:
                    raise


class FileStore(StoreMixin, TorchFileStore):  # both define `wait`; the one of the mixin counts
    """A file as store: `FileStore(file_name, world_size)`. It needs no server, so no rank is critical.

    The file grows with every change, and waits look at it again and again; it is for tests and single machines.
    """

    critical_ranks: tuple[int, ...] = ()


class PrefixStore(PrefixView, StoreMixin, TorchPrefixStore):  # the operations of the view count
    """A namespace of its own for each iteration: `PrefixStore(iteration, base)`. `base_store` is the base.

    The base is a `TCPStore` or a `FileStore` from here, or another store with `StoreMixin`. From C++ it is a
    `torch.distributed.PrefixStore` with the same keys.
    """

    def __init__(self, iteration: int | str, base: Any) -> None:
        TorchPrefixStore.__init__(self, str(iteration), base)
        self.prefix = str(iteration)
        self.base_store = base

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """As the base store."""
        ranks: tuple[int, ...] = self.base_store.critical_ranks
        return ranks


def _host(address: Host, session: str) -> StoreServer | None:
    """Return a server at this address; None if the port is taken."""
    server = StoreServer(address.name, address.port, session=session, embedded=True)
    try:
        server.start()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return server
