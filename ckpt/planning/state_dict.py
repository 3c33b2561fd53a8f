"""Flatten a state into tensors and values with stable names; and the objects for users to put into a state.

A state is any nesting of dicts, lists, deques, tuples and namespaces with tensors, numpy arrays, values, or objects
with ``state_dict``/``load_state_dict``. A container other than a dict is one value if it holds no tensor. Runs in the
trainer; imports torch.
"""

from __future__ import annotations

import operator
import random
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
import torch

from ckpt.collection import without_collection
from ckpt.errors import CheckpointError, StateError
from ckpt.paths import Path, display
from ckpt.planning.data_loaders import is_data_loader, storable
from ckpt.planning.flat_state import Assign, DataLoaderOwner, FlatState, Owner, ValueLeaf
from ckpt.planning.optimizer_classes import recorded_class
from ckpt.planning.tensor_leaves import TensorLeaf, TensorLeaves
from ckpt.planning.tensors import MetaTensorError, check_array, check_initialized, shares_elements, tensor_over
from ckpt.values.codec import UnencodableError, encode_value
from ckpt.values.containers import Container
from ckpt.values.registry import encoder_of, form_of

__all__ = [
    "AskState",
    "Assign",
    "FlatState",
    "Owner",
    "PerRank",
    "RngState",
    "TensorLeaf",
    "ValueLeaf",
    "flatten",
    "flatten_parts",
    "holds_tensors",
    "is_registered_value",
    "state_dict_of",
]


@dataclass(slots=True)
class PerRank:
    """A part of the state that belongs to this rank alone, such as its position in the data.

    `value` is anything that a state may hold. Each rank saves and restores its own. If fewer ranks wrote the
    checkpoint, the additional ranks keep theirs. A restore replaces `value` itself if it is not a container. For random
    number generators use `RngState`.
    """

    value: Any


class RngState:
    """The random number generators of this process, as a part of a state: ``state = {"rng": ckpt.RngState(), ...}``.

    A save takes their current state, a restore sets it: the global generators of Python's `random`, of numpy
    (``numpy.random.seed``), and of torch on the CPU and on all CUDA devices. It is `PerRank` by itself: each rank
    restores its own, and if fewer ranks wrote the checkpoint, the additional ranks keep theirs. A restore sets the
    generators after all other objects of the state have loaded.

    CUDA generators are saved once the process has used CUDA. A process without CUDA keeps their state from a
    checkpoint, to save it again. Missing devices are skipped, and additional ones keep their state. Generators that you
    have made yourself (`torch.Generator`, `numpy.random.Generator`) are not included. Use it in the thread that trains.
    """

    def __init__(self) -> None:
        self._cuda: list[bytes] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators, with the same structure on every machine."""
        import numpy as np
        import torch

        version, numbers, gauss = random.getstate()
        if torch.cuda.is_initialized():
            self._cuda = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
        return {
            "torch": torch.get_rng_state(),
            "cuda": list(self._cuda),
            "numpy": np.random.get_state(legacy=False),
            "python": {"version": version, "numbers": np.array(numbers, np.uint32), "gauss": gauss},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators to the state that `state_dict` returned, in this or another process."""
        import numpy as np
        import torch

        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        self._cuda = list(state_dict["cuda"])
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for device, state in enumerate(self._cuda[:devices]):
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), device)


_MAX_NESTING = 100
_NUMBERS = frozenset({int, float, bool})
_SHOWN = 20

AskState = Callable[[Path, Any], Any]
"""Returns the state dict of the object at a path."""


def flatten(
    state: Any,
    *,
    expand: Callable[[Path, Any, Any, bool], Any] | None = None,
    adapt: Callable[[Path, Any, bool], Any] | None = None,
    reaches: Callable[[Path], bool] = lambda path: True,
    ask: AskState | None = None,
) -> FlatState:
    """Name every leaf of `state`; the tensors alias the user's memory where possible.

    `expand(path, owner, state_dict, per_rank)` may return another state dict for a stateful object: a restore creates
    the missing tensors of a new optimizer. `adapt(path, container, per_rank)` may return another dict, list or deque to
    be walked in place of one that is in no stateful object. Items of the state that `reaches` is False of are not
    looked at. `ask(path, stateful)` returns the state dict of an object: by default the one that it has now. A
    `FlatState`, whose leaves another part of the program has named, is returned as it is. Raises
    StateError, naming the path, for a leaf that cannot be stored.
    """
    if isinstance(state, FlatState):
        return state
    flat = FlatState()
    with without_collection(), torch.no_grad():
        _Walk(flat, expand, adapt, reaches, ask or state_dict_of).visit((), state, per_rank=False, assign=None)
    if () in flat.tensors or (() in flat.values and not isinstance(state, Mapping)):
        raise StateError(
            f"a state that is a single {type(state).__name__} cannot be restored in place; put it into a dict"
        )
    return flat


