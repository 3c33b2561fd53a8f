"""What to run in the background, and what to run in the trainer when it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ckpt.async_calls.agreement import Agreement, own_rank
from ckpt.errors import CheckpointError

__all__ = ["AsyncRequest", "CallTimer", "RecoverableCall", "check_preload_fn", "preloaded"]


class CallTimer(Protocol):
    """The time limit of one running call. All in the trainer, from within methods of the queue; must not raise."""

    def left_s(self) -> float | None:
        """How long the call may go on; None: for ever. When it is zero or less the writer is killed."""
        ...

    def overdue(self, pid: int | None) -> str:
        """The writer, this process, is about to be killed: why, as the end of a sentence."""
        ...

    def end(self, taken_s: float | None) -> None:
        """The call is over, and took so long; None if it did not do its work."""
        ...


@runtime_checkable
class RecoverableCall(Protocol):
    """An `async_fn` that stays in the trainer, and learns there when its call can no longer be finalized.

    What runs in the writer is its `in_writer`. It may also define ``on_event(event: dict) -> None``, which the trainer
    calls with every event that the writer sends by `WriterContext.report`, in order, from within a method of the queue;
    and ``on_begun(at_ns: int) -> CallTimer | None``, which is called when its turn has come, with the time of
    CLOCK_MONOTONIC. Any `async_fn` may define these two.
    """

    in_writer: Callable[..., Any]
    """Is pickled, and called in the writer with the arguments of the request."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same in the trainer, for `AsyncRequest.execute_sync`."""
        ...

    def abandoned(self, error: CheckpointError) -> CheckpointError | None:
        """The call failed, its writer died or was killed, or (`no_dist=False`) it failed on another rank. Returns the
        error to raise, or None if the call had done its work all the same: then it is finalized like any other.

        Called once, in the trainer, from whichever method of the queue notices; again if an exception was thrown into
        it from another thread. Unless it returns None no finalize function of the request will run.
        """
        ...


class AsyncRequest(NamedTuple):
    """One background call and the functions that finalize it.

    `async_fn` runs in a writer process with `async_fn_args` and `async_fn_kwargs`; None runs nothing. When it has
    returned, on all ranks if so asked, `finalize_fns` run in the trainer in order.

    `preload_fn` runs in the writer before `async_fn`; what it returns replaces the second of `async_fn_args`, the data.
    It gets no arguments: bind them with `functools.partial`. Like the arguments it is pickled when the request is
    scheduled, with the values that it refers to at that time. `call_idx` is the index of the call in its queue, which
    sets it.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    is_frozen: bool = False
    preload_fn: Callable[[], Any] | None = None
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Append `fn`. Raises RuntimeError when the request is frozen, which it is once scheduled."""
        if self.is_frozen:
            raise RuntimeError("cannot add a finalize function: the request is frozen, its call may already be running")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Run everything here and now, in this process: `preload_fn`, the function, then the finalize functions.

        Makes no collective. Raises what they raise; ValueError if `preload_fn` has no argument to replace.
        """
        if self.async_fn is not None:
            self.async_fn(*preloaded(self.async_fn_args, self.preload_fn), **self.async_fn_kwargs)
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run all finalize functions in order, whatever they raise, then raise the first exception. Returns `call_idx`.

        With `validate_matching_call_idx`, where torch.distributed is initialized, all ranks must call this together:
        one all_reduce compares `call_idx`. RuntimeError, and no finalize function runs, if ranks have different ones.
        """
        if validate_matching_call_idx and own_rank() is not None:
            smallest, minus_largest = Agreement(None).minimum(self.call_idx, -self.call_idx)
            if smallest != -minus_largest:
                raise RuntimeError(
                    f"ranks finalize different calls: their indices are {smallest} to {-minus_largest}, "
                    f"{self.call_idx} on this rank; all ranks must schedule and finalize the same requests in order"
                )
        first: Exception | None = None
        for fn in self.finalize_fns:
            try:
                fn()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return self.call_idx

    def freeze(self) -> AsyncRequest:
        """A copy that accepts no more finalize functions."""
        return self._replace(finalize_fns=list(self.finalize_fns), is_frozen=True)


def preloaded(args: tuple[Any, ...], preload_fn: Callable[[], Any] | None) -> tuple[Any, ...]:
    """Return the arguments of a call with what `preload_fn` returns in place of the second; as they are without one."""
    check_preload_fn(args, preload_fn)
    return args if preload_fn is None else (args[0], preload_fn(), *args[2:])


def check_preload_fn(args: tuple[Any, ...], preload_fn: Callable[[], Any] | None) -> None:
    """ValueError if there is no second argument that `preload_fn` could replace."""
    if preload_fn is not None and len(args) < 2:
        raise ValueError(f"preload_fn replaces the second of async_fn_args, but there are only {len(args)}")
