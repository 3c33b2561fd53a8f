"""Import a package that a sink needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["optional"]


def optional(module: str, extra: str) -> Any:
    """Return the module. ImportError, naming what to install, if it is not there."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this sink needs {module}: pip install 'ckpt-inprocess[{extra}]'", name=module) from error
