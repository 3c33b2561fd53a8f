"""Objects that own something of this process, and are not copied."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex


class Uncopied:
    """Refuses `copy.copy`, `copy.deepcopy` and pickling, with a TypeError.

    For what owns processes, threads, descriptors or leases: a copy would have the same ones, and close them when it is
    closed or collected.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self)
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be copied or pickled: it owns processes, descriptors or "
            "leases of this process. Keep it out of what is copied (the state, hyperparameters, an EMA of a module), "
            "or make a new one there"
        )

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(4)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(4)
