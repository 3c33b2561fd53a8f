"""The containers of a state, and how a state is made again of its leaves.

Each leaf of a state has a path of keys. A container at a path is a plain dict unless it is recorded as a `Container`:
then the state can be made of paths, leaves and containers alone. Does not import torch.
"""

from __future__ import annotations

import itertools
import json
import operator
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckpt.paths import Path, display
from ckpt.values.codec import UnencodableError, decode_value, encode_value
from ckpt.values.registry import Unregistered, encoder_named, form_of, name_of
from ckpt.values.tensor_subclasses import class_named

_MAX_KEYS = 101  # of a path
_MAX_DIMENSIONS = 64  # of a tensor
_OUTER_SHAPE = Unregistered("ckpt.OuterShape", None)  # in a context, for the shape of the tensor itself

Kind = Literal["list", "tuple", "namedtuple", "deque", "Namespace", "OrderedDict", "Counter", "tensor", "optimizer"]


@dataclass(frozen=True, slots=True)
class Container:
    """A container that is not a plain dict. A sequence has its items under the keys 0, 1, and so on.

    `type` and `fields` are the name of the class of a named tuple, and those of its fields; `maxlen` is that of a
    deque. A "tensor" is a tensor subclass stored by its parts (`ckpt.values.tensor_subclasses`): `fields` are their
    names, `shape` is the global shape, and `context` the JSON text of what `__tensor_unflatten__` needs besides; it is
    empty if that cannot be stored. An "optimizer" is a plain dict, the state dict of an optimizer; `fields` are the
    names of its class and of the base classes of that.
    """

    kind: Kind
    type: str = ""
    fields: tuple[str, ...] = ()
    maxlen: int | None = None
    shape: tuple[int, ...] = ()
    context: str = ""

    @classmethod
    def of(cls, node: Any) -> Container | None:
        """Return the container that `node` is; None for a dict, and for a mapping that is restored as one.

        A subclass of a list or a tuple is recorded as a list or a tuple.
        """
        if isinstance(node, tuple):
            kind = type(node)
            if form_of(kind) == "namedtuple":
                return cls("namedtuple", name_of(kind), kind._fields)  # type: ignore[attr-defined]
            return cls("tuple")
        if isinstance(node, deque):
            return cls("deque", maxlen=node.maxlen)
        kinds: tuple[tuple[type[Any], Kind], ...] = (
            (list, "list"),
            (Namespace, "Namespace"),
            (OrderedDict, "OrderedDict"),
            (Counter, "Counter"),
        )
        return next((cls(name) for kind, name in kinds if isinstance(node, kind)), None)

    @classmethod
    def of_tensor(cls, tensor: Any, parts: tuple[str, ...], context: Any, shape: tuple[int, ...]) -> Container:
        """Return the container for a tensor subclass, from what its `__tensor_flatten__` returned.

        `shape` is the global one if this is the local part of a DTensor.
        """
        try:
            text = json.dumps(encode_value(_replaced(context, tuple(tensor.shape), _OUTER_SHAPE)))
        except UnencodableError:
            text = ""
        return cls("tensor", name_of(type(tensor)), parts, shape=shape, context=text)

    def to_document(self) -> dict[str, Any]:
        """Return the container as JSON."""
        document: dict[str, Any] = {"kind": self.kind}
        if self.kind in ("namedtuple", "tensor"):
            document |= {"type": self.type, "fields": list(self.fields)}
        if self.kind == "optimizer":
            document["fields"] = list(self.fields)
        if self.kind == "tensor":
            document["shape"] = list(self.shape)
        if self.context:
            document["context"] = json.loads(self.context)
        if self.maxlen is not None:
            document["maxlen"] = self.maxlen
        return document

    @classmethod
    def from_document(cls, document: Any) -> Container:
        """Return the container that `to_document` has made this of. ValueError for anything else."""
        if not isinstance(document, dict) or document.get("kind") not in get_args(Kind):
            raise ValueError(f"{document!r:.80} is not a container")
        kind, name, fields = document["kind"], document.get("type", ""), document.get("fields", [])
        maxlen, shape = document.get("maxlen"), document.get("shape", [])
        if type(name) is not str or type(fields) is not list or not all(type(field) is str for field in fields):
            raise ValueError(f"{document!r:.80} is not a container: its type or its fields are invalid")
        if maxlen is not None and (type(maxlen) is not int or not 0 <= maxlen < 1 << 63):
            raise ValueError(f"{document!r:.80} is not a container: its maxlen is invalid")
        if (
            type(shape) is not list
            or len(shape) > _MAX_DIMENSIONS
            or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
        ):
            raise ValueError(f"{document!r:.80} is not a container: its shape is invalid")
        context = json.dumps(document["context"]) if "context" in document else ""
        container = cls(kind, name, tuple(fields), maxlen, tuple(shape), context)
        if container.to_document() != document:
            raise ValueError(f"{document!r:.80} is not a container: it has members of another kind")
        return container

    def made_of(self, items: dict[Any, Any]) -> Any:
        """Return the container with these items by key.

        A named tuple whose class is not registered (see `ckpt.register_encoder`), or has other fields now, is returned
        as a dict of its fields by name. ValueError if these cannot be its items.
        """
        match self.kind:
            case "optimizer":
                return dict(items)
            case "Namespace":
                namespace = Namespace()
                vars(namespace).update({_attribute(key): item for key, item in items.items()})
                return namespace
            case "OrderedDict":
                return OrderedDict(items)
            case "Counter":
                return Counter(items)
            case "list":
                return _sequence(items)
            case "tuple":
                return tuple(_sequence(items))
            case "deque":
                return deque(_sequence(items), self.maxlen)
            case "namedtuple":
                return self._named_tuple(_sequence(items))
            case "tensor":
                return self.tensor_of(items, self.shape)

    def tensor_of(self, parts: dict[Any, Any], shape: tuple[int, ...]) -> Any:
        """Return the tensor subclass with these parts and this outer shape.

        A dict of the parts if its class is unknown to this program or not installed, if its context was not stored, or
        if the parts are not torch tensors. ValueError if these cannot be its parts.
        """
        if set(parts) != set(self.fields):
            raise ValueError(f"a {self.type} has the parts {list(self.fields)}, and there are {list(parts)}")
        kind = class_named(self.type)
        if kind is None or not self.context or not all(hasattr(part, "data_ptr") for part in parts.values()):
            return parts
        context = _replaced(decode_value(json.loads(self.context)), _OUTER_SHAPE, shape)
        strides = tuple(itertools.accumulate((1, *reversed(shape[1:])), operator.mul))[::-1] if shape else ()
        try:
            return kind.__tensor_unflatten__(parts, context, shape, strides)
        except Exception as error:
            raise ValueError(f"{self.type} cannot be made of its parts: {error!r}") from error

    def _named_tuple(self, items: list[Any]) -> Any:
        if len(items) != len(self.fields):
            raise ValueError(f"a {self.type} has {len(self.fields)} fields, and there are {len(items)} items")
        encoder = encoder_named(self.type)
        if encoder is not None and form_of(encoder.kind) == "namedtuple" and encoder.kind._fields == self.fields:
            return encoder.kind._make(items)
        return dict(zip(self.fields, items, strict=True))


