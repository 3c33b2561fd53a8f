"""Files of torch.save, and states made of objects that torch has loaded. Imports torch.

A file is mapped, not read, and loaded with ``weights_only=True``. The elements of its tensors are then read from the
file: a mapped page that was read would count as memory of this process. Files in the format before torch 1.6 cannot be
mapped; they are loaded as a whole.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from ckpt.errors import CheckpointCorruptError, ConversionError, StateError
from ckpt.formats.foreign_files import file_size, read_box, read_bytes
from ckpt.formats.lazy_state import Bytes, FileTensor, LazyState, ReadBox, UnsafeError, check_dtype
from ckpt.formats.pickles import check_archive
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import flatten

_MAX_NESTING = 100  # of a state
_MAX_REPEATED = 1_000_000
_ZIP = b"PK\3\4"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def open_torch_file(path: str, skip_unsafe: bool) -> LazyState:
    """Open the state in a file. UnsafeError if loading it would run code, CheckpointCorruptError, ConversionError."""
    notes: list[str] = []
    _refuse_other_archive(path)
    mapped = read_bytes(path, 0, min(4, file_size(path))) == _ZIP
    if not mapped:
        notes.append("the file is in torch's old format: all of it was loaded into memory")
    check_archive(path, file_size(path), path)
    nested = _load_with_stand_ins(path, mapped)
    if isinstance(nested, torch.Tensor) or not isinstance(nested, dict | list | tuple):
        raise ConversionError(f"{path} holds a {type(nested).__name__}; only a dict or list of leaves can be a step")
    readers = _file_readers(path, nested) if mapped and _is_little_endian(path) else {}
    return state_of("torch.save", nested, readers, path, skip_unsafe, notes)


def load_object(data: bytes, where: str) -> Any:
    """Load what torch.save made these bytes of. UnsafeError if that would run code, CheckpointCorruptError."""
    check_archive(io.BytesIO(data), len(data), where)
    return _load(io.BytesIO(data), where)


def loads_without_code(value: Any) -> bool:
    """Whether `torch.load` with ``weights_only`` can load `value` again."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError):
        return False
    return True


