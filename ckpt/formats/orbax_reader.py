"""Read Orbax checkpoints: the tree of jax arrays, numbers and strings becomes a state of tensors and values."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any

import numpy as np

from ckpt.errors import ConversionError
from ckpt.formats.lazy_state import FileTensor, LazyState, ReadBox
from ckpt.formats.nesting import nested_state
from ckpt.formats.orbax_metadata import MANIFEST, OrbaxLeaf, OrbaxTree, item_directory, read_strings, read_tree
from ckpt.formats.tensorstore_arrays import ArrayDatabase, ArrayPlace
from ckpt.formats.zarr_tree import check_files
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box

__all__ = ["open_orbax"]

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
