"""Strategies for Megatron-core: `dist_checkpointing` saves a step of ckpt, and loads it with any TP, PP and DP.

    dist_checkpointing.save(sharded_state_dict, "ckpts/iter_0000100", CkptSaveStrategy())
    dist_checkpointing.load(sharded_state_dict, "ckpts/iter_0000100", CkptLoadStrategy())

    ckpts/iter_0000100/
        common.pt               by Megatron, before the step; what is in it is in the step, too
        step_00000100/          published by all ranks or by none
        metadata.json           by Megatron, after the step; without it Megatron loads nothing

The directory is a checkpoint root. In a save of a directory that has a step already, that stays until the new one is
published. All methods are for the thread that trains, and collective, but for those that load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch

import ckpt
from ckpt import (
    AsyncCallsQueue,
    AsyncRequest,
    Checkpoint,
    Checkpointer,
    CheckpointError,
    LazyTensor,
    Leaves,
    Staging,
    StateError,
)

try:
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy,
        LoadCommonStrategy,
        LoadShardedStrategy,
        StrategyAction,
        register_default_strategy,
    )
except ImportError as error:
    raise ImportError(
        "ckpt.integrations.megatron needs megatron-core 0.16: pip install 'ckpt-inprocess[megatron]'"
    ) from error

from ckpt.integrations.megatron_common import common_save
from ckpt.integrations.megatron_leaves import (
    COMMON_FILE,
    MegatronLeaves,
    TensorAt,
    add_leaves,
    check_flat,
    digest_of,
    leaves_of,
    nested_map,
    object_keys,
    sharded_values,
    with_axes,
)

__all__ = ["CkptLoadStrategy", "CkptSaveStrategy", "register_strategies"]

_BACKEND, _VERSION = "ckpt", 1
_NUMBER = re.compile(r"(\d{1,18})$", re.ASCII)
_OPEN_SAVES = 2  # of different directories, each with memory for a whole state
_SHOWN = 20


def register_strategies(save: CkptSaveStrategy | None = None) -> None:
    """Let Megatron find the strategies by the name of the backend, ``("ckpt", 1)``: also to load, by metadata.json.

    `save` is the one that saves (None: a new one).
    """
    register_default_strategy(StrategyAction.SAVE_SHARDED, _BACKEND, _VERSION, save or CkptSaveStrategy())
    register_default_strategy(StrategyAction.LOAD_SHARDED, _BACKEND, _VERSION, CkptLoadStrategy())


# -- saving ------------------------------------------------------------------------------------------------------------


class CkptSaveStrategy(AsyncSaveShardedStrategy):
    """Saves the sharded state dict of Megatron-core as a step of ckpt: by all ranks, or not at all.

    One object for all saves of a job. Main replicas are written, those that Megatron names: `replica_id` is 0.
    What Megatron's FullyParallelSaveStrategyWrapper distributes, it distributes with this strategy, too.

    With ``async_sharded_save=True`` the state is copied to shared memory, and may change as soon as `save` returns. The
    request that Megatron returns is for `queue`, and for no other one::

        strategy.queue.schedule_async_request(request)
        strategy.queue.maybe_finalize_async_calls()      # in each iteration, on all ranks

    If the save fails, that raises a `ckpt.CheckpointError` on all ranks, and no finalize function runs: metadata.json
    is not written.
    """

    def __init__(
        self,
        *,
        queue: AsyncCallsQueue | None = None,
        staging: Staging | None = None,
        timeout: timedelta | float = timedelta(minutes=10),
    ) -> None:
        """Start and write nothing yet.

        `queue` is left open by `close`; None: one of this strategy. `staging` and `timeout` are those of
        `ckpt.Checkpointer`.
        """
        super().__init__(_BACKEND, _VERSION)
        common_save()  # from now on, also the saves of Megatron's own strategies write common.pt through it
        self._given_queue = queue
        self._own_queue: AsyncCallsQueue | None = None
        self._staging = staging
        self._timeout = timeout
        self._open: list[Checkpointer] = []

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are in the step."""
        return True

    @property
    def queue(self) -> AsyncCallsQueue:
        """The queue for the requests of asynchronous saves. It finalizes with all ranks."""
        if self._given_queue is not None:
            return self._given_queue
        if self._own_queue is None:
            self._own_queue = AsyncCallsQueue(timeout_s=self._timeout_s)
        return self._own_queue

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save, and return when the step is published. Earlier calls of `queue` are finalized, too. Collective.

        Raises StateError, on all ranks, for what one of them cannot store, and what `Checkpointer.save` raises.
        Failures of earlier calls are left for the next `maybe_finalize_async_calls` of `queue`.
        """
        request = self.async_save(sharded_state_dict, checkpoint_dir)
        own, outcome = AsyncRequest(None, (), list(request.finalize_fns)), list[Exception | None]()

        def finalize() -> None:
            try:
                own.execute_finalize_fns(validate_matching_call_idx=False)
            except Exception as error:
                outcome.append(error)
            else:
                outcome.append(None)

        request.finalize_fns[:] = [finalize]
        self.queue.schedule_async_request(request)
        failures = self._finalize_all()
        # The last call: if it is not finalized, the last failure is its own, or the deadline of the wait for it.
        error = outcome[0] if outcome else failures.pop()
        self.queue.raise_later(failures)
        if error is not None:
            raise error

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> AsyncRequest:
        """Copy this rank's main replicas, and return the request that writes them, for `queue`. Collective."""
        if len(self._open) >= _OPEN_SAVES:
            self._finalize_earlier()
        self._close_finalized()
        root = os.fspath(checkpoint_dir)
        if "://" in root:
            raise CheckpointError(
                f"{root}: Megatron writes common.pt and metadata.json beside the step, to a directory"
            )
        ranks = ckpt.Ranks(None, self._timeout_s)
        ranks.doing = f"a save of Megatron to {root}"
        state = _state(sharded_state_dict, root, ranks)
        checkpointer = Checkpointer(root, keep=1, queue=self.queue, staging=self._staging, timeout=self._timeout)
        self._open.append(checkpointer)
        step = max([_number_of(root), *(step + 1 for step in checkpointer.recover())])
        return _OwnRequest(*checkpointer.save_request(state, step))

    def close(self) -> None:
        """Finalize all saves, end the processes and free the memory. Collective. Idempotent."""
        queue, self._own_queue = self._own_queue, None
        try:
            if queue is not None:
                queue.close()
            elif self._given_queue is not None and self._open:
                self._finalize_earlier()
        finally:
            self._close_finalized()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, without waiting: the writers finish what was scheduled by themselves."""
        if error is None:
            self.close()
            return
        queue, self._own_queue = self._own_queue, None
        while self._open:
            self._open.pop().__exit__(kind, error, trace)
        if queue is not None:
            queue.__exit__(kind, error, trace)

    @property
    def _timeout_s(self) -> float:
        return self._timeout.total_seconds() if isinstance(self._timeout, timedelta) else self._timeout

    def _finalize_all(self) -> list[Exception]:
        """Finalize all calls of the queue, of whatever owner, and return their failures in order."""
        failures: list[Exception] = []
        try:
            self.queue.finalize_all(no_dist=False, check=failures.append)
        finally:
            self._close_finalized()
        return failures

    def _finalize_earlier(self) -> None:
        """Finalize all calls, and leave their failures for the queue. CheckpointTimeoutError if some are left."""
        failures = self._finalize_all()
        late = failures.pop() if self._open else None
        self.queue.raise_later(failures)
        if late is not None:
            raise late

    def _close_finalized(self) -> None:
        """Free the memory of saves that are decided. In no finalize function: it waits for processes."""
        queue = self._given_queue or self._own_queue
        if queue is None or not queue.get_num_unfinalized_calls():
            while self._open:
                self._open.pop().close()


class _OwnRequest(AsyncRequest):
    """A request that only a queue of ckpt can run: others call `freeze` before they start a process."""

    __slots__ = ()

    def freeze(self) -> AsyncRequest:
        raise CheckpointError(
            "this save runs in the writer process of CkptSaveStrategy: schedule its request on the `queue` of the "
            "strategy, a ckpt.AsyncCallsQueue, not on a queue of Megatron or nvidia_resiliency_ext"
        )


def _number_of(root: str) -> int:
    """Return the number of the step that is saved to a new directory."""
    match = _NUMBER.search(os.path.basename(root.rstrip("/")))
    return 0 if match is None else int(match[1])


def _state(sharded_state_dict: Any, root: str, ranks: ckpt.Ranks) -> Any:
    """Return the leaves that this rank saves. Collective; StateError on all ranks if one cannot store something."""
    leaves, problem = Leaves(), None
    try:
        common = common_save().take(root) if ranks.rank == 0 else None
        digest = digest_of(root) if ranks.rank == 0 else None
        if digest is not None and common is None:
            # Of another save, or of anyone: it is not read, and a load would mix it with this step.
            raise StateError(
                f"{root}/{COMMON_FILE} was not written by this save: save with dist_checkpointing.save, or to a "
                "directory without that file"
            )
        with torch.no_grad():
            add_leaves(leaves, sharded_state_dict, common, digest)
    except Exception as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return leaves.state(ranks, problem)


# -- loading -----------------------------------------------------------------------------------------------------------


class CkptLoadStrategy(LoadShardedStrategy):
    """Loads what `CkptSaveStrategy` has saved: each rank reads the boxes that it needs, and verifies their checksums.

    No file of the step is unpickled. Megatron unpickles common.pt; ``common_strategy=strategy.common`` reads the common
    state from the step instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_common_of_step = False  # in this load the common state is that of the step; see `_CommonOfStep`

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are in the step."""
        return True

    @property
    def common(self) -> LoadCommonStrategy:
        """The strategy that loads the common state from the step, for the same load."""
        return _CommonOfStep(self)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise CheckpointingException for a checkpoint that was not saved by `CkptSaveStrategy`."""
        # Megatron begins each load with this check, and goes on with that of the common strategy. `load` cannot end
        # what was noted for one load: FullyParallelLoadStrategyWrapper calls it twice.
        self._has_common_of_step = False
        if loaded_backend != _BACKEND:
            raise CheckpointingException(
                f"this checkpoint has the backend {loaded_backend!r}: load it without sharded_strategy, or save it "
                f"again with CkptSaveStrategy; CkptLoadStrategy loads {_BACKEND!r}"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise CheckpointingException for a version that is not known."""
        if loaded_version > _VERSION:
            raise CheckpointingException(
                f"this checkpoint has version {loaded_version} of the backend {_BACKEND!r}, and this package knows "
                f"{_VERSION}: a newer one loads it"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Return the state dict with tensors and objects in place of sharded ones; tensors are filled in place.

        Raises CheckpointingException, listing every name, for what is not in the step or has another shape, before
        anything is read; and what `ckpt.open` and `Checkpoint.read_into` raise.
        """
        root = os.fspath(checkpoint_dir)
        with _opened(root) as checkpoint, checkpoint.restoring():
            leaves = leaves_of(checkpoint)
            self._check_common(root, leaves)
            _check(checkpoint, leaves, sharded_values(sharded_state_dict))
            wanted: list[tuple[LazyTensor, tuple[int, ...], torch.Tensor]] = []

            def replaced(value: Any) -> Any:
                if isinstance(value, ShardedTensor):
                    return _target(value, leaves.tensors[value.key], wanted)
                return leaves.value(object_keys(value))

            with torch.no_grad():
                result = nested_map(sharded_state_dict, replaced)
                checkpoint.read_into(wanted)
        return result

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Return a ShardedTensor without data for each tensor, by its key."""
        with _opened(os.fspath(checkpoint_dir)) as checkpoint:
            return _without_data(leaves_of(checkpoint))

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Return the result of `load_tensors_metadata`, and an empty ShardedObject for each shard of an object."""
        with _opened(os.fspath(checkpoint_dir)) as checkpoint:
            leaves = leaves_of(checkpoint)
            return {each.unique_key: each for each in leaves.objects()} | _without_data(leaves)

    def remove_sharded_tensors(self, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        """Raise CheckpointingException: a published step is not changed."""
        raise CheckpointingException(
            f"{os.fspath(checkpoint_dir)} has a published step, which is never changed: load it, and save what is to "
            f"stay without {key_prefix!r} to another directory"
        )

    def _check_common(self, root: str, leaves: MegatronLeaves) -> None:
        if not self._has_common_of_step and leaves.common_digest not in (None, digest_of(root)):
            raise CheckpointingException(
                f"{root}/common.pt is not the one that was saved with the step: a save to the same directory was "
                "interrupted, or the file is damaged. The step has the common state, too: "
                "dist_checkpointing.load(..., sharded_strategy=strategy, common_strategy=strategy.common)"
            )


class _CommonOfStep(LoadCommonStrategy):
    """Loads the common state from the step, and not from common.pt."""

    def __init__(self, strategy: CkptLoadStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Accept each: common.pt is not read."""
        self._strategy._has_common_of_step = True

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Accept each: common.pt is not read."""

    def load_common(self, checkpoint_dir: str | os.PathLike[str]) -> dict[Any, Any]:
        """Return the common state. Raises what `ckpt.open` raises."""
        root = os.fspath(checkpoint_dir)
        with _opened(root) as checkpoint:
            common = leaves_of(checkpoint).common()
        self._strategy._has_common_of_step = True
        return common

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Load objects from the step."""
        return self._strategy.load(sharded_objects_state_dict, checkpoint_dir)


def _opened(root: str) -> Checkpoint:
    ckpt.register_encoder(TensorAt)
    return ckpt.open(root)


def _check(checkpoint: Checkpoint, leaves: MegatronLeaves, values: Iterable[Any]) -> None:
    """Raise CheckpointingException for all that the step does not have as it is asked for."""
    problems = []
    for value in values:
        if isinstance(value, ShardedObject):
            if not leaves.has_value(object_keys(value)):
                problems.append(f"the object {value.unique_key} is not there")
            continue
        check_flat(value)
        stored = leaves.tensors.get(value.key)
        wanted = tuple(value.global_shape)
        if stored is None:
            problems.append(f"{value.key} is not there")
        elif len(stored.shape) != len(wanted) or not (value.allow_shape_mismatch or stored.shape == wanted):
            problems.append(f"{value.key}: Global shape mismatch for loaded ({stored.shape}) and expected ({wanted})")
    if problems:
        distinct = list(dict.fromkeys(problems))
        more = f"; and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
        raise CheckpointingException(
            f"{checkpoint.path} does not have what is to be loaded: {'; '.join(distinct[:_SHOWN])}{more}"
        )


def _target(
    sharded: ShardedTensor, stored: LazyTensor, wanted: list[tuple[LazyTensor, tuple[int, ...], torch.Tensor]]
) -> torch.Tensor:
    """Return the tensor of a sharded one, and note what is to be read into it: where the stored one has elements."""
    data: torch.Tensor
    if sharded.data is None:
        make: Callable[..., torch.Tensor] = torch.zeros if sharded.allow_shape_mismatch else torch.empty
        data = make(sharded.local_shape, dtype=sharded.dtype)
    else:
        data = sharded.data.detach()
        if sharded.allow_shape_mismatch:
            data.zero_()
    target, offset = with_axes(sharded, data), tuple(sharded.global_offset)
    both = [min(at + n, size) - at for at, n, size in zip(offset, target.shape, stored.shape, strict=True)]
    if min(both, default=1) > 0:
        wanted.append((stored, offset, target[tuple(slice(size) for size in both)]))
    return data


def _without_data(leaves: MegatronLeaves) -> dict[str, ShardedTensor]:
    """Return each tensor as one shard without data."""
    result = {}
    for key, tensor in leaves.tensors.items():
        like = torch.empty(tensor.shape, dtype=vars(torch)[tensor.dtype], device="meta")
        result[key] = ShardedTensor.from_rank_offsets(key, like).without_data()
    return result
