"""The documents of an Orbax checkpoint, and which directory in it holds the tree. Read without Orbax and without jax.

    root/                         of a CheckpointManager
      12/                         a step
        _CHECKPOINT_METADATA      JSON: when the save began, and when it was committed
        commit_success.txt        written last
        default/                  an item; a checkpoint that was saved alone is step and item in one
          _METADATA               JSON: the keys and the type of each leaf
          _strings.json           the leaves that are strings
          manifest.ocdbt, d/, ocdbt.process_0/    the arrays; without OCDBT there is a directory for each

A save has ".orbax-checkpoint-tmp" in its name until it is committed; on buckets it has its name from the beginning.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from ckpt.errors import CheckpointCorruptError, ConversionError
from ckpt.formats.foreign_files import check_link, file_in, file_size, read_bytes
from ckpt.paths import Path
from ckpt.storage.documents import well_formed

MANIFEST = "manifest.ocdbt"
_TREE = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
_STRINGS = "_strings.json"
_COMMITTED = "commit_success.txt"
_UNFINISHED = ".orbax-checkpoint-tmp"
_STEP_NAME = re.compile(r"(.+_)?\d+")
_PER_PROCESS = "ocdbt.process_"
_MAX_JSON_BYTES = 1 << 30
_MAX_KEYS = 100
_SEQUENCE, _MAPPING = 1, 2  # types of keys
_SHOWN = 8


@dataclass(frozen=True)
class OrbaxLeaf:
    """A leaf of a tree: the keys that lead to it, the name of its array or string, and Orbax's name of its type."""

    keys: Path
    name: str
    value_type: str


@dataclass(frozen=True)
class OrbaxTree:
    """The leaves of a tree. `stores_all`: a chunk that is not stored was lost; older versions omit chunks of zeros."""

    leaves: tuple[OrbaxLeaf, ...]
    zarr3: bool
    stores_all: bool


def is_orbax(path: str) -> bool:
    """Whether a directory is an Orbax checkpoint, finished or not, or holds some as steps. OSError."""
    if _UNFINISHED in os.path.basename(os.path.abspath(path)) or _has_documents(path):
        return True
    names = os.listdir(path)
    if any(name.startswith(_PER_PROCESS) for name in names) and MANIFEST not in names:
        return True
    return any(_is_step(os.path.join(path, name)) for name in names)


def item_directory(path: str, follow_links: bool) -> tuple[str, list[str]]:
    """Return the directory with the tree of a checkpoint, and notes for the user.

    `path` is an item, or a step or a root with only one. ConversionError if there are several or none, or if Orbax has
    not committed the save.
    """
    _refuse_unfinished(path, follow_links)
    if os.path.lexists(os.path.join(path, _TREE)):
        return path, []
    steps = [name for name in _directories(path) if _is_step(os.path.join(path, name))]
    if steps and not os.path.lexists(os.path.join(path, _STEP)):
        steps.sort(key=lambda name: (len(name), name))
        step = os.path.join(path, _only(path, steps, "steps"))
        check_link(step, path, follow_links)
        return item_directory(step, follow_links)
    items = [name for name in _directories(path) if os.path.lexists(os.path.join(path, name, _TREE))]
    if not items:
        if any(name.startswith(_PER_PROCESS) for name in os.listdir(path)):
            raise ConversionError(
                f"{path} has the parts that processes of Orbax wrote, but they were not merged: the save was not "
                "finished; give another step"
            )
        held = ", ".join(_directories(path)[:_SHOWN]) or "nothing"
        raise ConversionError(f"{path} is of Orbax, but has no item that is a tree of arrays; it has: {held}")
    item = os.path.join(path, _only(path, items, "items"))
    check_link(item, path, follow_links)
    _refuse_unfinished(item, follow_links)
    left = [name for name in _directories(path) if name not in items]
    return item, [f"left out, because they are no trees of arrays: {', '.join(left)}"] if left else []


