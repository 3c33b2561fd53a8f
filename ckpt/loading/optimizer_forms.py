"""The forms that the state dict of an optimizer may have in a step, and the items of one form written in another.

numbered   state/3/exp_avg              param_groups: [{"lr": 0.1, "params": [3]}]               torch.optim.Optimizer
named      state/layer.weight/exp_avg   param_groups: [{"lr": 0.1, "params": ["layer.weight"]}]  get_state_dict
flattened  state.layer.weight.exp_avg   param_groups.layer.weight.lr                             the same, flattened

Each parameter has state, and the options of its group. In the flattened form there are no groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ckpt.errors import StateMismatchError
from ckpt.loading.index import StoredTensor
from ckpt.loading.optimizer_plan import StoredOptimizer
from ckpt.loading.optimizer_tensors import is_usual
from ckpt.paths import Path
from ckpt.values.codec import UnencodableError, encode_value
from ckpt.values.containers import Container, rebuild

Form = Literal["numbered", "named", "flattened"]
Key = str | int
"""The name of a parameter, or its number."""

Same = Callable[[StoredTensor, StoredTensor], bool]
"""Whether two tensors of the step have the same elements."""

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_LIST = Container("list")


@dataclass
class Items:
    """Tensors, values and containers by the rest of their paths; `sources` are the places of the leaves in the step."""

    tensors: dict[Path, StoredTensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    containers: dict[Path, Container] = field(default_factory=dict)
    sources: dict[Path, tuple[Path, ...]] = field(default_factory=dict)

    def add(self, stored: StoredOptimizer, name: Path, at: Path) -> None:
        """Add a leaf of the step, by its name in the optimizer, at another path."""
        if name in stored.tensors:
            self.tensors[at] = stored.tensors[name]
        else:
            self.values[at] = stored.values[name]
        self.sources[at] = (name,)

    def put(self, other: Items, at: Path) -> None:
        """Add the items of another, below a path."""
        self.tensors |= {(*at, *rest): tensor for rest, tensor in other.tensors.items()}
        self.values |= {(*at, *rest): value for rest, value in other.values.items()}
        self.containers |= {(*at, *rest): container for rest, container in other.containers.items()}
        self.sources |= {(*at, *rest): names for rest, names in other.sources.items()}

    def leaves(self) -> Iterator[Path]:
        """Yield the paths of tensors and values."""
        yield from self.tensors
        yield from self.values

    def equals(self, other: Items, same: Same) -> bool:
        """Return whether both have the same values, and tensors that are the `same`."""
        return (
            self.tensors.keys() == other.tensors.keys()
            and all(same(tensor, other.tensors[rest]) for rest, tensor in self.tensors.items())
            and self.values.keys() == other.values.keys()
            and all(encode_value(value) == encode_value(other.values[rest]) for rest, value in self.values.items())
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """The state of one parameter, and the options of its group."""

    state: Items
    options: Items


@dataclass(frozen=True, slots=True)
class StoredForm:
    """An optimizer of the step by its parameters, in the order of the step; `groups` are empty if it is flattened."""

    form: Form
    groups: tuple[tuple[Key, ...], ...]
    parameters: dict[Key, Parameter]
    options: tuple[Items, ...]  # of each group


# -- which form --------------------------------------------------------------------------------------------------------


def form_of(state_dict: Any) -> Form | None:
    """Return the form of a state dict; None if it has none of these, or no parameters."""
    if not isinstance(state_dict, Mapping):
        return None
    if is_usual(state_dict):
        return _form_of_keys(key for group in state_dict[_GROUPS] for key in group[_PARAMS])
    return "flattened" if any(map(_is_option, state_dict)) else None


def _form_of_keys(keys: Iterable[Any]) -> Form | None:
    kinds = set(map(type, keys))
    return "numbered" if kinds == {int} else "named" if kinds == {str} else None


def _is_option(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(f"{_GROUPS}.")


def names_in(state_dict: Mapping[Any, Any]) -> tuple[tuple[Key, ...], ...]:
    """Return the names of the parameters by group.

    A flattened state dict has no groups: parameters in a row with equal options are taken for one.
    """
    if is_usual(state_dict):
        return tuple(tuple(group[_PARAMS]) for group in state_dict[_GROUPS])
    options: dict[Key, dict[str, Any]] = {}
    for key, value in state_dict.items():
        if _is_option(key):
            name, option = _named_by(key)
            options.setdefault(name, {})[option] = value
    groups: list[list[Key]] = []
    for each, own in options.items():
        if groups and _are_equal(options[groups[-1][-1]], own):
            groups[-1].append(each)
        else:
            groups.append([each])
    return tuple(map(tuple, groups))


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_is_equal(value, other[option]) for option, value in one.items())


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    try:
        return bool(encode_value(one) == encode_value(other))
    except UnencodableError:  # reported when the state is flattened
        return False


def _named_by(key: str) -> tuple[str, str]:
    """Return the name of the parameter, and the option, of a key of the flattened form."""
    name, _, option = key.removeprefix(f"{_GROUPS}.").rpartition(".")
    return name, option


# -- from the step -----------------------------------------------------------------------------------------------------


def stored_form(stored: StoredOptimizer) -> StoredForm | None:
    """Return an optimizer of the step by its parameters; None if it has none of the forms.

    StateMismatchError, without the path, if it is ambiguous.
    """
    groups = stored.groups()
    if groups is None:
        names = (*stored.tensors, *stored.values)
        return _flattened(stored, names) if any(_is_option(name[0]) for name in names) else None
    form = _form_of_keys(key for group in groups for key in group)
    if form is None:
        return None
    options = [_options_of(stored, number) for number in range(len(groups))]
    parameters: dict[Key, Parameter] = {
        key: Parameter(Items(), options[number]) for number, group in enumerate(groups) for key in group
    }
    if len(parameters) < sum(map(len, groups)):
        raise StateMismatchError("has a parameter twice in its groups in the checkpoint")
    for name in (*stored.tensors, *stored.values):
        key = _key(name, form)
        if key in parameters:
            parameters[key].state.add(stored, name, name[2:])
    for name, container in stored.containers.items():
        key = _key(name, form)
        if key in parameters:
            parameters[key].state.containers[name[2:]] = container
    return StoredForm(form, tuple(map(tuple, groups)), parameters, tuple(options))


def _key(name: Path, form: Form) -> Key | None:
    if len(name) < 2 or name[0] != _STATE:
        return None
    return str(name[1]) if form == "named" else name[1]  # a name such as "0" may have been read as a number


def _options_of(stored: StoredOptimizer, number: int) -> Items:
    """Return the options of a group. All groups are one value, unless there is a tensor in them."""
    found = Items()
    at: Path = (_GROUPS,)
    if at in stored.values:
        for option, value in stored.values[at][number].items():
            if option != _PARAMS:
                found.values[option,] = value
                found.sources[option,] = (at,)
        return found
    at = (_GROUPS, number)
    for name in (*stored.tensors, *stored.values):
        if name[:2] == at and name[2:] != (_PARAMS,):
            found.add(stored, name, name[2:])
    found.containers = {name[2:]: each for name, each in stored.containers.items() if name[:2] == at and len(name) > 2}
    return found


def _flattened(stored: StoredOptimizer, names: Iterable[Path]) -> StoredForm:
    names = list(names)
    parameters: dict[Key, Parameter] = {
        _named_by(str(name[0]))[0]: Parameter(Items(), Items()) for name in names if _is_option(name[0])
    }
    for name in (*names, *stored.containers):
        if name and _is_option(name[0]):
            key, option = _named_by(str(name[0]))
            items, at = parameters[key].options, (option, *name[1:])
        elif name and isinstance(name[0], str) and name[0].startswith(f"{_STATE}."):
            split = _state_key(name[0].removeprefix(f"{_STATE}."), parameters)
            if split is None:
                continue
            items, at = parameters[split[0]].state, (split[1], *name[1:])
        else:
            continue
        if name in stored.tensors or name in stored.values:
            items.add(stored, name, at)
        else:
            items.containers[at] = stored.containers[name]
    return StoredForm("flattened", (), parameters, ())


def _state_key(text: str, parameters: Mapping[Key, Parameter]) -> tuple[str, str] | None:
    """Return the parameter and the key in its state of the rest of a flattened name; None if it has no options."""
    parts = text.split(".")
    found = [".".join(parts[:at]) for at in range(1, len(parts)) if ".".join(parts[:at]) in parameters]
    if not found:
        return None
    key = text.removeprefix(f"{found[0]}.")
    if len(found) > 1:
        raise StateMismatchError(f"has state.{text} in the checkpoint, which may belong to {' or to '.join(found)}")
    if "." in key:
        raise StateMismatchError(
            f"has nested state of {found[0]} in the checkpoint ({key}), whose keys cannot be told apart after "
            "flatten_optimizer_state_dict=True: load it with set_state_dict, or save it without that option"
        )
    return found[0], key


# -- in another form ---------------------------------------------------------------------------------------------------

Pairs = tuple[tuple[tuple[Key | None, Key], ...], ...]
"""The parameters of each group of an optimizer of the state: their keys in the step, None if not there, and here."""


def written(stored: StoredForm, pairs: Pairs, state_dict: Any, flattened: bool, same: Same) -> Items:
    """Return the items of some parameters of the step under other keys, in groups, or flattened.

    Groups of which the step has no parameter keep their options, those of `state_dict`. StateMismatchError, without the
    path, if the parameters of a group had different options.
    """
    return _written_flat(stored, pairs) if flattened else _written_in_groups(stored, pairs, state_dict, same)


def _written_in_groups(stored: StoredForm, pairs: Pairs, state_dict: Any, same: Same) -> Items:
    result = Items()
    groups: list[Items] = []
    for number, group in enumerate(pairs):
        known = [(old, new) for old, new in group if old is not None]
        for old, new in known:
            result.put(stored.parameters[old].state, (_STATE, new))
        if group and not known:
            groups.append(_own_options(state_dict[_GROUPS][number], number))
        else:
            groups.append(_options_of_all(stored, number, [old for old, _ in known], same))
    if not any(True for _ in result.leaves()):
        result.values[_STATE,] = {}
    members = [[new for _, new in group] for group in pairs]
    if any(options.tensors for options in groups):
        result.containers[_GROUPS,] = _LIST
        for number, (options, params) in enumerate(zip(groups, members, strict=True)):
            result.put(options, (_GROUPS, number))
            result.values[_GROUPS, number, _PARAMS] = params
        return result
    result.values[_GROUPS,] = [
        {**(rebuild(options.values, options.containers) if options.values else {}), _PARAMS: params}
        for options, params in zip(groups, members, strict=True)
    ]
    result.sources[_GROUPS,] = tuple(name for options in groups for names in options.sources.values() for name in names)
    return result


def _own_options(group: Mapping[str, Any], number: int) -> Items:
    """Return the options of a group of the state."""
    options = {option: value for option, value in group.items() if option != _PARAMS}
    if any(isinstance(value, torch.Tensor) for value in options.values()):
        raise StateMismatchError(
            f"has no parameter of group {number} in the checkpoint, and this group has an option that is a tensor: it "
            "cannot be kept; restore into the optimizer without that group, and add it afterwards"
        )
    return Items(values={(option,): value for option, value in options.items()})


def _options_of_all(stored: StoredForm, number: int, keys: list[Key], same: Same) -> Items:
    """Return the options of a group that has these parameters of the step."""
    if not keys:
        empty = [options for group, options in zip(stored.groups, stored.options, strict=True) if not group]
        if len(empty) != 1:
            raise StateMismatchError(
                f"has a parameter group {number} without parameters in the state, and {len(empty)} of these in the "
                "checkpoint: it is not known which options it gets; leave it out of the optimizer"
            )
        return empty[0]
    first, *others = keys
    options = stored.parameters[first].options
    different = [key for key in others if not stored.parameters[key].options.equals(options, same)]
    if different:
        raise StateMismatchError(
            f"has the parameters {first} and {different[0]} in one group in the state, and with different options in "
            "the checkpoint; make it of the groups that it had"
        )
    joined = Items(options.tensors, options.values, options.containers, dict(options.sources))
    for key in others:
        for rest, names in stored.parameters[key].options.sources.items():
            joined.sources[rest] = (*joined.sources[rest], *names)
    return joined


def _written_flat(stored: StoredForm, pairs: Pairs) -> Items:
    result = Items()
    for old, new in (pair for group in pairs for pair in group):
        if old is None:  # the leaves of the state are missing
            continue
        parameter = stored.parameters[old]
        for prefix, items in ((_STATE, parameter.state), (_GROUPS, parameter.options)):
            for rest in items.leaves():
                if rest:  # else state without items
                    name = _flat_name(f"{prefix}.{new}", rest, items.containers)
                    result.put(_one(items, rest), name)
            for rest, container in items.containers.items():
                if rest:
                    result.containers[_flat_name(f"{prefix}.{new}", rest, items.containers)] = container
    return result


def _flat_name(prefix: str, rest: Path, containers: Mapping[Path, Container]) -> Path:
    """Return the flattened name: keys of dicts are joined, those of other containers are not."""
    joined = next((at for at in range(1, len(rest)) if rest[:at] in containers), len(rest))
    return (".".join((prefix, *map(str, rest[:joined]))), *rest[joined:])


def _one(items: Items, rest: Path) -> Items:
    """Return one leaf alone, at no path."""
    if rest in items.tensors:
        return Items(tensors={(): items.tensors[rest]}, sources={(): items.sources[rest]})
    return Items(values={(): items.values[rest]}, sources={(): items.sources[rest]})