def _load(file: str | BinaryIO, where: str, *, mapped: bool = False) -> Any:
    try:
        if not isinstance(file, str):
            return torch.load(file, map_location="cpu", weights_only=True)
        with open(file, "rb") as stream:  # by its descriptor: by a path, torch looks at the suffix
            return torch.load(f"/proc/self/fd/{stream.fileno()}", map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UnsafeError(f"needs {_refused_name(error)}, which weights_only does not load") from None
    except MemoryError:
        raise
    except Exception as error:  # torch raises whatever a damaged archive leads to
        text = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointCorruptError(f"{where} cannot be loaded: {type(error).__name__}: {text}") from None


def _refused_name(error: Exception) -> str:
    """Extract the name that torch refuses from its long message."""
    words = str(error).replace("\n", " ").split()
    if "GLOBAL" in words:
        after = words[words.index("GLOBAL") + 1 :]
        return after[0].strip("`'\",") if after else "something"
    return "something that it refuses"


def _check_nesting(path: str, nested: Any) -> None:
    """ConversionError for a state that a step cannot hold, although some bytes of a pickle are enough for it.

    A list can be in another one twice, and that in a third one: torch loads each once, but a step would have all.
    """
    seen: set[int] = set()
    repeated, stack = 0, [(nested, 0)]
    while stack:
        node, depth = stack.pop()
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
        repeated += len(children) if id(node) in seen else 0
        seen.add(id(node))
        if depth > _MAX_NESTING:
            raise ConversionError(f"{path} is nested deeper than {_MAX_NESTING}, more than any state of a step")
        if repeated > _MAX_REPEATED:
            raise ConversionError(f"{path} has the same lists or dicts in more than {_MAX_REPEATED:,} places")
        stack += [(child, depth + 1) for child in children]


def _refuse_other_archive(path: str) -> None:
    """ConversionError, naming it, for a zip archive that torch.save has not made."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return
    if "constants.pkl" in names:
        raise ConversionError(
            f"{path} is a TorchScript archive, which holds code, so nothing of it was loaded; if you trust it, load "
            "it with torch.jit.load, save its state_dict() with torch.save, and convert that"
        )
    if "data.pkl" not in names:
        raise ConversionError(f"{path} is a zip archive, but torch.save has not made it: it has no data.pkl")


# -- objects of classes that torch does not load -----------------------------------------------------------------------


class _NotLoaded:
    """Stands in for an object of the class `name` that torch refuses to load: takes what the pickle says of it.

    It does nothing with that but to note how the object is filled: torch fills only dicts and lists.
    """

    name = ""
    filled: type[Any] | None = None

    def __new__(cls, *arguments: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, item: object) -> None:
        type(self).filled = dict

    def append(self, item: object) -> None:
        type(self).filled = list


class _Probe(pickle.Unpickler):
    """Loads a pickle with a stand-in for everything that it names, to see how objects are filled."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.stand_ins: dict[str, type[_NotLoaded]] = {}

    def find_class(self, module: str, name: str) -> Any:
        name = f"{module}.{name}"
        return self.stand_ins.setdefault(name, type("_NotLoaded", (_NotLoaded,), {"name": name}))

    def persistent_load(self, pid: Any) -> Any:
        return None


def _load_with_stand_ins(path: str, mapped: bool) -> Any:
    """Load a file, with a `_NotLoaded` in place of each object of a class that torch refuses.

    UnsafeError if even so torch refuses the file, or if all of it is such an object.
    """
    try:
        nested = _load(path, path, mapped=mapped)
    except UnsafeError:
        names = _unsafe_names(path)
    else:
        _check_nesting(path, nested)
        return nested
    containers: dict[int, tuple[Any, _NotLoaded]] = {}
    with contextlib.suppress(UnsafeError), torch.serialization.safe_globals(_stand_ins(path, names, containers)):
        nested = _load(path, path, mapped=mapped)
        _check_nesting(path, nested)
        nested = _without(nested, containers)
        if not isinstance(nested, _NotLoaded):
            return nested
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "something"
    raise UnsafeError(
        f"{path} holds {shown}, which torch.load(weights_only=True) does not load: it may run any "
        "code, so nothing of it was loaded; if you trust the file, save only tensors, numbers and strings"
    )


def _stand_ins(path: str, names: list[str], containers: dict[int, tuple[Any, _NotLoaded]]) -> list[Any]:
    """Return the stand-ins that torch takes for these names. Dicts and lists made of them go to `containers`."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            probe = _Probe(archive.read(pickled))
        probe.load()
    except Exception:  # a damaged pickle can raise anything; torch says what is wrong
        return []

    def stand_in(name: str) -> Any:
        kind = probe.stand_ins.get(name, _NotLoaded)
        filled = kind.filled
        if filled is None:
            return kind

        def make(cls: type[Any], *arguments: object) -> Any:
            made = filled()
            containers[id(made)] = made, kind()
            return made

        return type("_Filled", (), {"__new__": make})

    return [(stand_in(name), name) for name in names]


def _without(node: Any, containers: Mapping[int, tuple[Any, _NotLoaded]]) -> Any:
    """Return `node` with a `_NotLoaded` in place of each of these containers."""
    if id(node) in containers:
        return containers[id(node)][1]
    if isinstance(node, dict):
        for key, item in node.items():
            node[key] = _without(item, containers)
    elif type(node) is list:
        node[:] = [_without(item, containers) for item in node]
    elif type(node) is tuple:
        return tuple(_without(item, containers) for item in node)
    return node


def _unsafe_names(path: str) -> list[str]:
    """Return the classes and functions that the pickle names and torch refuses, without loading it."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # an old format, or damaged as well
        return []


# -- tensors in the mapped file ----------------------------------------------------------------------------------------


def _is_little_endian(path: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            orders = [name for name in archive.namelist() if name.endswith("/byteorder")]
            return all(archive.getinfo(name).file_size == 6 and archive.read(name) == b"little" for name in orders)
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError):
        return False


def _file_readers(path: str, nested: Any) -> dict[int, ReadBox]:
    """Return readers of the file, by id of the tensor, for all tensors that lie in C order in the mapped file."""
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
    """Whether the first and the last element in the file are those in memory; a guard against a wrong mapping."""
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
    """Return where in memory the file is mapped: first address, last address (excluded), and offset in the file."""
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


# -- states of loaded objects ------------------------------------------------------------------------------------------


def state_of(
    kind: str, nested: Any, readers: Mapping[int, ReadBox], where: str, skip_unsafe: bool, notes: list[str]
) -> LazyState:
    """Return the leaves of `nested`. `readers` read tensors by their id; other tensors are read from memory.

    The library's own `flatten` names the leaves, so that a converted step has the names that a save of the same state
    has. ConversionError for a leaf that a step cannot hold, unless `skip_unsafe`.
    """
    dropped: list[tuple[Path, str]] = []
    nested = _storable((), nested, dropped)
    if dropped:
        shown = "; ".join(f"{display(path)}: {why}" for path, why in dropped[:3])
        more = f"; and {len(dropped) - 3} more" if len(dropped) > 3 else ""
        if not skip_unsafe:
            raise ConversionError(f"{where}: {shown}{more}; --skip-unsafe leaves such leaves out")
        notes.append(f"left out, because a checkpoint cannot hold it: {shown}{more}")
    try:
        flat = flatten(nested)
    except StateError as error:
        raise ConversionError(f"{where}: {error}") from None
    tensors = {}
    for path, leaf in flat.tensors.items():
        check_dtype(leaf.spec.dtype, path, where)
        reader = readers.get(id(_leaf_of(nested, path))) or memory_reader(leaf.local)
        tensors[path] = FileTensor(leaf.spec.dtype, leaf.spec.shape, reader)
    values = {path: leaf.value for path, leaf in flat.values.items()}
    containers = {path: container for path, (container, _) in flat.containers.items()}
    return LazyState(kind, tensors, values, dict(flat.aliases), containers, notes)


def placeholder(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of any size that takes no memory: it stands in a nested state for one that is read later."""
    return torch.empty((1,) * len(shape), dtype=getattr(torch, dtype)).expand(shape)


def memory_reader(tensor: torch.Tensor) -> ReadBox:
    """Return a reader of a tensor in memory (or of a mapped file). It copies bits, whatever the dtype."""

    def read(box: Box, out: Bytes) -> None:
        part = tensor.detach()[tuple(box.slices((0,) * len(box.shape)))]
        if part.is_conj() or part.is_neg():
            part = part.resolve_conj().resolve_neg()
        if out.shape[-1] in _INTEGERS:
            part = part.view(_INTEGERS[out.shape[-1]])  # numpy does not know all dtypes
        elements = np.ascontiguousarray(part.numpy())
        out[...] = elements.reshape(-1).view(np.uint8).reshape(out.shape)

    return read


def _leaf_of(nested: Any, path: Path) -> Any:
    """Return the object at `path`."""
    for key in path:
        nested = nested[key]
    return nested


def _storable(path: Path, node: Any, dropped: list[tuple[Path, str]]) -> Any:
    """Return `node` without the leaves that a step cannot hold; in a list, None replaces one."""
    if isinstance(node, Mapping):
        kept: dict[Any, Any] = OrderedDict() if type(node) is OrderedDict else {}
        for key, item in node.items():
            if type(key) in (str, int):
                before = len(dropped)
                result = _storable((*path, key), item, dropped)
                if len(dropped) == before or result is not None:
                    kept[key] = result
            else:
                dropped.append((path, f"the key {key!r} is neither a string nor a whole number"))
        return kept
    if isinstance(node, list | tuple):
        items = [_storable((*path, number), item, dropped) for number, item in enumerate(node)]
        return items if isinstance(node, list) else tuple(items)
    if isinstance(node, _NotLoaded):
        dropped.append((path, f"an object of {node.name}, which torch.load(weights_only=True) does not load"))
        return None
    try:
        flatten({"leaf": node})
    except StateError as error:
        dropped.append((path, str(error).removeprefix("leaf: ")))
        return None
    except Exception as error:  # a subclass of Tensor may need what does not exist here, such as a process group
        dropped.append((path, f"{type(node).__name__}: {error}"))
        return None
    return node
