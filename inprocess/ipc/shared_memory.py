"""Anonymous shared memory, passed between processes by file descriptor.

A region is a memfd: it has no name in any file system, so there is nothing to unlink, nothing that a crash can leave
behind, and no dependence on the size of ``/dev/shm``. The kernel frees it after the last descriptor and the last
mapping are closed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

__all__ = ["SharedMemory"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_PREFAULT_BYTES = 16 << 20  # at a time: meanwhile, other threads cannot map or unmap memory


class SharedMemory:
    """A fixed-size shared region, zero-filled when created. One process creates it, others attach to its descriptor.

    It crosses a process boundary only as an argument of a background call, where it is replaced by its `region_id` and
    the receiver maps the same pages; pickling it anywhere else raises TypeError. Not thread-safe except for access to
    the mapped bytes.
    """

    def __init__(self, fd: int, size: int, name: str, region_id: str) -> None:
        """Take ownership of `fd`. Use `create` for a new region."""
        self.fd = fd
        self.size = size
        self.name = name
        self.region_id = region_id
        self._map: mmap.mmap | None = None
        self._buffer: memoryview | None = None

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """Create a region of `size` bytes; `name` appears only in ``/proc/<pid>/maps``.

        No memory is used until it is touched (see `prefault`). Raises ValueError for a size below 1, OSError when the
        kernel refuses.
        """
        if size < 1:
            raise ValueError(f"shared memory {name!r}: size must be at least 1 byte, not {size}")
        region = cls(os.memfd_create(name, os.MFD_CLOEXEC), size, name, secrets.token_hex(16))
        try:
            os.ftruncate(region.fd, size)
        except BaseException:
            region.close()
            raise
        return region

    @property
    def closed(self) -> bool:
        return self.fd < 0

    @property
    def buffer(self) -> memoryview:
        """The bytes, writable, mapped at first use. Raises ValueError after `close`."""
        self._mapping()
        assert self._buffer is not None
        return self._buffer

    def prefault(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Allocate all pages now, so that the first copy into the region does not have to. Contents stay.

        Other threads run meanwhile. Ends early if `stopped`, which is called every few milliseconds. The region must
        not be closed before it returns. Raises OSError if there is not enough memory; on a cgroup limit the kernel may
        kill the process instead.
        """
        libc = ctypes.CDLL(None, use_errno=True)  # madvise() of a mmap object would hold the GIL
        whole = (ctypes.c_char * self.size).from_buffer(self._mapping())
        for start in range(0, self.size, _PREFAULT_BYTES):
            size = min(_PREFAULT_BYTES, self.size - start)
            if stopped():
                return
            address = ctypes.c_void_p(ctypes.addressof(whole) + start)
            if libc.madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                number = ctypes.get_errno()
                if number != errno.EINVAL:  # EINVAL: a kernel before 5.14
                    raise OSError(number, f"{os.strerror(number)} (shared memory {self.name!r}, {self.size} bytes)")
                first_bytes = self.buffer[start : start + size : mmap.PAGESIZE]
                first_bytes[:] = bytes(first_bytes)

    def write_behind(self, offset: int, data: bytes) -> None:
        """Write bytes behind the region, `offset` bytes after its end; the file grows as needed. OSError if it cannot.

        They are in no mapping. Who has the descriptor can read them, as long as it is told where they are.
        """
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, self.size + offset)
            view, offset = view[written:], offset + written

    def read_behind(self, offset: int, nbytes: int) -> bytes:
        """Return bytes that `write_behind` wrote; fewer if they are not there."""
        return os.pread(self.fd, nbytes, self.size + offset)

    def close(self) -> None:
        """Give up the descriptor and the mapping. Idempotent.

        Views that are still in use keep the mapping (not the descriptor) until they are released. Takes about 0.2 s for
        each GB that was touched; other threads run meanwhile.
        """
        if self.closed:
            return
        fd, self.fd = self.fd, -1
        buffer, mapping, self._buffer, self._map = self._buffer, self._map, None, None
        try:
            if mapping is not None:
                _unmap_pages(mapping, self.size)
            if buffer is not None:
                buffer.release()
            if mapping is not None:
                mapping.close()
        except BufferError:
            pass  # a view is in use: the last one unmaps
        finally:
            os.close(fd)  # frees the pages, unless another process has them

    def _mapping(self) -> mmap.mmap:
        if self.closed:
            raise ValueError(f"shared memory {self.name!r} is closed")
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED)
            self._buffer = memoryview(self._map)
        return self._map

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"shared memory {self.name!r} can only be passed to another process as an argument of a background call"
        )

    def __repr__(self) -> str:
        return f"SharedMemory(name={self.name!r}, size={self.size}, {'closed' if self.closed else f'fd={self.fd}'})"


def _unmap_pages(mapping: mmap.mmap, size: int) -> None:
    """Take the pages out of the page table; their contents stay. Closing the mapping would do so with the GIL held."""
    libc = ctypes.CDLL(None)
    start = ctypes.c_char.from_buffer(mapping)
    libc.madvise(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
