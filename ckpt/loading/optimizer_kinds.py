"""Decide whether an optimizer can continue from the state dict of the one that was saved. Imports torch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ckpt.planning.optimizer_classes import class_names

_SHOWN = 8


def other_kind(classes: Collection[str], options: Collection[Any], owner: Any) -> str | None:
    """Return how an optimizer differs in kind from the one that was saved; None if it does not.

    `classes` are the recorded names of the class that was saved and of its base classes, `options` the names in its
    first parameter group. The classes decide: schedulers and programs add options of their own to groups. A step
    without a record of the class is of another kind if options that the class cannot do without are not in it, and
    others are.
    """
    groups = getattr(owner, "param_groups", ())
    own = set(groups[0]) - {"params"} if groups else set()
    only_stored = sorted(map(str, set(options) - own - {"params"}))
    names = class_names(owner)
    if classes and names:
        stored = next(iter(classes))
        if stored in names or names[0] in classes:
            return None
        only_own = sorted(map(str, own - set(options)))
        if only_stored or only_own:
            return _options(
                f"that of the checkpoint, {stored},", only_stored, f"that of the state, {names[0]},", only_own
            )
        return f"that of the checkpoint is {stored}, that of the state {names[0]}"
    if not options or not only_stored:
        return None
    lacking = _lacking(options, owner)
    return _options("that of the checkpoint", only_stored, "that of the state", lacking) if lacking else None


def groups_problem(stored: list[list[Any]] | None, own: list[list[Any]]) -> str | None:
    """Return how the parameter groups of an optimizer differ from those that were saved; None if they do not.

    As in `Optimizer.load_state_dict`, parameters belong together by their order, not by their numbers.
    """
    if stored is None:
        return "has no parameter groups in the checkpoint; leave it out: restore(..., only=...)"
    if list(map(len, stored)) == list(map(len, own)):
        return None
    return (
        f"has {_group_sizes(stored)} in the checkpoint, {_group_sizes(own)} in the state; make it of the same "
        "parameters, the frozen ones too, or leave it out: restore(..., only=...)"
    )


def moved_parameter(stored: list[Any], own: list[Any]) -> str | None:
    """Return which parameter has another place in the order than it had; None if none has. Names may be None."""
    places = {name: at for at, name in enumerate(stored)}
    then, now = Counter(stored), Counter(own)
    for at, name in enumerate(own):
        if name is not None and then[name] == now[name] == 1 and places[name] != at:
            return (
                f"has parameter {name} at place {places[name]} in the order of the checkpoint, at place {at} in that "
                "of the state; make it of the same parameters in the same order, or leave it out: "
                "restore(..., only=...)"
            )
    return None


def _options(stored: str, only_stored: list[str], own: str, only_own: list[str]) -> str:
    return f"{stored} has {', '.join(only_stored) or 'no more options'}, {own} {', '.join(only_own) or 'no more'}"


def _lacking(options: Collection[Any], owner: Any) -> list[str]:
    """Return the options of the class that are not among `options` and that it does not add when it loads."""
    lacking = set(getattr(owner, "defaults", ())) - set(options)
    if not lacking or not isinstance(owner, torch.optim.Optimizer):
        return []
    group: dict[str, Any] = {name: owner.param_groups[0].get(name) for name in options}
    group["params"] = []
    # A newer version of a class sets the options that it has in addition in `__setstate__`, here that of a copy.
    upgraded = copy.copy(owner.__dict__)
    upgraded |= {"defaults": dict(owner.defaults), "state": {}, "param_groups": [group]}
    probe = object.__new__(type(owner))
    probe.__dict__.update(upgraded)
    try:
        probe.__setstate__({"state": {}, "param_groups": [group]})
    except Exception:  # code of any program: it cannot load these options
        return sorted(map(str, lacking))
    return sorted(map(str, lacking - set(group)))


def _group_sizes(groups: list[list[Any]]) -> str:
    counts = [str(len(group)) for group in groups]
    more = ", ..." if len(counts) > _SHOWN else ""
    plural = "" if len(counts) == 1 else "s"
    return f"{len(counts)} parameter group{plural} with {', '.join(counts[:_SHOWN])}{more} parameter(s)"


def stored_options(leaves: Mapping[Any, Any]) -> set[Any]:
    """Return the names of the options in the first parameter group, given leaves by path."""
    groups = leaves.get(("param_groups",))
    if isinstance(groups, list):
        return set(groups[0]) if groups and isinstance(groups[0], dict) else set()
    return {path[2] for path in leaves if len(path) > 2 and path[:2] == ("param_groups", 0)}