def flatten_parts(parts: Iterable[tuple[Path, Any]], ask: AskState) -> FlatState:
    """Name the leaves of parts of a state, given with their paths, as `flatten` does."""
    flat = FlatState()
    walk = _Walk(flat, None, None, lambda path: True, ask)
    for path, part in parts:
        walk.visit(path, part, per_rank=False, assign=None)
    return flat


class _Walk:
    """One pass over a state."""

    def __init__(
        self,
        flat: FlatState,
        expand: Callable[[Path, Any, Any, bool], Any] | None,
        adapt: Callable[[Path, Any, bool], Any] | None,
        reaches: Callable[[Path], bool],
        ask: AskState,
    ) -> None:
        self._flat = flat
        self._expand = expand
        self._adapt = adapt
        self._reaches = reaches
        self._ask = ask
        tensors: dict[Path, TensorLeaf] = {}
        flat.tensors = tensors
        self._tensors = TensorLeaves(tensors, flat.aliases, flat.containers)

    def visit(self, path: Path, node: Any, per_rank: bool, assign: Assign | None) -> None:
        if not self._reaches(path):
            return
        if len(path) > _MAX_NESTING:
            raise StateError(
                f"{display(path[:8])}/...: the state is nested deeper than {_MAX_NESTING}, or contains itself"
            )
        if self._adapt is not None and isinstance(node, dict | list | deque) and not is_registered_value(type(node)):
            node = self._adapt(path, node, per_rank)
        if isinstance(node, PerRank):
            self.visit(path, node.value, True, partial(setattr, node, "value"))
        elif isinstance(node, torch.Tensor):
            self._tensors.add(path, node, per_rank)
        elif isinstance(node, np.ndarray):
            self._array(path, node, per_rank)
        elif is_registered_value(type(node)):
            self._value(path, node, per_rank, assign)
        elif isinstance(node, Mapping):
            self._record(path, node, per_rank)
            self._mapping(path, node, per_rank, assign)
        elif isinstance(node, list | deque | tuple | Namespace) and holds_tensors(node):
            self._container(path, node, per_rank, assign)
        elif callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None)):
            if is_data_loader(type(node)):
                self._data_loader(path, node)
            else:
                self._stateful(path, node, per_rank or isinstance(node, RngState))
        else:
            self._value(path, node, per_rank, assign)

    def _mapping(self, path: Path, node: Mapping[Any, Any], per_rank: bool, assign: Assign | None) -> None:
        if not node:
            self._value(path, {}, per_rank, assign)
        _check_keys(path, node)
        mutable = isinstance(node, MutableMapping)
        keys = iter(node)
        for kind, group in groupby(node.values(), type):
            items = list(group)
            names = list(islice(keys, len(items)))
            if issubclass(kind, torch.Tensor) and not per_rank:  # of most dicts all items
                self._tensors.add_many([(*path, name) for name in names], items)
                continue
            for name, item in zip(names, items, strict=True):
                self.visit((*path, name), item, per_rank, partial(operator.setitem, node, name) if mutable else None)

    def _record(self, path: Path, node: Any, per_rank: bool) -> None:
        container = None if type(node) is dict else Container.of(node)
        if container is not None:
            self._flat.containers[path] = container, per_rank

    def _container(self, path: Path, node: Any, per_rank: bool, assign: Assign | None) -> None:
        self._record(path, node, per_rank)
        if isinstance(node, Namespace):
            self._mapping(path, vars(node), per_rank, assign)
            return
        put = _tuple_setter(node, assign) if isinstance(node, tuple) else partial(operator.setitem, node)
        for number, item in enumerate(node):
            self.visit((*path, number), item, per_rank, None if put is None else partial(put, number))

    def _data_loader(self, path: Path, loader: Any) -> None:
        """Take its state as one value of this rank. A restore does not ask for it, which would start workers."""
        owner = DataLoaderOwner(path, loader, None, None)
        if self._expand is None:
            self._value(path, storable(path, self._ask(path, loader)), True, None)
        else:
            self._flat.values[path] = ValueLeaf(None, True, partial(setattr, owner, "state_dict"), None)
        self._flat.owners.append(owner)

    def _stateful(self, path: Path, stateful: Any, per_rank: bool) -> None:
        if isinstance(stateful, torch.optim.Optimizer) and self._expand is not None:
            for number, parameter in enumerate(_parameters(stateful)):
                check_initialized((*path, "state", number), parameter)
        before = self._ask(path, stateful)
        state_dict = before if self._expand is None else self._expand(path, stateful, before, per_rank)
        owner = Owner(path, stateful, before, state_dict)
        recorded = recorded_class(stateful, state_dict)
        if recorded is not None:
            self._flat.containers[path] = recorded, per_rank
        adapt, self._adapt = self._adapt, None  # `expand` has done it
        try:
            self.visit(path, state_dict, per_rank, partial(setattr, owner, "state_dict"))
        except MetaTensorError as error:
            raise StateError(_how_to_allocate(path, stateful, error)) from None
        finally:
            self._adapt = adapt
        self._flat.owners.append(owner)

    def _value(self, path: Path, value: Any, per_rank: bool, assign: Assign | None) -> None:
        try:
            encoded = encode_value(value)
        except UnencodableError as error:
            raise StateError(f"{display((*path, *error.path))}: {error}") from error.__cause__
        self._flat.values[path] = ValueLeaf(value, per_rank, assign, encoded)

    def _array(self, path: Path, array: np.ndarray[Any, Any], per_rank: bool) -> None:
        check_array(path, array)
        aliased = tensor_over(array)
        if aliased is not None:
            self._tensors.add(path, aliased, per_rank)
            return
        contiguous = np.array(array, order="C", copy=True)
        local = tensor_over(contiguous)
        if local is None:
            raise StateError(f"{display(path)}: numpy arrays of dtype {array.dtype} cannot be stored")
        self._tensors.add(path, local, per_rank)
        if path in self._flat.tensors:
            leaf = self._flat.tensors[path]
            leaf.after = lambda: np.copyto(array, contiguous)
            leaf.writeable = array.flags.writeable and not shares_elements(array.shape, array.strides)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in getattr(optimizer, "param_groups", ()))


