"""`TorchAsyncCheckpoint` of nvidia_resiliency_ext, over `ckpt.AsyncCallsQueue`: torch.save in the background.

    saver = TorchAsyncCheckpoint()
    saver.async_save(model.state_dict(), "model.pt")      # copies, and returns
    saver.finalize_async_save()                           # in each iteration; raises the error of a save that failed

nvidia_resiliency_ext is not imported, and need not be installed. A name of it that is not here is an ImportError that
says what to use.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import secrets
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ckpt import AsyncCallsQueue, AsyncRequest

if TYPE_CHECKING:
    # Where it is needed it is imported in functions: the writer process imports this module, and stays without torch.
    import torch

__all__ = ["TorchAsyncCheckpoint"]

_ON_OUR_QUEUE = (
    "use that of nvidia_resiliency_ext, and schedule its request on a ckpt.AsyncCallsQueue; or use ckpt.Checkpointer, "
    "whose steps torch.distributed.checkpoint reads with ckpt.integrations.dcp.Reader"
)
_LOCAL = (
    "use ckpt.Checkpointer(root, snapshots=ckpt.Snapshots(replicas=1)), whose restore() takes the newest step that is "
    "whole in the memory of the nodes; or that of nvidia_resiliency_ext, and schedule the request of its "
    "save(..., is_async=True) on a ckpt.AsyncCallsQueue"
)
_ELSEWHERE = {
    "FileSystemWriterAsync": _ON_OUR_QUEUE,
    "save_state_dict_async_plan": _ON_OUR_QUEUE,
    "save_state_dict_async_finalize": _ON_OUR_QUEUE,
    "CachedMetadataFileSystemReader": _ON_OUR_QUEUE,
    "LocalCheckpointManager": _LOCAL,
    "BasicTensorAwareStateDict": _LOCAL,
    "CliqueReplicationStrategy": _LOCAL,
}


def __getattr__(name: str) -> NoReturn:
    if name in _ELSEWHERE:
        raise ImportError(f"{name} is not in ckpt.integrations.nvrx: {_ELSEWHERE[name]}", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class TorchAsyncCheckpoint:
    """Writes files of `torch.save` in the background: each is whole, or it is not there.

    A file that is replaced stays until the new one is durable; a writer that is killed may leave a hidden file beside
    it, which ends with ``.tmp``. Each rank saves files of its own, in the order of its calls. All methods are for the
    thread that trains. If the object is dropped, or the trainer dies, the writer process finishes what was scheduled.

    For a checkpoint of all ranks use `ckpt.Checkpointer`: it is whole on all of them or absent, and stops training for
    a shorter time.
    """

    def __init__(self, persistent_queue: bool = True, *, timeout_s: float = 1800.0) -> None:
        """Start no process yet. `timeout_s` bounds every wait for saves.

        `persistent_queue` has no effect: the writer is always persistent.
        """
        self._queue = AsyncCallsQueue(no_dist=True, timeout_s=timeout_s)

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Do what `torch.save` does, in the foreground."""
        import torch

        torch.save(obj, f, *args, **kwargs)

    def async_save(self, state_dict: Any, f: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Serialize a state with `torch.save` in memory, and schedule writing it to the file `f`.

        The state may change afterwards. Tensors of a GPU, in dicts, lists and tuples, are stored as tensors of the CPU.
        A copy is in memory until the file is written, and a second one while this runs. Other arguments are those of
        `torch.save`. Raises what that raises, and TypeError if `f` is not the path of a file, with nothing scheduled.
        """
        import torch

        if not isinstance(f, str | os.PathLike) or "://" in (path := os.fspath(f)):
            raise TypeError(
                f"async_save writes to a file, in another process, not to {f!r}: give the path of a file; "
                "ckpt.Checkpointer(root) saves to object stores, and torch.save to file objects"
            )
        data = io.BytesIO()
        torch.save(_on_cpu(state_dict, {}), data, *args, **kwargs)
        request = AsyncRequest(_write, (os.path.abspath(path), data.getvalue()), [])
        self._queue.schedule_async_request(request)

    def finalize_async_save(self, blocking: bool = False, no_dist: bool = True, terminate: bool = False) -> None:
        """Forget the saves that are done; with `blocking` wait for all. Raises the error of the first that has failed.

        With ``no_dist=False``, all ranks call this together, and an error of one rank is raised on all. `terminate`
        ends the writer process afterwards; the next save starts another.
        """
        try:
            self._queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        finally:
            if terminate:
                self.close()

    def close(self, abort: bool = False) -> None:
        """Wait for all saves, end the writer process, and raise the error of the first save that has failed.

        With `abort` kill the writer: a save that is not done leaves no file, or the file that was there. Idempotent;
        the next save starts another writer.
        """
        self._queue.close(abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, without waiting: the writer finishes what was scheduled by itself."""
        self._queue.__exit__(kind, error, trace)


def _on_cpu(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a state with tensors of the CPU; a tensor that is there twice stays one."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu")
        return copies[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(each, copies) for each in value)
    if isinstance(value, dict):
        moved = copy.copy(value)  # with its attributes, such as the _metadata of a module's state dict
        moved.update({key: _on_cpu(each, copies) for key, each in value.items()})
        return moved
    return value


def _write(path: str, data: bytes) -> None:
    """Replace a file, durably and atomically. In the writer process, which has no torch."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)  # the new name
    finally:
        os.close(directory)
