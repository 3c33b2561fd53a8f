"""A call on its way to a writer, pickled by value where needed, in a memfd."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from ckpt.async_calls.request import preloaded
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["Call", "Payload", "load"]


@dataclass(frozen=True)
class Call:
    """What a writer runs: `AsyncRequest` without what stays in the trainer."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    preload_fn: Callable[[], Any] | None = None

    def run(self) -> None:
        """Run it here. Raises what its functions raise."""
        self.fn(*preloaded(self.args, self.preload_fn), **self.kwargs)


class Payload:
    """The pickled call and the shared memory regions it names. Trainer side; owns the memfd until `close`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        preload_fn: Callable[[], Any] | None = None,
    ) -> None:
        """Raises what pickling raises when something in the call cannot be pickled, ValueError for a closed region."""
        self.regions: dict[str, SharedMemory] = {}
        self.fd = os.memfd_create("ckpt-call", os.MFD_CLOEXEC)
        try:
            with open(self.fd, "wb", closefd=False) as file:
                _Pickler(file, self.regions).dump(Call(fn, args, dict(kwargs), preload_fn))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def load(fd: int, regions: Mapping[str, SharedMemory]) -> Call:
    """Writer side: the call in `fd`, with its regions put back. Raises whatever importing and unpickling raise."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)  # the offset is shared with the process that wrote it
        call: Call = _Unpickler(file, regions).load()
    return call


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any, regions: dict[str, SharedMemory]) -> None:
        super().__init__(file)
        self._regions = regions

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, SharedMemory):
            return None
        if value.closed:
            raise ValueError(f"{value!r} is an argument of a background call")
        self._regions[value.region_id] = value
        return value.region_id


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, regions: Mapping[str, SharedMemory]) -> None:
        super().__init__(file)
        self._regions = regions

    def persistent_load(self, region_id: str) -> SharedMemory:
        return self._regions[region_id]