def _how_to_allocate(path: Path, stateful: Any, error: MetaTensorError) -> str:
    """Return what to write for an object with tensors on the meta device."""
    if not isinstance(stateful, torch.nn.Module):
        return str(error)
    in_state_dict = stateful.state_dict().keys()
    others = [name for name, buffer in stateful.named_buffers() if buffer.is_meta and name not in in_state_dict]
    count = sum(tensor.is_meta for tensor in (*stateful.parameters(), *stateful.buffers()))
    text = (
        f"{display(path)}: {count} tensors of this {type(stateful).__name__} are on the meta device and have no data; "
        f"call its to_empty(device=...) first"
    )
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        text += f", and compute these buffers, which are in no checkpoint: {', '.join(others[:_SHOWN])}{more}"
    return text


def state_dict_of(path: Path, stateful: Any) -> Any:
    """Return what `state_dict` returns. StateError, naming the path, if it raises."""
    try:
        return stateful.state_dict()
    except Exception as error:
        if isinstance(error, CheckpointError):
            raise
        raise StateError(f"{display(path)}: {type(stateful).__name__}.state_dict failed: {error!r}") from error


def is_registered_value(kind: type[Any]) -> bool:
    """Return whether values of a type are made JSON by the program; a registered named tuple may hold tensors."""
    encoder = encoder_of(kind)
    return encoder is not None and encoder.to_json is not None


def _check_keys(path: Path, node: Mapping[Any, Any]) -> None:
    """Raise StateError for keys that cannot be in a path."""
    if set(map(type, node)) == {str} and all(map(str.isascii, node)):
        return
    for key in node:
        if type(key) is not str and type(key) is not int:
            raise StateError(
                f"{display(path)}: keys must be str or int, not {type(key).__name__} {key!r:.80}; put an object into "
                "the state whose state_dict() has str(key) instead, and whose load_state_dict() undoes that"
            )
        if isinstance(key, str) and not _is_unicode(key):
            raise StateError(f"{display(path)}: the key {key!r} is not valid Unicode and cannot be a name in a file")


def _is_unicode(text: str) -> bool:
    """Return False for a lone surrogate, which only Python's JSON reader accepts."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _tuple_setter(node: tuple[Any, ...], assign: Assign | None) -> Callable[[int, Any], None] | None:
    """Return a function that replaces an item by replacing the whole tuple; None if that is impossible."""
    kind = type(node)
    if assign is None or (kind is not tuple and form_of(kind) != "namedtuple"):
        return None
    items = list(node)

    def put(number: int, value: Any) -> None:
        items[number] = value
        assign(tuple(items) if kind is tuple else kind._make(items))  # type: ignore[attr-defined]

    return put


def holds_tensors(node: Any, depth: int = 0) -> bool:
    """Return whether a container holds anything that is not a plain value."""
    if depth > _MAX_NESTING:
        return True
    if isinstance(node, Namespace):
        node = vars(node)
    if isinstance(node, Mapping):
        return any(holds_tensors(item, depth + 1) for item in node.values())
    if isinstance(node, list | deque | tuple):
        if _NUMBERS.issuperset(map(type, node)):  # such as those of the parameters of an optimizer
            return False
        return any(holds_tensors(item, depth + 1) for item in node)
    return isinstance(node, torch.Tensor | np.ndarray | PerRank) or hasattr(node, "state_dict")
