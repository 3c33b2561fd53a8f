"""One function at a time in a background process, without a queue of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpt.async_calls.queue import AsyncCallsQueue
from ckpt.async_calls.request import AsyncRequest
from ckpt.async_calls.writer_config import WriterConfig
from inprocess.ipc.uncopied import Uncopied

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DistributedAsyncCaller"]


class DistributedAsyncCaller(Uncopied):
    """Runs one function at a time in a background process. For one thread of the trainer."""

    def __init__(
        self, config: WriterConfig | None = None, process_group: ProcessGroup | None = None, timeout_s: float = 1800.0
    ) -> None:
        self._queue = AsyncCallsQueue(config=config, process_group=process_group, timeout_s=timeout_s)

    def schedule_async_call(
        self,
        async_fn: Callable[..., Any] | None,
        save_args: Sequence[Any],
        save_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start the call in the background. Raises RuntimeError while the previous one is not known to be done."""
        if self._queue.get_num_unfinalized_calls():
            raise RuntimeError(
                "the previous call is still running; wait with is_current_async_call_done(blocking=True)"
            )
        self._queue.schedule_async_request(AsyncRequest(async_fn, save_args, [], save_kwargs))

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether no call is running on any rank; all ranks must call this. With `no_dist` only on this one.

        Raises a CheckpointError when the call failed (once; the next call gets a new writer if need be),
        CheckpointTimeoutError as `AsyncCallsQueue.maybe_finalize_async_calls` does.
        """
        self._queue.maybe_finalize_async_calls(blocking, no_dist)
        return self._queue.get_num_unfinalized_calls() == 0

    def close(self, abort: bool = False) -> None:
        """Wait for the call, or kill it with `abort`, and end the process. Idempotent."""
        self._queue.close(abort)
