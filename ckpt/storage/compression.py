"""Compressed chunks: frames of Blosc, one for each inner chunk.

Blosc (https://www.blosc.org, format 1) puts the bytes of the elements into another order, the first bytes of all, then
the second ones, and compresses that. Floating-point numbers become a good deal smaller so: their exponents resemble
each other. The codec ``blosc`` of Zarr v3 is known to all its readers. One block for all of a frame lets the
compressor see all of it; the blocks that Blosc itself would choose are smaller, and take more time and space.

`fast_zstd` makes the frames of the default, zstd at level 1 with bytes shuffled, where it can; `numcodecs`, which has
the library, makes the others, and reads all. It starts no thread for a frame of one block, so any process and any
thread may use it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

from ckpt.arguments import check_choice, whole_number
from ckpt.errors import FormatVersionError
from ckpt.storage.fast_zstd import FastZstd
from ckpt.storage.regular_files import DamagedFileError

FRAME_BYTES = 1 << 20
"""The bytes of elements in a frame, at least, where there are as many. Small frames are larger together, and slower."""

MAX_FRAME_BYTES = 1 << 29
"""The most bytes of elements in one frame: Blosc takes a third of 2 GiB in a block."""

Array = np.ndarray[Any, np.dtype[Any]]

_HEAD_BYTES = 16
_VERSION = 2
_SHUFFLES = ("none", "byte", "bit")  # as Blosc numbers them
_ZARR_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")


@dataclass(frozen=True, slots=True)
class Compression:
    """How chunks are compressed: ``Staging(compression=Compression("zstd", level=1, shuffle="byte"))``.

    codec: "zstd", which makes files smallest, or "lz4", which takes less time
    level: from 1, the fastest, to 9. Trained numbers do not become smaller than with 1
    shuffle: what is put together before that: "byte", the bytes of the elements that have the same place in them;
        "bit", their bits; or "none". None: "byte" with zstd, "bit" with lz4

    Any program that reads Zarr v3 reads the result. docs/guide.md says when it pays. TypeError or ValueError for an
    option that is invalid.
    """

    codec: Literal["zstd", "lz4"] = "zstd"
    _: KW_ONLY
    level: int = 1
    shuffle: Literal["byte", "bit", "none"] | None = None

    def __post_init__(self) -> None:
        check_choice("Compression: codec", self.codec, ("zstd", "lz4"))
        whole_number("Compression: level", self.level)
        if self.level > 9:
            raise ValueError(f"Compression: level must be at most 9, not {self.level}")
        if self.shuffle is None:
            object.__setattr__(self, "shuffle", "byte" if self.codec == "zstd" else "bit")
        check_choice("Compression: shuffle", self.shuffle, _SHUFFLES)

    @classmethod
    def of(cls, given: Any) -> Compression | None:
        """Return the option `compression` of `Staging`: a text stands for `codec`."""
        if given is None or isinstance(given, cls):
            return given
        check_choice("Staging: compression", given, (None, "zstd", "lz4"))
        return cls(given)

    @classmethod
    def from_document(cls, document: Any) -> Compression:
        """Return the compression of a document. One of `ILL_FORMED` for any that `to_document` does not make.

        FormatVersionError for what was compressed before there were frames of Blosc: that is no damage.
        """
        if document == "zstd":
            raise FormatVersionError(
                "its chunks are compressed as by a version of ckpt from before the release 0.2.0: restore it with that "
                "version, and save it with this one"
            )
        made = cls(document["codec"], level=document["level"], shuffle=document["shuffle"])
        if made.to_document() != document:
            raise ValueError(f"{document!r:.80} is no compression")
        return made

    def to_document(self) -> dict[str, Any]:
        """Return its form in the index."""
        return {"codec": self.codec, "level": self.level, "shuffle": self.shuffle}

    def zarr_codec(self, itemsize: int, nbytes: int) -> dict[str, Any]:
        """Return the codec of Zarr for frames of `nbytes` bytes."""
        assert self.shuffle is not None
        configuration = {
            "cname": self.codec,
            "clevel": self.level,
            "shuffle": _ZARR_SHUFFLES[_SHUFFLES.index(self.shuffle)],
            "typesize": itemsize,
            "blocksize": nbytes,
        }
        return {"name": "blosc", "configuration": configuration}


class Compressor:
    """Makes frames. For one thread at a time."""

    def __init__(self, how: Compression) -> None:
        from numcodecs import blosc  # here: only a save with compression needs it

        assert how.shuffle is not None
        self._make_frame = blosc.compress
        self._how = how.codec.encode(), how.level, _SHUFFLES.index(how.shuffle)
        self._fast = FastZstd.load() if how == Compression("zstd", level=1, shuffle="byte") else None

    @staticmethod
    def room(nbytes: int) -> int:
        """Return the most bytes that a frame of so many bytes has."""
        return _HEAD_BYTES + nbytes

    def compress(self, content: memoryview, itemsize: int, frame: memoryview) -> int:
        """Write the frame of a content of whole elements, of at most `MAX_FRAME_BYTES`; return its size."""
        size = None if self._fast is None else self._fast.compress(content, itemsize, frame)
        if size is None:
            elements = np.frombuffer(content, np.dtype((np.void, itemsize)))
            made: bytes = self._make_frame(elements, *self._how, len(content))
            size = len(made)
            frame[:size] = made
        return size


def decompressed(frame: bytes | memoryview, nbytes: int) -> Array:
    """Return the content of a frame as bytes. DamagedFileError unless it is one frame, and these are `nbytes` bytes."""
    content: Array = np.empty(nbytes, np.uint8)
    decompress(frame, content)
    return content


def decompress(frame: bytes | memoryview, content: Array) -> None:
    """Fill `content`, an array of bytes, with that of a frame. DamagedFileError unless it is one frame of that size."""
    from numcodecs import blosc

    head = bytes(frame[:_HEAD_BYTES])
    if len(head) < _HEAD_BYTES or head[0] != _VERSION:
        raise DamagedFileError("cannot be decompressed: it has no frame of Blosc")
    if int.from_bytes(head[4:8], "little") != content.nbytes:
        raise DamagedFileError(f"cannot be decompressed: its frame does not hold {content.nbytes} bytes")
    if int.from_bytes(head[12:16], "little") != len(frame):
        raise DamagedFileError("cannot be decompressed: its frame does not end where the chunk does")
    try:
        blosc.decompress(frame, content)
    except (RuntimeError, ValueError) as error:
        raise DamagedFileError(f"cannot be decompressed: {error}") from error
