"""Pickles that are data: an unpickler that knows a few harmless things by name and refuses everything else.

What a pickle can do is call what it has looked up by name. Here a name never leads to the object that it means, only to
a stand-in of ours that does nothing but keep its arguments; a name without a stand-in is refused when it is looked up,
so before anything was called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ckpt.errors import CheckpointCorruptError

from .state import UnsafeError

__all__ = ["Function", "StandIn", "UnknownNameError", "load"]


class UnknownNameError(UnsafeError):
    """The pickle names something that has no stand-in."""


class _Sealed(type):
    """The class of classes that a pickle cannot change: it can set attributes of all it has looked up."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError(f"{cls.__name__} cannot be changed")


class StandIn(metaclass=_Sealed):
    """Keeps what the pickle says an object of another class consists of, in `fields`."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state


class Function(StandIn):
    """Makes a function of ours something that a pickle can call, but not change."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("it cannot be changed")

    def __setstate__(self, state: Any) -> NoReturn:
        raise AttributeError("it cannot be changed")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], persistent: Any, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._persistent = persistent
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise UnknownNameError(
                f"{self._where} names {module}.{name}, which does not belong there: it was not loaded, and nothing of "
                "it was run"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to objects outside")
        return self._persistent(pid)


def load(data: bytes, known: Mapping[tuple[str, str], Any], where: str, persistent: Any = None) -> Any:
    """What the pickle `data` describes, made of the stand-ins `known` by module and name.

    UnknownNameError before anything with another name is touched; CheckpointCorruptError if it is no pickle. `where`
    is for the message. `persistent` takes the references to what is outside the pickle.
    """
    try:
        return _Unpickler(data, known, persistent, where).load()
    except UnknownNameError:
        raise
    except MemoryError:
        raise CheckpointCorruptError(f"{where} is damaged: it claims more than fits into memory") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointCorruptError(f"{where} is damaged: {type(error).__name__}: {error}") from None
