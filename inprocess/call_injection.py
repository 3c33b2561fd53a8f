"""Passing the `CallWrapper` to the parameters that are annotated with it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

__all__ = ["inject"]


def inject(
    function: Callable[..., Any], kind: type, value: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for `function` with `value` for each parameter annotated `kind` or ``Optional[kind]``.

    It replaces what the caller gave. Arguments that do not fit are returned as they are: the call will say what is
    wrong.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that has no signature
        return args, kwargs
    names = [name for name in signature.parameters if _is(_annotations(function, signature).get(name), kind)]
    if not names:
        return args, kwargs
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:
        return args, kwargs
    for name in names:
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        bound.arguments[name] = value
    ordered = {name: bound.arguments[name] for name in signature.parameters if name in bound.arguments}
    bound.arguments = ordered
    return bound.args, bound.kwargs


def _annotations(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Return the annotations; as written, where names in them cannot be resolved."""
    raw = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    try:
        target = inspect.unwrap(function)
        return {**raw, **typing.get_type_hints(target if inspect.isroutine(target) else type(target).__call__)}
    except Exception:
        return raw


def _is(annotation: object, kind: type) -> bool:
    if isinstance(annotation, str):
        names = {part.strip().rpartition(".")[2] for part in annotation.replace("Optional[", "").rstrip("]").split("|")}
        return kind.__name__ in names and names <= {kind.__name__, "None"}
    if annotation is kind:
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = set(typing.get_args(annotation)) - {type(None)}
        return members == {kind}
    return False