def rebuild(leaves: Mapping[Path, Any], containers: Mapping[Path, Container]) -> Any:
    """Return the state with these leaves by path, in these containers.

    Keys of a mapping are in the order in which their first leaves are given. A leaf that is an empty dict becomes the
    container at its path, if one is recorded; containers without leaves are left out. ValueError, naming the path, if
    no state has these leaves.
    """
    top = _Node()
    for path, leaf in leaves.items():
        _put(top, path, leaf)
    return _made(top.get(_STATE, {}), (), containers)


def _replaced(context: Any, old: Any, new: Any) -> Any:
    """Replace what is equal to `old` in the context of a tensor; a shape is only replaced where it has its own type."""
    if context == old and type(context) is not list and context != ():
        return new
    if type(context) is dict:
        return {key: _replaced(item, old, new) for key, item in context.items()}
    if type(context) in (list, tuple):
        return type(context)(_replaced(item, old, new) for item in context)
    return context


class _Node(dict[Any, Any]):
    """The items of a container, by key."""


_STATE = ""  # the key of the state itself in the topmost node


def _put(top: _Node, path: Path, leaf: Any) -> None:
    if len(path) > _MAX_KEYS:
        raise ValueError(f"{display(path[:8])}/...: it is nested deeper than any state")
    *keys, last = _STATE, *path
    node = top
    for key in keys:
        node = node.setdefault(key, _Node())
        if type(node) is not _Node:
            raise ValueError(f"{display(path)}: it is below another leaf")
    if last in node:
        raise ValueError(f"{display(path)}: it is a leaf, and there are leaves below it")
    node[last] = leaf


def _made(node: Any, path: Path, containers: Mapping[Path, Container]) -> Any:
    """Return the container or leaf at a path."""
    container = containers.get(path)
    if type(node) is _Node:
        items = {key: _made(item, (*path, key), containers) for key, item in node.items()}
    elif container is None:
        return node
    elif type(node) is dict and not node:
        items = {}
    else:
        raise ValueError(f"{display(path)}: it is a leaf, and recorded as a {container.kind}")
    try:
        return items if container is None else container.made_of(items)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{display(path)}: {error}") from error


def _sequence(items: Mapping[Any, Any]) -> list[Any]:
    try:
        return [items[number] for number in range(len(items))]
    except KeyError as missing:
        raise ValueError(f"a sequence of {len(items)} items has no item {missing}") from None


def _attribute(key: Any) -> str:
    if type(key) is not str:
        raise ValueError(f"{key!r:.80} is not the name of an attribute")
    return key
