"""Where in a file the elements of a tensor are that torch.save wrote there, found without torch.

torch.save makes a zip archive that is not compressed: ``<name>/data.pkl`` says of which storage the tensor is a view,
``<name>/data/<key>`` are the bytes of that storage. The archive may be in the middle of a file.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.dtypes import names, stored

from .raw import read_bytes
from .restricted import Function, StandIn, UnknownNameError, load

__all__ = ["TensorPlace", "check_archive", "find_tensor"]

_MAX_PICKLE_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class TensorPlace:
    """The tensor's first byte in the file; the elements follow in C order."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def find_tensor(path: str, offset: int, length: int) -> TensorPlace | None:
    """Look into the archive of `length` bytes at `offset` of a file.

    None if it is not one plain tensor in C order and little-endian: then torch has to load it, or to say what is wrong
    with it. CheckpointCorruptError if the file ends before.
    """
    try:
        with zipfile.ZipFile(_Part(path, offset, length)) as archive:
            return _find(archive, path, offset, length)
    except (UnknownNameError, zipfile.BadZipFile, NotImplementedError, KeyError, ValueError, RuntimeError):
        return None


def check_archive(file: str | IO[bytes], archive_bytes: int, where: str) -> None:
    """CheckpointCorruptError if more comes out of an archive than is in it: torch.save compresses nothing, and stores
    nothing twice. What is no archive is left to torch."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise CheckpointCorruptError(f"{where} is damaged: {record.filename!r:.80} in it is compressed")
    if sum(record.file_size for record in records) > archive_bytes:
        raise CheckpointCorruptError(f"{where} is damaged: its records are larger together than all of it")


def _find(archive: zipfile.ZipFile, path: str, offset: int, length: int) -> TensorPlace | None:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise zipfile.BadZipFile("the archive has no data.pkl")
    folder = pickles[0].removesuffix("/data.pkl")
    if archive.getinfo(pickles[0]).file_size > _MAX_PICKLE_BYTES:
        return None
    order = f"{folder}/byteorder"
    if order in archive.namelist() and (archive.getinfo(order).file_size != 6 or archive.read(order) != b"little"):
        return None
    tensor = load(archive.read(pickles[0]), _KNOWN, f"{path} at byte {offset}", _Storage)
    if not isinstance(tensor, _Tensor) or tensor.place is None:
        return None
    dtype, shape, key, first = tensor.place
    record = archive.getinfo(f"{folder}/data/{key}")
    if record.compress_type != zipfile.ZIP_STORED:
        return None
    header = read_bytes(path, offset + record.header_offset, _LOCAL_HEADER.size)
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    nbytes = math.prod(shape) * stored(dtype).itemsize
    if magic != b"PK\3\4" or first + nbytes > record.file_size or start + record.file_size > length:
        raise zipfile.BadZipFile("the archive has less bytes than the tensor")
    return TensorPlace(dtype, shape, offset + start + first)


class _Storage:
    """What a pickle refers to as bytes outside of it: ("storage", type, key, device, elements)."""

    def __init__(self, reference: Any) -> None:
        kind, self.dtype, self.key, _, self.elements = reference
        if kind != "storage" or type(self.key) is not str or type(self.elements) is not int:
            raise ValueError("an unknown reference")


class _Tensor(StandIn):
    """Stands in for the two functions that make tensors. `place`: dtype, shape, storage and first byte, if plain."""

    __slots__ = ("place",)

    def __init__(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> None:
        dtype, flags = storage.dtype, rest[2:]
        if dtype is None:  # a storage without a type: the dtype comes after the hooks
            dtype, flags = rest[2], rest[3:]
        shape = tuple(shape)
        self.place: tuple[str, tuple[int, ...], str, int] | None = None
        numbers = (offset, *shape, *strides)
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("not the shape of a tensor")
        if isinstance(dtype, str) and not any(flags) and _in_c_order(shape, tuple(strides)):
            self.place = dtype, shape, storage.key, offset * stored(dtype).itemsize

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a tensor has no state")


def _in_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(shape) != len(strides):
        raise ValueError("not the shape of a tensor")
    expected = 1
    for size, stride in reversed(list(zip(shape, strides, strict=True))):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


_STORAGES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool"}
_STORAGES |= {"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"}
_STORAGES |= {"ComplexFloat": "complex64", "ComplexDouble": "complex128"}

_KNOWN = MappingProxyType(
    {("torch", f"{kind}Storage"): dtype for kind, dtype in _STORAGES.items()}
    | {("torch", name): name for name in names()}
    | {
        ("torch.storage", "UntypedStorage"): None,
        ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _Tensor,
        ("collections", "OrderedDict"): Function(OrderedDict),
    }
)


class _Part(io.RawIOBase):
    """A part of a file as if it were a file of its own."""

    def __init__(self, path: str, offset: int, length: int) -> None:
        self._path = path
        self._offset = offset
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = read_bytes(self._path, self._offset + self._at, count)
        self._at += count
        return data
