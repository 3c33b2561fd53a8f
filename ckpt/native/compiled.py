"""The functions of `ckpt.native` in C: crc32c.c, digest.c, frames.c, mapped.c, moves.c. They run without the lock.

Those of look.c and tensors.c, which are about objects of Python, keep it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt.native.record_types import BLOCK_BYTES, DIGEST_BYTES, HELD, RUN, SEGMENT

Array = np.ndarray[Any, np.dtype[Any]]

_OLD = "was compiled from another version of its source; install the package again (`pip install .`)"
_BUFFER_BYTES = 256 << 10  # stays in a core's cache
_TYPES = 32  # as SLOTS in look.c


def load() -> Compiled | None:
    """Return the compiled functions; None if they were not compiled when the package was installed.

    ImportError if they were compiled from another version.
    """
    path = os.path.join(os.path.dirname(__file__), "_library.abi3.so")  # one file for every version of Python
    return Compiled(path) if os.path.exists(path) else None


class _Buffer(threading.local):
    """The buffer of this thread for reads."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * _BUFFER_BYTES)()


class _Look(ctypes.Structure):
    """The arguments of `ckpt_look`, as in look.c."""

    _fields_ = (
        *((name, ctypes.py_object) for name in ("kinds", "classify", "ask", "call_hook")),
        ("marks", ctypes.py_object * 10),
        ("names", ctypes.py_object * 8),
        *((name, ctypes.py_object) for name in ("none", "dict", "text", "number", "local", "spec")),
        *((name, ctypes.py_object) for name in ("structure", "tensors", "dtensors", "specs", "parts", "read")),
        ("at", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("hook_calls", ctypes.c_int64),
        ("hook", ctypes.c_void_p),
        ("last_spec", ctypes.c_void_p),
        ("types", ctypes.c_void_p * _TYPES),
        ("codes", ctypes.c_int64 * _TYPES),
    )


class Compiled:
    """The functions of the shared library at `path`."""

    def __init__(self, path: str) -> None:
        try:
            library = self._library = ctypes.CDLL(path)
        except OSError as error:
            raise ImportError(f"{error}: install the package again (`pip install .`)") from error
        pointer, size = ctypes.c_void_p, ctypes.c_uint64
        for name, result, *arguments in (
            ("ckpt_blosc_frame", size, pointer, pointer, pointer, size, size, pointer, pointer),
            ("ckpt_copy_runs", None, pointer, size),
            ("ckpt_crc32c", ctypes.c_uint32, ctypes.c_uint32, pointer, size),
            ("ckpt_crc32c_choose", ctypes.c_int, ctypes.c_int),
            ("ckpt_crc32c_joined", ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, size),
            ("ckpt_hash", None, pointer, size, pointer, pointer),
            ("ckpt_read_pieces", ctypes.c_int, ctypes.c_int, pointer, size, pointer, size),
            ("ckpt_check_pieces", ctypes.c_int, pointer, size, size, pointer, size),
            ("ckpt_look_bytes", size),
            ("ckpt_record_bytes", size),
            ("ckpt_update_runs", None, pointer, pointer, pointer, size, pointer, size),
        ):
            function = getattr(library, str(name), None)
            if function is None:
                raise ImportError(f"{path} {_OLD}")
            function.restype, function.argtypes = result, arguments
        sizes = library.ckpt_record_bytes(), library.ckpt_look_bytes()
        if sizes != (HELD.itemsize << 16 | RUN.itemsize << 8 | SEGMENT.itemsize, ctypes.sizeof(_Look)):
            raise ImportError(f"{path} {_OLD}")
        with_lock = ctypes.PyDLL(path)
        try:
            self._look, self._describe = with_lock.ckpt_look, with_lock.ckpt_describe_tensors
        except AttributeError as error:
            raise ImportError(f"{path} {_OLD}") from error
        self._look.restype, self._look.argtypes = ctypes.c_int, [ctypes.POINTER(_Look), ctypes.py_object]
        self._describe.restype = ctypes.c_int64
        self._describe.argtypes = [ctypes.py_object, pointer, ctypes.c_int32, pointer, pointer, pointer, ctypes.c_int64]
        self._buffer = _Buffer()

    def choose(self, most: int) -> int:
        """Select the fastest implementation of checksums up to `most`, and return which it is."""
        return int(self._library.ckpt_crc32c_choose(most))

    def blosc_frame(
        self, compress: int, context: int, content: Array, itemsize: int, scratch: Array, frame: Array
    ) -> int:
        own, nbytes = _address(content), content.nbytes
        made = self._library.ckpt_blosc_frame(
            compress, context, own, nbytes, itemsize, _address(scratch), _address(frame)
        )
        return int(made)

    def copy_runs(self, runs: np.ndarray[Any, np.dtype[Any]]) -> None:
        self._library.ckpt_copy_runs(_address(runs), len(runs))

    def update_runs(self, runs: Array, held: int, last: int, key: bytes, number: int) -> None:
        self._library.ckpt_update_runs(_address(runs), held, last, len(runs), key, number)

    def crc32c(self, data: bytes | np.ndarray[Any, np.dtype[np.uint8]], initial: int) -> int:
        if isinstance(data, bytes):
            return int(self._library.ckpt_crc32c(initial, data, len(data)))
        return int(self._library.ckpt_crc32c(initial, _address(data), data.nbytes))

    def crc32c_joined(self, first: int, second: int, second_bytes: int) -> int:
        return int(self._library.ckpt_crc32c_joined(first, second, second_bytes))

    def digest(self, data: np.ndarray[Any, np.dtype[np.uint8]], key: bytes) -> bytes:
        hashes = np.empty((-(-data.nbytes // BLOCK_BYTES), 4), np.uint64)
        self._library.ckpt_hash(_address(data), data.nbytes, key, _address(hashes))
        return hashlib.blake2b(hashes.tobytes(), digest_size=DIGEST_BYTES).digest()

    def read_checked(self, fd: int, segments: np.ndarray[Any, np.dtype[Any]]) -> bool:
        memory = self._buffer.memory
        error = int(self._library.ckpt_read_pieces(fd, _address(segments), len(segments), memory, _BUFFER_BYTES))
        if error > 0:
            raise OSError(error, os.strerror(error))
        return error == 0

    def check_pieces(self, data: np.ndarray[Any, np.dtype[np.uint8]], start: int, segments: Array) -> bool:
        found = self._library.ckpt_check_pieces(_address(data), start, data.nbytes, _address(segments), len(segments))
        return int(found) == 0

    def describe_tensors(
        self, tensors: list[Any], getters: Array, strided: int, layout: Array, addresses: Array | None, room: Array
    ) -> int:
        to = None if addresses is None else _address(addresses)
        return int(self._describe(tensors, _address(getters), strided, _address(layout), to, _address(room), len(room)))

    def look(self, state: Any, arguments: Mapping[str, Any]) -> int:
        return int(self._look(ctypes.byref(_Look(**arguments)), state))


def _address(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    return int(array.__array_interface__["data"][0])
