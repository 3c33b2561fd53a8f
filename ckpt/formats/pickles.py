"""Pickles read without running code: a restricted unpickler, and tensors in archives of torch.save, without torch.

A pickle runs code by calling objects that it looks up by name. Here a name never leads to the object that it means, but
to a stand-in that only keeps its arguments. A name without a stand-in is refused when it is looked up, before anything
is called.

torch.save writes a zip archive that is not compressed: ``<name>/data.pkl`` says of which storage a tensor is a view,
and ``<name>/data/<key>`` holds the bytes of that storage. The archive may be in the middle of a file.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any, NoReturn

from ckpt.errors import CheckpointCorruptError
from ckpt.formats.foreign_files import read_bytes
from ckpt.formats.lazy_state import UnsafeError
from ckpt.storage.dtypes import names, stored

_MAX_PICKLE_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class _Immutable(type):
    """The metaclass of stand-ins. A pickle can set attributes of all that it looks up; here it cannot."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError(f"{cls.__name__} cannot be changed")


class StandIn(metaclass=_Immutable):
    """Stands in for a class. `fields` is the state that the pickle gives to an object of the class."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state


class Function(StandIn):
    """Stands in for a function or class that is called. The pickle can call it, but not change it."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a function cannot be changed")

    def __setstate__(self, state: Any) -> NoReturn:
        raise AttributeError("a function cannot be changed")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], persistent: Any, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._persistent = persistent
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise UnsafeError(
                f"{self._where} names {module}.{name}, which does not belong there: it was not loaded, and nothing of "
                "it was run"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to objects outside of the pickle")
        return self._persistent(pid)


def load(data: bytes, known: Mapping[tuple[str, str], Any], where: str, persistent: Any = None) -> Any:
    """Load the pickle `data` with the stand-ins `known`, by module and name.

    `persistent` resolves references to what is outside of the pickle; `where` is for messages. UnsafeError for any
    other name, before it is imported; CheckpointCorruptError if the pickle is damaged.
    """
    try:
        return _Unpickler(data, known, persistent, where).load()
    except UnsafeError:
        raise
    except MemoryError:
        raise CheckpointCorruptError(f"{where} is damaged: it describes more than fits into memory") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointCorruptError(f"{where} is damaged: {type(error).__name__}: {error}") from None


# -- tensors in archives -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorLocation:
    """The place of a tensor in a file: its elements lie in C order from `offset`."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def find_tensor(path: str, offset: int, length: int) -> TensorLocation | None:
    """Find the tensor in the archive of `length` bytes at `offset` of a file.

    None if it is not a single plain tensor, in C order and little-endian: then torch must load it, or report what is
    wrong with it. CheckpointCorruptError if the file is shorter.
    """
    try:
        with zipfile.ZipFile(_FileRange(path, offset, length)) as archive:
            return _find(archive, path, offset, length)
    except (UnsafeError, zipfile.BadZipFile, NotImplementedError, KeyError, ValueError, RuntimeError):
        return None


def check_archive(file: str | IO[bytes], archive_bytes: int, where: str) -> None:
    """CheckpointCorruptError if an archive could expand to more than its own size.

    torch.save compresses nothing, and stores nothing twice. A file that is not an archive is left to torch.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise CheckpointCorruptError(f"{where} is damaged: {record.filename!r:.80} in it is compressed")
    if sum(record.file_size for record in records) > archive_bytes:
        raise CheckpointCorruptError(f"{where} is damaged: its records together are larger than the archive")


def _find(archive: zipfile.ZipFile, path: str, offset: int, length: int) -> TensorLocation | None:
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
    if not isinstance(tensor, _Tensor) or tensor.view is None:
        return None
    dtype, shape, key, first = tensor.view
    record = archive.getinfo(f"{folder}/data/{key}")
    if record.compress_type != zipfile.ZIP_STORED:
        return None
    header = read_bytes(path, offset + record.header_offset, _LOCAL_HEADER.size)
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    nbytes = math.prod(shape) * stored(dtype).itemsize
    if magic != b"PK\3\4" or first + nbytes > record.file_size or start + record.file_size > length:
        raise zipfile.BadZipFile("the archive has fewer bytes than the tensor")
    return TensorLocation(dtype, shape, offset + start + first)


class _Storage:
    """A reference to bytes outside of the pickle: ("storage", type, key, device, elements)."""

    def __init__(self, reference: Any) -> None:
        kind, self.dtype, self.key, _, self.elements = reference
        if kind != "storage" or type(self.key) is not str or type(self.elements) is not int:
            raise ValueError("an unknown reference")


class _Tensor(StandIn):
    """Stands in for the functions that build tensors. `view`: dtype, shape, storage and first byte, if plain."""

    __slots__ = ("view",)

    def __init__(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> None:
        dtype, flags = storage.dtype, rest[2:]
        if dtype is None:  # an untyped storage: the dtype follows the hooks
            dtype, flags = rest[2], rest[3:]
        shape = tuple(shape)
        self.view: tuple[str, tuple[int, ...], str, int] | None = None
        numbers = (offset, *shape, *strides)
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("not the shape and strides of a tensor")
        if isinstance(dtype, str) and not any(flags) and _in_c_order(shape, tuple(strides)):
            self.view = dtype, shape, storage.key, offset * stored(dtype).itemsize

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a tensor has no state")


def _in_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(shape) != len(strides):
        raise ValueError("not the shape and strides of a tensor")
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


class _FileRange(io.RawIOBase):
    """A range of bytes of a file, as a file of its own."""

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
            raise ValueError("a position before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = read_bytes(self._path, self._offset + self._at, count)
        self._at += count
        return data
