"""Shares in the memory of other nodes, read by ranges while a snapshot is restored."""

from __future__ import annotations

import contextlib
import queue

from ckpt.replication.replica import Address, Replica, TransportError
from ckpt.replication.tcp import RemoteHolder, TcpTransport
from ckpt.storage.memory_step import ShareBytes
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_source import OpenFile


class RemoteShare(ShareBytes):
    """The share of a rank that a replica process of another node holds, or was lent. Any thread, several at once.

    A connection is made for each thread that reads at the same time, and used again. What has failed once is not tried
    again: a process that does not answer is waited for once, and not for each range.
    """

    def __init__(
        self, transport: TcpTransport, holder: Address, replica: Replica, failed: dict[Address, str] | None = None
    ) -> None:
        """`failed` has the holders that could not be reached in this restore, and why; shares have it in common."""
        self._failed = {} if failed is None else failed
        self._transport = transport
        self._holder = holder
        self._replica = replica
        self._idle: queue.SimpleQueue[RemoteHolder] = queue.SimpleQueue()

    def open(self, offset: int, nbytes: int) -> OpenFile:
        """See `ShareBytes.open`. Makes no request."""
        return _RemoteFile(self, offset, nbytes)

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Return bytes of the slot. DamagedFileError if they cannot be had: an older step can be restored then."""
        data = bytearray(nbytes)
        if (why := self._failed.get(self._holder)) is not None:
            raise DamagedFileError(f"cannot be read: {why}")
        try:
            if not self._read_again(offset, data):
                self._read(self._transport.open(self._holder), offset, data)
        except TransportError as error:
            self._failed[self._holder] = str(error)
            raise DamagedFileError(f"cannot be read: {error}") from error
        self.bytes_fetched += nbytes
        return data

    def _read_again(self, offset: int, data: bytearray) -> bool:
        """Read by a connection that was used before; False if none can be: a holder closes those that are idle."""
        with contextlib.suppress(queue.Empty, TransportError):
            self._read(self._idle.get_nowait(), offset, data)
            return True
        return False

    def _read(self, holder: RemoteHolder, offset: int, data: bytearray) -> None:
        """Read by a connection that no other thread uses; after an error it is closed."""
        try:
            holder.read_into(self._replica, offset, memoryview(data))
        except BaseException:
            holder.close()
            raise
        self._idle.put(holder)

    def close(self) -> None:
        """See `ShareBytes.close`."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


class _RemoteFile(OpenFile):
    """A range of a slot on another node."""

    def __init__(self, share: RemoteShare, offset: int, nbytes: int) -> None:
        self._share = share
        self._offset = offset
        self._nbytes = nbytes

    @property
    def size(self) -> int:
        return self._nbytes

    def read(self, offset: int, nbytes: int) -> memoryview:
        nbytes = max(0, min(nbytes, self._nbytes - offset))
        return memoryview(self._share.read(self._offset + offset, nbytes) if nbytes else b"")
