"""Background calls for code written for Megatron-LM, or for `nvidia_resiliency_ext.checkpointing.async_ckpt`.

    from ckpt.integrations.megatron import AsyncCallsQueue, AsyncRequest

Names, order of arguments and defaults are those of `megatron.core.dist_checkpointing.strategies.async_utils`, release
0.16. The calls run in `ckpt.AsyncCallsQueue`, which differs on purpose in some of them:

    here, as callers of Megatron expect                        ckpt.AsyncCallsQueue
    requests of Megatron's own class are accepted              its own class
    preload_fn runs in the trainer, when scheduled             in the writer
    ranks finalize together unless no_dist=True                unless no_dist=False
    a function added to a scheduled request still runs         the list was copied
    no collective while nothing is scheduled                   always one
    close() finalizes with all ranks, and may be followed      makes no collective; the end

Neither Megatron nor nvidia_resiliency_ext is imported. Nothing here imports torch in a writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ckpt
from ckpt import WriterConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "DistributedAsyncCaller",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
]


class AsyncRequest(NamedTuple):
    """One background call and the functions that finalize it, with the fields in the order of Megatron.

    `preload_fn`, which takes no arguments, runs when the request is scheduled, in the trainer; what it returns replaces
    the second of `async_fn_args`: it copies tensors from the GPU, so that they may change afterwards.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = MappingProxyType({})
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Append `fn`. Raises RuntimeError when the request is frozen."""
        _core(self).add_finalize_fn(fn)

    def execute_sync(self) -> None:
        """Run everything here and now: `preload_fn`, the function and, when all ranks have done so, what finalizes it.

        All ranks must call it together where torch.distributed is initialized: one small collective. Raises what the
        function raises, and on the other ranks CheckpointError; then no rank has finalized anything.
        """
        ranks = ckpt.Ranks()
        ranks.doing = "a request of Megatron-LM that runs here and now"
        with ranks.all_or_none("run a request of Megatron-LM"):
            _core(self)._replace(finalize_fns=[]).execute_sync()
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run all finalize functions in order; see `ckpt.AsyncRequest.execute_finalize_fns`."""
        return _core(self).execute_finalize_fns(validate_matching_call_idx)

    def freeze(self) -> AsyncRequest:
        """Return a copy that accepts no more finalize functions."""
        return self._replace(is_frozen=True)


class _WarmupPersistentCaller:
    """A method that can be called on a queue, which it starts, and on the class, where it has no effect."""

    def __get__(self, queue: AsyncCallsQueue | None, kind: type) -> Callable[..., None]:
        on_class: Callable[..., None] = ckpt.AsyncCallsQueue.warmup_persistent_caller

        @wraps(on_class)
        def warmup_persistent_caller(*args: Any, **options: Any) -> None:
            on_class(*args, **options)  # TypeError for other arguments
            if queue is not None:
                queue.start()

        return warmup_persistent_caller


class Request(Protocol):
    """What is needed of a request: also those of Megatron and of nvidia_resiliency_ext, of old releases, too."""

    @property
    def async_fn(self) -> Callable[..., Any] | None: ...
    @property
    def async_fn_args(self) -> Sequence[Any]: ...
    @property
    def finalize_fns(self) -> list[Callable[[], Any]]: ...


