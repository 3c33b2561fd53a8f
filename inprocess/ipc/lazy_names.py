"""Names of a package that are imported when they are first used, so that importing the package is cheap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str], modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    `names` maps each name to the module that defines it: by its full name, or with a leading dot relative to the
    package. ``"module:other"`` is for a name that is `other` there. `modules` are submodules that are attributes of the
    package without an import of their own. AttributeError for other names.
    """
    submodules = frozenset(modules)

    def get(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, other = names[name].partition(":")
        return getattr(import_module(module, package), other or name)

    def names_of() -> list[str]:
        return sorted({*getattr(sys.modules[package], "__all__", ()), *names, *submodules})

    return get, names_of
