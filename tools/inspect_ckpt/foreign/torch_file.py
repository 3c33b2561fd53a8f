"""Open a file of torch.save: mapped, not read, and loaded with ``weights_only=True``. Imports torch.

The elements of a tensor are then read from where the file has them, so that what was read takes no memory. Files in the
old format (before torch 1.6) have no such places; they are loaded as a whole.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from functools import partial
from typing import Any

import numpy as np
import torch

from ckpt.errors import CheckpointCorruptError
from ckpt.planning.boxes import Box

from ..opening import CannotReadError
from .raw import file_size, read_box, read_bytes
from .state import ForeignState, ReadBox, UnsafeError
from .torch_state import memory_reader, state_of
from .zip_tensors import check_archive

__all__ = ["looks_like_torch", "open_torch_file"]

_ZIP = b"PK\3\4"
_OLD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # the pickled number that every file in the old format begins with


def looks_like_torch(start: bytes) -> bool:
    """Whether a file that begins with `start` may be one."""
    return start.startswith((_ZIP, _OLD, b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"))


def open_torch_file(path: str, skip_unsafe: bool) -> ForeignState:
    """The state in the file. UnsafeError if loading it needs code, CheckpointCorruptError, CannotReadError."""
    notes: list[str] = []
    mapped = read_bytes(path, 0, min(4, file_size(path))) == _ZIP
    if not mapped:
        notes.append("the file is in torch's old format: all of it was loaded into memory")
    check_archive(path, file_size(path), path)
    nested = _load(path, mapped)
    if isinstance(nested, torch.Tensor) or not isinstance(nested, dict | list | tuple):
        raise CannotReadError(f"{path} holds a {type(nested).__name__}; only a dict or list of leaves can be a step")
    readers = _file_readers(path, nested) if mapped and _is_little_endian(path) else {}
    return state_of("torch.save", nested, readers, path, skip_unsafe, notes)


def _load(path: str, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise UnsafeError(
            f"{path} holds {_unsafe_names(path)}, which torch.load(weights_only=True) does not load: it may run any "
            "code, so nothing of it was loaded; save tensors, numbers and strings only, where you trust the file"
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # torch raises whatever a damaged archive leads to
        text = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointCorruptError(f"{path} cannot be loaded: {type(error).__name__}: {text}") from None


def _unsafe_names(path: str) -> str:
    """What the pickle names, found without loading it."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # an old format, or damaged as well
        names = []
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "something"


def _is_little_endian(path: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            orders = [name for name in archive.namelist() if name.endswith("/byteorder")]
            return all(archive.getinfo(name).file_size == 6 and archive.read(name) == b"little" for name in orders)
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError):
        return False


def _file_readers(path: str, nested: Any) -> dict[int, ReadBox]:
    """For each tensor that lies in C order in the mapped file, by id: a reader that reads the file itself.

    A mapped page that was looked at counts as memory of this process; one that was never looked at does not.
    """
    ranges = _mapped_ranges(path)
    readers: dict[int, ReadBox] = {}
    for tensor in _tensors(nested):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            continue
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            continue
        nbytes, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
        for low, high, offset in ranges:
            if low <= address and address + nbytes <= high and nbytes:
                reader = partial(read_box, path, offset + address - low, tuple(tensor.shape))
                if _agrees(tensor, reader):
                    readers[id(tensor)] = reader
    return readers


def _agrees(tensor: torch.Tensor, reader: ReadBox) -> bool:
    """Whether the first and the last elements in the file are those in memory; guards against a wrong mapping."""
    shape = tuple(tensor.shape)
    for last in (False, True):
        offset = tuple(size - 1 if last else 0 for size in shape)
        box = Box(offset, (1,) * len(shape))
        seen = [np.empty((*box.shape, tensor.element_size()), np.uint8) for _ in range(2)]
        reader(box, seen[0])
        memory_reader(tensor)(box, seen[1])
        if not np.array_equal(seen[0], seen[1]):
            return False
    return True


def _mapped_ranges(path: str) -> list[tuple[int, int, int]]:
    """Where in memory this process has mapped the file: first address, last (excluded), and place in the file."""
    inode = str(os.stat(path).st_ino)
    ranges = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            addresses, _, offset, _, number = line.split(maxsplit=5)[:5]
            if number == inode:
                low, high = (int(address, 16) for address in addresses.split("-"))
                ranges.append((low, high, int(offset, 16)))
    return ranges


def _tensors(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]
