"""Read directories and OCDBT databases of Zarr arrays (v2 and v3): those of Orbax, and those without a format.

Each array of the others has the name that its path in the hierarchy gives. Attributes and consolidated metadata are not
read.

Orbax checkpoints have documents of their own (`orbax_metadata`): their tree of jax arrays, numbers and strings becomes
a state of tensors and values.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError, ConversionError
from ckpt.formats.foreign_files import check_link, file_size, read_bytes
from ckpt.formats.lazy_state import FileTensor, LazyState, ReadBox, nested_state
from ckpt.formats.orbax_metadata import MANIFEST, OrbaxLeaf, OrbaxTree, item_directory, read_strings, read_tree
from ckpt.formats.tensorstore_arrays import ArrayDatabase, ArrayPlace
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box

_V2, _V3 = ".zarray", "zarr.json"
ARRAY_DOCUMENTS = (_V3, _V2)
_MAX_DEPTH = 100
_MAX_DOCUMENT_BYTES = 64 << 20


def open_zarr(path: str, follow_links: bool) -> LazyState:
    """Open the arrays below a directory. CheckpointCorruptError, ConversionError."""
    keys = []
    for folder, names in _walk(path, follow_links):
        if _V3 in names and _is_array(os.path.join(path, folder, _V3)):
            keys.append(f"{folder}/{_V3}")
        elif _V2 in names:
            keys.append(f"{folder}/{_V2}")
    notes: list[str] = []
    return _state("Zarr", path, keys, ArrayDatabase(path, ocdbt=False, notes=notes), notes)


def open_ocdbt(path: str, follow_links: bool) -> LazyState:
    """Open the arrays in an OCDBT database. CheckpointCorruptError, ConversionError."""
    check_files(path, follow_links)
    notes: list[str] = []
    database = ArrayDatabase(path, ocdbt=True, notes=notes)
    keys = database.keys()
    groups = {key.removesuffix(_V3) for key in keys if key.endswith(_V3)}
    groups = {group for group in groups if not _holds_array(database.read(f"{group}{_V3}"), f"{path}: {group}{_V3}")}
    documents = [
        key for key in keys if key.rpartition("/")[2] in ARRAY_DOCUMENTS and key.removesuffix(_V3) not in groups
    ]
    return _state("OCDBT", path, [f"/{key}" for key in documents], database, notes)


def check_files(path: str, follow_links: bool) -> None:
    """ConversionError if there is anything but regular files below a directory, or a link out of it.

    Such links are allowed with `follow_links`.
    """
    for _ in _walk(path, follow_links):
        pass


def _walk(path: str, follow_links: bool) -> Iterator[tuple[str, set[str]]]:
    """Yield the directories below `path`, relative to it, each with the names of its files. Checks as `check_files`."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        files = set()
        with os.scandir(os.path.join(path, folder)) as entries:
            for entry in entries:
                if entry.is_symlink():
                    check_link(entry.path, path, follow_links)
                if not entry.is_dir():
                    _check_regular(entry)
                    files.add(entry.name)
                elif not (entry.is_symlink() and _is_around(entry.path, os.path.join(path, folder))):
                    waiting.append(os.path.join(folder, entry.name))
        yield folder, files


def _is_around(link: str, folder: str) -> bool:
    """Whether a link in a folder leads to that folder, or to one that it is in: there is no end to what is below."""
    real, here = os.path.realpath(link), os.path.realpath(folder)
    return os.path.commonpath([real, here]) == real


def _check_regular(entry: os.DirEntry[str]) -> None:
    try:
        mode = entry.stat().st_mode
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{entry.path} leads to a file that is missing") from None
    if not stat.S_ISREG(mode):
        raise ConversionError(f"{entry.path} is not a regular file")


def _is_array(document: str) -> bool:
    size = file_size(document)
    if size > _MAX_DOCUMENT_BYTES:
        raise CheckpointCorruptError(f"{document} is larger than the metadata of any array")
    return _holds_array(read_bytes(document, 0, size), document)


