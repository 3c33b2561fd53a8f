"""Hooks that free a main thread from whatever blocks it, and stop what must not run on."""

from __future__ import annotations

import abc
import logging
import os
import sys
import time
from pathlib import Path

from inprocess.state import FrozenState
from inprocess.unblock.gloo import break_gloo_connections, connect_as_missing_peers
from inprocess.unblock.gloo_waits import end_gloo_waits
from inprocess.unblock.process_groups import abort_nccl, destroy_groups, discard_process_groups
from inprocess.unblock.store_waits import break_store_wait

__all__ = [
    "Abort",
    "AbortPersistentCheckpointProcesses",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
    "discard_process_groups",
    "dump_flight_recorder",
    "flight_recorder_files",
    "unblock_main_thread",
]

_log = logging.getLogger(__name__)
_SETTLE_S = 0.005
_SETTLE_PASSES = 2
_TRACE_PATH_VARIABLES = ("INPROCESS_FR_TRACE_PATH", "NVRX_FR_TRACE_PATH")
_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class Abort(abc.ABC):
    """Called once per incident on every rank that has not died, before the wrapped function is unwound.

    Runs on the monitor thread while the main thread still executes the wrapped function or is blocked in it. Returns
    the state it was given. What it raises is logged and otherwise ignored. If it has not ended when the hard timeout is
    over, the rank is killed.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState: ...


class AbortTorchDistributed(Abort):
    """Ends all process groups of torch: blocked collectives fail, and new groups can be created afterwards.

    Gloo operations, and waits for other ranks in the creation of a group, end with an error within a few milliseconds;
    `inprocess.unblock.gloo` and `inprocess.unblock.store_waits` list what cannot be freed and lasts until its own
    timeout. NCCL communicators are aborted concurrently. Then the groups are destroyed. Without groups it does nothing.

    `torch_fr_trace_path` is a folder for the flight recorder (see `dump_flight_recorder`); by default it is read from
    the environment. `timeout` bounds, in seconds, the abort of NCCL and the destruction, each.
    """

    def __init__(self, torch_fr_trace_path: str | os.PathLike[str] | None = None, timeout: float = 30.0) -> None:
        self.torch_fr_trace_path = torch_fr_trace_path
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        if "torch.distributed" not in sys.modules:
            return state
        started = time.monotonic()
        freed = unblock_main_thread()
        try:
            dump_flight_recorder(self.torch_fr_trace_path, state)
        except Exception:
            _log.exception("cannot write the flight recorder")
        nccl = abort_nccl(self.timeout)
        destroy_groups(self.timeout)
        _log.debug(
            "abort: %d connections broken, %d NCCL backends aborted, %.3f s", freed, nccl, time.monotonic() - started
        )
        return state


class AbortTransformerEngine(Abort):
    """Frees the user buffers of Transformer Engine and resets its FP8 state, if it is loaded."""

    def __call__(self, state: FrozenState) -> FrozenState:
        # Only a loaded module has state; importing it here, on another thread, could block on the import lock.
        base = sys.modules.get("transformer_engine.pytorch.module.base")
        if base is not None and hasattr(base, "destroy_ub"):
            base.destroy_ub()
        for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
            manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
            if manager is not None:
                manager.reset()
                break
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Kills the background writers of nvidia_resiliency_ext, if that is loaded.

    The writers of `ckpt` are not killed: they outlive a restart, so that a save which is already complete in memory is
    published. `ckpt.restart.CheckpointFinalize` fences them.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        loaded = sys.modules.get("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
        kill = getattr(loaded, "abort_nvrx_checkpoint", None)
        if kill is not None:
            kill()
        return state


def unblock_main_thread(timeout: float = 0.3) -> int:
    """Break all gloo connections and those that the creation of a group waits on; end gloo's waits; return how many.

    Repeats until no new connection is found, because a group that is being created opens connections one after the
    other: at most about `timeout` seconds, twice that during the creation of a group; about 10 ms if nothing is
    blocked. To be called repeatedly, from any thread but the main one, until the main thread has left the wrapped
    function: it may just have begun to create another group.
    """
    deadline = time.monotonic() + timeout
    broken = quiet = 0
    while quiet < _SETTLE_PASSES and time.monotonic() < deadline:
        new = break_gloo_connections(max(deadline - time.monotonic(), 0.0)) + break_store_wait()
        new += end_gloo_waits()
        broken += new
        quiet = 0 if new else quiet + 1
        if quiet < _SETTLE_PASSES:
            time.sleep(_SETTLE_S)
    return broken + connect_as_missing_peers()


def dump_flight_recorder(folder: str | os.PathLike[str] | None, state: FrozenState) -> Path | None:
    """Write the flight recorder of torch, which knows the last collectives of every process group; return the path.

    The file is `<folder>/iteration_<i>/rank_<rank>`, which `torchfrtrace --prefix rank_` reads. `folder` is by default
    INPROCESS_FR_TRACE_PATH or NVRX_FR_TRACE_PATH of the environment. Does nothing without a folder, if no variable
    enables the recorder (TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE), or if this torch has no recorder. OSError
    if the file cannot be written.
    """
    folder = folder or _folder_of_environment()
    if folder is None or not any(_positive(variable) for variable in _SIZE_VARIABLES):
        return None
    import torch

    bindings = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(bindings, "_dump_nccl_trace", None) or getattr(bindings, "_dump_fr_trace", None)
    if dump is None:
        _log.debug("this torch has no flight recorder")
        return None
    rank = state.rank if state.active_rank is None else state.active_rank
    file = Path(folder) / f"iteration_{state.iteration}" / f"rank_{rank}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(dump())
    _log.info("wrote the flight recorder to %s", file)
    return file


def flight_recorder_files(hook: object, iteration: int) -> list[str]:
    """Return the files that `dump_flight_recorder` has written in an iteration, as far as this host sees them.

    `hook` is the abort hook, which may have the folder.
    """
    folders = [getattr(each, "torch_fr_trace_path", None) for each in getattr(hook, "instances", (hook,))]
    folder = next(filter(None, folders), None) or _folder_of_environment()
    return [] if folder is None else sorted(map(str, Path(folder).glob(f"iteration_{iteration}/rank_*")))


def _folder_of_environment() -> str | None:
    return next(filter(None, map(os.environ.get, _TRACE_PATH_VARIABLES)), None)


def _positive(variable: str) -> bool:
    try:
        return int(os.environ.get(variable, "0")) > 0
    except ValueError:
        return False