def read_tree(item: str, follow_links: bool) -> OrbaxTree:
    """Read the leaves of a tree. CheckpointCorruptError, ConversionError."""
    where = os.path.join(item, _TREE)
    document = _json(item, _TREE, follow_links)
    with well_formed(where):
        entries = document["tree_metadata"]
        leaves = tuple(_leaf(entry) for entry in entries.values())
        zarr3, stores_all = (
            document.get("use_zarr3", False),
            document.get("store_array_data_equal_to_fill_value", False),
        )
        if type(zarr3) is not bool or type(stores_all) is not bool:
            raise ValueError("use_zarr3 is neither true nor false")
    by_name: dict[str, OrbaxLeaf] = {}
    for leaf in leaves:
        other = by_name.setdefault(leaf.name, leaf)
        if other is not leaf:
            raise ConversionError(
                f"{item}: the leaves {list(other.keys)} and {list(leaf.keys)} have the same array {leaf.name!r}: Orbax "
                "joins keys by dots, and wrote one over the other"
            )
    return OrbaxTree(leaves, zarr3, stores_all)


def read_strings(item: str, follow_links: bool, leaves: list[OrbaxLeaf]) -> dict[Path, str]:
    """Read the leaves that are strings. CheckpointCorruptError, ConversionError."""
    if not leaves:
        return {}
    document = _json(item, _STRINGS, follow_links)
    found = {}
    for leaf in leaves:
        node: Any = document
        for part in leaf.name.split("/"):  # the name is a JSON pointer
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        if not isinstance(node, str):
            raise CheckpointCorruptError(f"{os.path.join(item, _STRINGS)} does not have the string {leaf.name!r}")
        found[leaf.keys] = node
    return found


def _leaf(entry: Any) -> OrbaxLeaf:
    keys: list[str | int] = []
    for key in entry["key_metadata"]:
        name, kind = key["key"], key["key_type"]
        if type(name) is not str or kind not in (_SEQUENCE, _MAPPING):
            raise ValueError(f"{key!r:.80} is not a key")
        keys.append(int(name) if kind == _SEQUENCE else name)
    value_type = entry["value_metadata"]["value_type"]
    if type(value_type) is not str or len(keys) > _MAX_KEYS:
        raise ValueError(f"{entry!r:.80} is not a leaf")
    return OrbaxLeaf(tuple(keys), ".".join(map(str, keys)), value_type)


def _has_documents(path: str) -> bool:
    return any(os.path.lexists(os.path.join(path, name)) for name in (_TREE, _STEP))


def _is_step(path: str) -> bool:
    """Whether there is a step, committed or not, as a CheckpointManager names them. Older ones have no document."""
    name = os.path.basename(path)
    if _UNFINISHED in name or _STEP_NAME.fullmatch(name) is None or not os.path.isdir(path):
        return False
    return _has_documents(path) or any(os.path.lexists(os.path.join(path, item, _TREE)) for item in os.listdir(path))


def _directories(path: str) -> list[str]:
    """Return the names of the directories in `path`, without those of unfinished saves."""
    return sorted(
        name for name in os.listdir(path) if _UNFINISHED not in name and os.path.isdir(os.path.join(path, name))
    )


def _only(path: str, names: list[str], what: str) -> str:
    if len(names) == 1:
        return names[0]
    shown = ", ".join(names[-_SHOWN:])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise ConversionError(
        f"{path} has several {what} of Orbax: {shown}{more}; give one of them: {os.path.join(path, names[-1])}"
    )


def _refuse_unfinished(path: str, follow_links: bool) -> None:
    """ConversionError if Orbax has not committed the save that `path` is or is in."""
    absolute = os.path.abspath(path)
    if _UNFINISHED in absolute:
        _unfinished(path, f'it has "{_UNFINISHED}" in its name')
    if os.path.lexists(os.path.join(path, _COMMITTED)):
        return
    for step in (absolute, os.path.dirname(absolute)):
        if not os.path.lexists(os.path.join(step, _STEP)):
            continue
        if os.path.lexists(os.path.join(step, _COMMITTED)):
            return
        document = _json(step, _STEP, follow_links)
        if document.get("commit_timestamp_nsecs") is None:
            _unfinished(path, f"{_STEP} has no time of the commit, and there is no {_COMMITTED}")
        return


def _unfinished(path: str, why: str) -> NoReturn:
    raise ConversionError(f"{path} is a save that Orbax has not committed: {why}; give another step")


def _json(directory: str, name: str, follow_links: bool) -> dict[str, Any]:
    where = file_in(directory, name, follow_links)
    if file_size(where) > _MAX_JSON_BYTES:
        raise CheckpointCorruptError(f"{where} is larger than {_MAX_JSON_BYTES} bytes")
    try:
        document = json.loads(read_bytes(where, 0, file_size(where)))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} is damaged: it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointCorruptError(f"{where} is damaged: it is not a JSON object")
    return document