def _holds_array(data: bytes, where: str) -> bool:
    """Whether a zarr.json describes an array, not a group. CheckpointCorruptError if it is neither."""
    try:
        kind = json.loads(data)["node_type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        kind = None
    if kind not in ("array", "group"):
        raise CheckpointCorruptError(f"{where} is damaged: it describes neither an array nor a group")
    return bool(kind == "array")


def _state(kind: str, path: str, documents: Iterable[str], database: ArrayDatabase, notes: list[str]) -> LazyState:
    """Return the state with the arrays whose documents have these keys, each after a slash."""
    from ckpt.formats.torch_file import placeholder, state_of

    places: dict[str, ArrayPlace] = {}
    for key, _, name in sorted(document.rpartition("/") for document in documents):
        key = key.removeprefix("/")
        places.setdefault(key, ArrayPlace(key or "the array", key, "zarr" if name == _V2 else "zarr3"))
    if not places:
        raise ConversionError(f"{path} holds no array of Zarr")
    if "" in places:
        raise ConversionError(f"{path} is a single array, without a name; give the directory that contains it")
    leaves: dict[Path, Any] = {}
    readers: dict[int, ReadBox] = {}
    for key, tensor in zip(places, database.tensors(places.values()), strict=True):
        if key.count("/") >= _MAX_DEPTH:
            raise ConversionError(f"{path}: {key:.80}... is nested deeper than any state of a step")
        leaf = leaves[tuple(key.split("/"))] = placeholder(tensor.dtype, tensor.shape)
        readers[id(leaf)] = tensor.read
    return state_of(kind, nested_state(leaves, path, numbers=False), readers, path, False, notes)


# -- Orbax -------------------------------------------------------------------------------------------------------------

_ARRAYS = ("jax.Array", "np.ndarray")
_EMPTY = MappingProxyType[str, Any]({"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()})
"""The names of types that Orbax writes for leaves without content, with that content."""


def open_orbax(path: str, follow_links: bool) -> LazyState:
    """Open the only tree in a checkpoint, a step or a root of Orbax. CheckpointCorruptError, ConversionError.

    Tuples are lists and named tuples are dicts, as Orbax itself restores them without a target.
    """
    from ckpt.formats.torch_file import placeholder, state_of

    item, notes = item_directory(path, follow_links)
    check_files(item, follow_links)
    tree = read_tree(item, follow_links)
    database = ArrayDatabase(item, ocdbt=os.path.lexists(os.path.join(item, MANIFEST)), notes=notes)
    tensors = _open_arrays(item, tree, database)
    leaves: dict[Path, Any] = dict(
        read_strings(item, follow_links, [x for x in tree.leaves if x.value_type == "string"])
    )
    readers: dict[int, ReadBox] = {}
    for leaf in tree.leaves:
        if leaf.value_type in _EMPTY:
            leaves[leaf.keys] = _EMPTY[leaf.value_type]
        elif leaf.value_type == "scalar":
            leaves[leaf.keys] = _number(item, leaf, tensors[leaf.keys])
        elif leaf.value_type in _ARRAYS:
            tensor = tensors[leaf.keys]
            leaves[leaf.keys] = placeholder(tensor.dtype, tensor.shape)
            readers[id(leaves[leaf.keys])] = tensor.read
    if () in leaves:
        raise ConversionError(f"{item} holds a single leaf without a name; only a dict or list of leaves can be a step")
    # In the order of the metadata: the keys of a loaded state are in the order of its leaves.
    ordered = {leaf.keys: leaves[leaf.keys] for leaf in tree.leaves}
    return state_of("Orbax", nested_state(ordered, item, numbers=False), readers, item, False, notes)


def _open_arrays(item: str, tree: OrbaxTree, database: ArrayDatabase) -> dict[Path, FileTensor]:
    stored = []
    for leaf in tree.leaves:
        if leaf.value_type in (*_ARRAYS, "scalar"):
            stored.append(leaf)
        elif leaf.value_type != "string" and leaf.value_type not in _EMPTY:
            raise ConversionError(
                f"{item}: {display(leaf.keys)} is of the type {leaf.value_type!r}, which a handler of the program that "
                "wrote it reads; restore it there, and save only arrays, numbers and strings"
            )
    places = [
        ArrayPlace(
            display(leaf.keys),
            leaf.name,
            "zarr3" if tree.zarr3 else "zarr",
            may_be_absent=not tree.stores_all,
            zero_unless_given=True,
        )
        for leaf in stored
    ]
    return {leaf.keys: tensor for leaf, tensor in zip(stored, database.tensors(places), strict=True)}


def _number(item: str, leaf: OrbaxLeaf, tensor: FileTensor) -> Any:
    if tensor.shape:
        raise ConversionError(
            f"{item}: {display(leaf.keys)} is described as a number, but has the shape {tensor.shape}"
        )
    data = np.empty((tensor.itemsize,), np.uint8)
    tensor.read(Box((), ()), data)
    return data.view(np.dtype(tensor.dtype))[0].item()
