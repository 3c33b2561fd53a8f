"""Frames of Blosc with numbers, made by zstd with parameters that Blosc does not offer: faster, and a little smaller.

The bytes of trained numbers hardly repeat: all of the gain is that some values of their first byte are more frequent
than others. So the first bytes of all numbers are compressed by themselves, then the second ones, and so on. The short
matches that zstd finds at its fastest level take longer than all the rest, and more space than codes for the bytes in
them: with a table of only 64 places and matches of 7 bytes it skips what does not repeat, and still finds what does,
such as zeros.

`numcodecs` comes with the library; ctypes calls its functions.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from ckpt.native import blosc_frame

Array = np.ndarray[Any, np.dtype[Any]]

_ITEMSIZES = (2, 4, 8)  # single bytes are not shuffled, and may be text
_PARAMETERS = {100: 1, 102: 6, 105: 7}  # the level, the logarithm of the size of the table, the shortest match


class FastZstd:
    """A context of zstd. For one thread at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError or ValueError if the library has no zstd of the version 1.4 or newer."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        create, set_one, free = library.ZSTD_createCCtx, library.ZSTD_CCtx_setParameter, library.ZSTD_freeCCtx
        create.restype = pointer
        free.argtypes = [pointer]
        set_one.restype, set_one.argtypes = size, [pointer, ctypes.c_int, ctypes.c_int]
        compress = ctypes.cast(library.ZSTD_compress2, pointer).value
        context = create()
        if compress is None or context is None:
            raise MemoryError("there is no memory for a context of zstd")
        weakref.finalize(self, free, context)
        for parameter, value in _PARAMETERS.items():
            if set_one(context, parameter, value) > value:  # the codes of errors are huge
                raise ValueError(f"zstd does not know its parameter {parameter}")
        self._compress, self._context = compress, context
        self._scratch: Array = np.empty(0, np.uint8)

    @classmethod
    def load(cls) -> FastZstd | None:
        """Return a new context; None where the library does not export what this needs."""
        from numcodecs import zstd

        try:
            return cls(ctypes.CDLL(zstd.__file__))
        except (AttributeError, OSError, ValueError):
            return None

    def compress(self, content: memoryview, itemsize: int, frame: memoryview) -> int | None:
        """Write the frame of a content, and return its size.

        None for elements of other than 2, 4 or 8 bytes, and without the compiled part of this package.
        """
        if itemsize not in _ITEMSIZES:
            return None
        if len(self._scratch) < len(content):
            self._scratch = np.empty(len(content), np.uint8)
        elements, into = np.frombuffer(content, np.uint8), np.frombuffer(frame, np.uint8)
        return blosc_frame(self._compress, self._context, elements, itemsize, self._scratch, into)