class AsyncCallsQueue:
    """Runs requests in a writer process, and finalizes them in order on all ranks.

    All methods are for one thread of the trainer. All ranks schedule the same requests (`async_fn` may be None on some)
    and call the same methods with the same arguments.
    """

    def __init__(
        self,
        persistent: bool = False,
        is_daemon: bool = True,
        cpu_priority: int | None = None,
        io_priority: int | None = None,
        sigterm_timeout: float | None = None,
        cpu_shm_mode: bool = True,
        *,
        config: WriterConfig | None = None,
        process_group: ProcessGroup | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Start no process yet. For the parameters see `ckpt.AsyncCallsQueue`: `persistent` has no effect."""
        self._new = partial(
            ckpt.AsyncCallsQueue,
            persistent,
            is_daemon,
            cpu_priority,
            io_priority,
            sigterm_timeout,
            cpu_shm_mode,
            config=config,
            process_group=process_group,
            timeout_s=timeout_s,
        )
        self._queue: ckpt.AsyncCallsQueue | None = self._new()

    def schedule_async_request(self, async_request: Request) -> int:
        """Run `preload_fn`, start the call in the background, and return its index: 0, 1, ... since the last `close`.

        The arguments are pickled: they may change when this returns. Raises what `preload_fn` and pickling raise, and
        ValueError if there is no second argument to replace; nothing is queued then.
        """
        request = _for_writer(async_request)
        if self._queue is None:
            self._queue = self._new()
        return self._queue.schedule_async_request(request)

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the calls that are done on all ranks, in order, and return their indices.

        `blocking` waits for all calls scheduled so far. With `no_dist` each rank finalizes its own. Makes one
        all_reduce of two numbers while a call is scheduled, otherwise no collective. Raises what
        `ckpt.AsyncCallsQueue.maybe_finalize_async_calls` raises: on all ranks, if a call failed on one.
        """
        if self._queue is None or not self._queue.get_num_unfinalized_calls():
            return []
        return self._queue.maybe_finalize_async_calls(blocking, no_dist)

    def get_num_unfinalized_calls(self) -> int:
        """Return how many calls are scheduled and neither finalized nor dropped."""
        return 0 if self._queue is None else self._queue.get_num_unfinalized_calls()

    warmup_persistent_caller = _WarmupPersistentCaller()
    """`start` under the name in Megatron-LM; on the class it has no effect."""

    def start(self) -> None:
        """Start the writer process in the background."""
        if self._queue is None:
            self._queue = self._new()
        self._queue.start()

    def close(self, abort: bool = False) -> None:
        """Wait for all calls and finalize them together with the other ranks, end the process, raise the first failure.

        With `abort` kill the process instead: no finalize function runs, and no collective is made. The same is done
        with calls that cannot be finalized within `timeout_s`. A request that is scheduled later starts a new process.
        """
        queue, self._queue = self._queue, None
        if queue is None:
            return
        first: Exception | None = None
        while not abort and (pending := queue.get_num_unfinalized_calls()):
            try:
                queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
            except Exception as error:
                first = first or error
                abort = queue.get_num_unfinalized_calls() == pending
        queue.close(abort)
        if first is not None:
            raise first


class _Caller:
    """What the two classes of callers have in common."""

    def __init__(
        self, config: WriterConfig | None = None, process_group: ProcessGroup | None = None, timeout_s: float = 1800.0
    ) -> None:
        """Start no process yet."""
        self._queue = AsyncCallsQueue(config=config, process_group=process_group, timeout_s=timeout_s)
        self._ranks = ckpt.Ranks(process_group, timeout_s)
        self._ranks.doing = "which calls run in the background"

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether no call is running: on any rank, unless `no_dist`. `blocking` waits until it is done.

        Raises a CheckpointError when the call failed.
        """
        self._queue.maybe_finalize_async_calls(blocking, no_dist)
        return self._queue.get_num_unfinalized_calls() == 0

    def sync_all_async_calls(self, is_alive: bool | int) -> bool:
        """Return whether `is_alive` is false on all ranks, which must call this together."""
        return self._ranks.maximum(bytes([bool(is_alive)])) == b"\0"

    def close(self, abort: bool = False) -> None:
        """Wait for the calls, or kill them with `abort`, and end the process; see `AsyncCallsQueue.close`."""
        self._queue.close(abort)


class AsyncCaller(_Caller):
    """One writer process without the queue: runs requests without finalizing them. For one thread of the trainer."""

    def schedule_async_call(self, async_req: Request) -> None:
        """Run `preload_fn`, and start the call in the background."""
        self._queue.schedule_async_request(_for_writer(async_req)._replace(finalize_fns=[]))


PersistentAsyncCaller = TemporalAsyncCaller = AsyncCaller


class DistributedAsyncCaller(_Caller):
    """The same for a function and its arguments, as in Megatron up to 0.10 and nvidia_resiliency_ext up to 0.2."""

    def schedule_async_call(
        self,
        async_fn: Callable[..., Any] | None,
        save_args: Sequence[Any],
        save_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start the call in the background."""
        self._queue.schedule_async_request(AsyncRequest(async_fn, save_args, [], save_kwargs))


def _core(request: Any) -> ckpt.AsyncRequest:
    """Return a request of Megatron, of any release, as one of ours, with the same list of finalize functions."""
    return ckpt.AsyncRequest(
        request.async_fn,
        tuple(request.async_fn_args),
        request.finalize_fns,
        dict(getattr(request, "async_fn_kwargs", None) or {}),
        request.is_frozen,
        getattr(request, "preload_fn", None),
        getattr(request, "call_idx", 0),
    )


def _for_writer(request: Any) -> ckpt.AsyncRequest:
    """Return the request to schedule for one of Megatron, after its `preload_fn` has run; one of ours as it is."""
    if isinstance(request, ckpt.AsyncRequest):
        return request
    call = _core(request)
    fn, args = call.async_fn, call.async_fn_args
    if fn is not None and call.preload_fn is not None:
        if len(args) < 2:
            raise ValueError(f"preload_fn replaces the second of async_fn_args, but there are only {len(args)}")
        args = (args[0], call.preload_fn(), *args[2:])
    return ckpt.AsyncRequest(
        fn,
        args if fn is not None else (),
        [partial(ckpt.AsyncRequest(None, (), request.finalize_fns).execute_finalize_fns, False)],
        call.async_fn_kwargs,
    )
