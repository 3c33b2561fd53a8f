"""The version of the package as it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]


def _installed() -> str:
    try:
        return version("ckpt-inprocess")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


__version__ = _installed()
