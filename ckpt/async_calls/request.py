"""A request for a background call, and the work that its writer gets.

The fields, their order and their meaning are those of nvidia_resiliency_ext and Megatron-LM, whose requests are taken,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ckpt.async_calls.settled import exchange_failures, failed_elsewhere
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.failure import Failure
from ckpt.ranks.group import own_rank

_SYNC_S = 1800.0  # for the other ranks to do the same in their processes


class Request(Protocol):
    """The fields that a request must have, of this package or another one.

    `async_fn_kwargs` and `preload_fn`, which old releases do not have, are used if they are there.
    """

    @property
    def async_fn(self) -> Callable[..., Any] | None:
        """The function to call in the writer; None runs nothing."""
        ...

    @property
    def async_fn_args(self) -> Sequence[Any]:
        """Its arguments."""
        ...

    @property
    def finalize_fns(self) -> list[Callable[[], Any]]:
        """The functions to call in the trainer afterwards."""
        ...


class AsyncRequest(NamedTuple):
    """One background call and the functions that finalize it.

    `async_fn` runs in a writer process with `async_fn_args` and `async_fn_kwargs`; None runs nothing. When it has
    returned, on all ranks unless `no_dist` is given, `finalize_fns` run in the trainer in order.

    `preload_fn` runs when the request is scheduled, in the trainer; what it returns replaces the second of
    `async_fn_args`, the data: it copies tensors from the GPU, so that they may change afterwards. It gets no arguments:
    bind them with `functools.partial`. `call_idx` is the index of the call in its queue, which sets it.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = MappingProxyType({})
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Append `fn`. Raises RuntimeError when the request is frozen.

        It runs also if the request has been scheduled, unless its call is finalized already.
        """
        if self.is_frozen:
            raise RuntimeError("cannot add a finalize function: this request is frozen; add it to the one that is not")
        self.finalize_fns.append(fn)

    def execute_sync(self, no_dist: bool = False) -> None:
        """Run everything here and now: `preload_fn`, the function and, when all ranks have done so, what finalizes it.

        All ranks must call it together where torch.distributed is initialized, unless `no_dist`: one small collective.
        Raises what the functions raise, on the other ranks a CheckpointError if `async_fn` failed on one: then no rank
        has finalized anything. ValueError if `preload_fn` has no argument to replace.
        """
        own: Exception | None = None
        try:
            if self.async_fn is not None:
                work_of(self, self.async_fn).run()
        except Exception as error:
            own = error
        together = not no_dist and own_rank() is not None
        failure = None if own is None else Failure.of(own, own_rank())
        failures = exchange_failures(failure, Ranks(timeout_s=_SYNC_S)) if together else []
        if own is not None:
            raise own
        if failures:
            raise failed_elsewhere("a request that was executed at once", failures)
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run all finalize functions in order, whatever they raise, then raise the first exception. Returns `call_idx`.

        With `validate_matching_call_idx`, where torch.distributed is initialized, all ranks must call this together:
        one all_reduce compares `call_idx`. RuntimeError, and no finalize function runs, if ranks have different ones.
        """
        if validate_matching_call_idx and own_rank() is not None:
            least, minus_largest = Ranks().minimum(self.call_idx, -self.call_idx)
            if least != -minus_largest:
                raise RuntimeError(
                    f"ranks finalize different calls: their indices are {least} to {-minus_largest}, "
                    f"{self.call_idx} on this rank; all ranks must schedule and finalize the same requests in order"
                )
        first = run_all(self.finalize_fns)
        if first is not None:
            raise first
        return self.call_idx

    def freeze(self) -> AsyncRequest:
        """Return a request that accepts no more finalize functions. It has those that this one gets later, too."""
        return self._replace(is_frozen=True)


@dataclass(frozen=True)
class Work:
    """The part of a request that runs in a writer."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> None:
        """Run it here. Raises what its function raises."""
        self.fn(*self.args, **self.kwargs)


def as_request(request: Request, call_idx: int) -> AsyncRequest:
    """Return a request of any package as one for this call, frozen, with the same list of finalize functions."""
    return AsyncRequest(
        request.async_fn,
        tuple(request.async_fn_args),
        request.finalize_fns,
        dict(getattr(request, "async_fn_kwargs", None) or {}),
        getattr(request, "preload_fn", None),
        True,
        call_idx,
    )


def work_of(request: AsyncRequest, fn: Callable[..., Any]) -> Work:
    """Run `preload_fn`, and return the work when `fn` is called as the request says.

    Raises what `preload_fn` raises, and ValueError if there is no argument that it could replace.
    """
    args = tuple(request.async_fn_args)
    if request.preload_fn is not None:
        if len(args) < 2:
            raise ValueError(f"preload_fn replaces the second of async_fn_args, but there are only {len(args)}")
        args = (args[0], request.preload_fn(), *args[2:])
    return Work(fn, args, dict(request.async_fn_kwargs))


def run_all(fns: Iterable[Callable[[], Any]]) -> Exception | None:
    """Run all functions, whatever they raise; return the first exception."""
    first: Exception | None = None
    for fn in fns:
        try:
            fn()
        except Exception as error:
            first = first or error
    return first
