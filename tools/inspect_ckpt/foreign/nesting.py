"""Nested dicts and lists from leaves with the keys that lead to them, and the other way round as torch does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.paths import Path, display

__all__ = ["dcp_leaves", "nest"]


class _Node(dict[str | int, Any]):
    """A dict or list under construction, told from dicts that are leaves."""


def nest(leaves: Mapping[Path, Any], where: str, *, numbers: bool) -> Any:
    """The state whose leaves these are. Keys that are int are places in lists, as torch.distributed.checkpoint has it;
    what is missing in a list becomes None.

    It makes a string of every key of a dict. With `numbers`, a dict whose keys all read like numbers gets numbers back:
    the state of an optimizer is such a dict. CheckpointCorruptError if a leaf is below another leaf.
    """
    root = _Node()
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise CheckpointCorruptError(f"{where}: {display(path)} is below another leaf")
        if path[-1] in node:
            raise CheckpointCorruptError(f"{where}: {display(path)} is there twice, or has leaves below")
        node[path[-1]] = leaf
    return _finished(root, where, len(leaves), numbers)


def _finished(node: _Node, where: str, most: int, numbers: bool) -> Any:
    items = {key: _finished(v, where, most, numbers) if isinstance(v, _Node) else v for key, v in node.items()}
    if items and all(type(key) is int for key in items):
        places = [int(key) for key in items]
        if min(places) < 0 or max(places) >= most:
            raise CheckpointCorruptError(f"{where}: there is a list with place {max(places)}, but {most} leaves in all")
        return [items.get(place) for place in range(max(places) + 1)]
    if any(type(key) is int for key in items):
        raise CheckpointCorruptError(f"{where}: keys of one dict are whole numbers and strings: {list(items)[:4]}")
    if numbers and items and all(_is_number(str(key)) for key in items):
        return {int(key): item for key, item in items.items()}
    return items


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= 18 and (key == "0" or key[0] != "0")


def dcp_leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The leaves of a value as torch.distributed.checkpoint flattens it: dicts are walked, and lists that hold dicts.

    A dict without items has no leaf.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from dcp_leaves((*path, str(key)), item)
    elif type(value) is list and not _is_leaf(value):
        for number, item in enumerate(value):
            yield from dcp_leaves((*path, number), item)
    else:
        yield path, value


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, list) or all(_is_leaf(item) for item in value)
