"""Options of a storage: what an SDK would take from the environment, credentials among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["StorageOptions"]

_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_")


@dataclass(frozen=True, slots=True, repr=False)
class StorageOptions:
    """Options by name, and the longest time in seconds that a request is repeated while the storage fails.

    They reach the writer processes with the task of a save, over a socket, and nothing else: the text of this object
    has only their names.
    """

    given: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 600.0

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, timeout_s: float) -> StorageOptions:
        """Return `options`, and what the environment has (``AWS_...``, ``GOOGLE_...``, ``AZURE_...``).

        Both are taken here, so that a writer process, whose environment may be older, has the same. TypeError for an
        option that is no text, number or bool.
        """
        environment = {name.lower(): value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
        found = {}
        for name, value in (options or {}).items():
            if not isinstance(value, str | bool | int | float):
                raise TypeError(f"storage_options[{name!r}] is a {type(value).__name__}, not a string, number or bool")
            found[name.lower()] = str(value).lower() if isinstance(value, bool) else str(value)
        return cls(tuple(sorted(found.items())), tuple(sorted(environment.items())), timeout_s)

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(name for name, _ in self.given)})"
