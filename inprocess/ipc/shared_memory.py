"""Anonymous shared memory, passed between processes by file descriptor.

A region is a memfd: it has no name in any file system, so there is nothing to unlink, nothing that a crash can leave
behind, and no dependence on the size of ``/dev/shm``. The kernel frees it after the last descriptor and the last
mapping are closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
from types import TracebackType
from typing import NoReturn, Self

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FREE_PAGES = 3  # of fallocate: FALLOC_FL_PUNCH_HOLE, and FALLOC_FL_KEEP_SIZE
_HUGE_BYTES = 2 << 20
_BLOCK_BYTES = 16 << 20  # at a time: meanwhile, other threads cannot map or unmap memory


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
        self._huge = size >= _HUGE_BYTES  # whether huge pages are tried

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
        if self.closed:
            raise ValueError(f"shared memory {self.name!r} is closed")
        if self._buffer is None:
            self._map, self._buffer = _mapped(self.fd, self.size)
        return self._buffer

    def prefault(self) -> None:
        """Allocate all pages now, so that the first copy into the region does not have to. See `populate`."""
        for start, size in self.blocks():
            self.populate(start, size)

    def blocks(self) -> list[tuple[int, int]]:
        """Return the start and size of all blocks to `populate`, each a few milliseconds of work."""
        return [(start, min(_BLOCK_BYTES, self.size - start)) for start in range(0, self.size, _BLOCK_BYTES)]

    def populate(self, start: int, size: int) -> None:
        """Allocate the pages of one block, as huge pages where the kernel gives them. Contents stay.

        In any thread, several at a time; others run meanwhile. The region must not be closed before it returns. Raises
        OSError if there is not enough memory; on a cgroup limit the kernel may kill the process instead.
        """
        libc = ctypes.CDLL(None, use_errno=True)  # madvise() of a mmap object would hold the GIL
        address = _address_of(self.buffer) + start
        if self._huge:
            self._huge = _collapse(libc, address, size)
        if (number := _madvise(libc, address, size, _MADV_POPULATE_WRITE)) != 0:
            if number != errno.EINVAL:  # EINVAL: a kernel before 5.14
                raise OSError(number, f"{os.strerror(number)} (shared memory {self.name!r}, {self.size} bytes)")
            first_bytes = self.buffer[start : start + size : mmap.PAGESIZE]
            first_bytes[:] = bytes(first_bytes)

    def clear(self) -> None:
        """Free all pages, also those behind the region; the bytes are zero then, for every process that has them.

        Other threads run meanwhile. OSError if the kernel refuses.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        pages = -(-os.fstat(self.fd).st_size // mmap.PAGESIZE)
        if libc.fallocate(self.fd, _FREE_PAGES, ctypes.c_int64(0), ctypes.c_int64(pages * mmap.PAGESIZE)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)} (shared memory {self.name!r}, {self.size} bytes)")

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
            if buffer is not None:
                # Closing the mapping would take the pages out of the page table, too, but with the GIL held.
                _madvise(ctypes.CDLL(None, use_errno=True), _address_of(buffer), self.size, mmap.MADV_DONTNEED)
                buffer.release()
            if mapping is not None:
                mapping.close()
        except BufferError:
            pass  # a view is in use: the last one unmaps
        finally:
            os.close(fd)  # frees the pages, unless another process has them

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


def _mapped(fd: int, size: int) -> tuple[mmap.mmap, memoryview]:
    """Map a file; return the mapping to be closed, and the bytes of the file in it.

    They begin at a multiple of the size of a huge page, without which the kernel makes none.
    """
    if size >= _HUGE_BYTES:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        with contextlib.suppress(OSError):  # a limit of address space that has no room for the surplus
            room = mmap.mmap(-1, size + _HUGE_BYTES, flags=flags)
            whole = memoryview(room)
            offset = -_address_of(whole) % _HUGE_BYTES
            buffer = whole[offset : offset + size]
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            access, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
            wanted = _address_of(buffer)
            at = ctypes.c_void_p(wanted)
            if libc.mmap(at, ctypes.c_size_t(size), access, shared, fd, ctypes.c_int64(0)) == wanted:
                return room, buffer
            raise OSError(ctypes.get_errno(), "mmap")
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    return mapping, memoryview(mapping)


def _address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _madvise(libc: ctypes.CDLL, address: int, size: int, advice: int) -> int:
    """Return 0, or the number of the error."""
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice) == 0:
        return 0
    return ctypes.get_errno()


def _collapse(libc: ctypes.CDLL, address: int, size: int) -> bool:
    """Make the pages of a block huge, as far as it has whole ones; return whether to go on with the next block.

    The kernel does not do it for a part without any page. Making huge pages of many small ones that are there takes
    three times as long as allocating those: so each part gets one first.
    """
    parts = range(address, address + size - _HUGE_BYTES + 1, _HUGE_BYTES)
    for part in parts:
        _madvise(libc, part, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
    # EINVAL: not on this kernel, or forbidden; ENOMEM: there are none at present; EAGAIN: a page was just being used
    return not parts or _madvise(libc, address, len(parts) * _HUGE_BYTES, _MADV_COLLAPSE) in (0, errno.EAGAIN)
