"""Nested states of other formats, made of the keys that lead to each leaf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.paths import Path, display

__all__ = ["nested_state"]


class _Node(dict[str | int, Any]):
    """A dict or list under construction. Its type tells it from dicts that are leaves."""


def nested_state(leaves: Mapping[Path, Any], where: str, *, numbers: bool) -> Any:
    """Return the nested state with these leaves. Keys that are int are places in lists; missing items become None.

    Some formats make strings of all keys of dicts. With `numbers`, a dict whose keys all read like numbers gets numbers
    back: the state of an optimizer is such a dict. CheckpointCorruptError if a leaf is below another leaf.
    """
    root = _Node()
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise CheckpointCorruptError(f"{where}: {display(path)} is below another leaf")
        if path[-1] in node:
            raise CheckpointCorruptError(f"{where}: {display(path)} occurs twice, or has leaves below it")
        node[path[-1]] = leaf
    return _finished(root, where, len(leaves), numbers)


def _finished(node: _Node, where: str, most: int, numbers: bool) -> Any:
    items = {key: _finished(v, where, most, numbers) if isinstance(v, _Node) else v for key, v in node.items()}
    if items and all(type(key) is int for key in items):
        places = [int(key) for key in items]
        if min(places) < 0 or max(places) >= most:
            raise CheckpointCorruptError(
                f"{where}: a list has the place {max(places)}, but there are {most} leaves in all"
            )
        return [items.get(place) for place in range(max(places) + 1)]
    if any(type(key) is int for key in items):
        raise CheckpointCorruptError(f"{where}: a dict has both whole numbers and strings as keys: {list(items)[:4]}")
    if numbers and items and all(_is_number(str(key)) for key in items):
        return {int(key): item for key, item in items.items()}
    return items


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= 18 and (key == "0" or key[0] != "0")
