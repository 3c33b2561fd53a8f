"""End all process groups of torch in this process, whatever their state, so that new ones can be created.

This module does not import torch: if it is not loaded, there are no groups.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from inprocess.bounded_waits import BoundedCall, bounded_call
from inprocess.exception import TimeoutError

_log = logging.getLogger(__name__)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_WATCHDOG = {
    _ERROR_HANDLING: "0",  # else the death of a peer ends this process, too
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "25",  # after an error it sleeps for four times that: a minute by default
}
"""Read by torch whenever it creates a group; see its page of NCCL environment variables, and ProcessGroupNCCL.cpp."""

_kept: list[Any] = []  # gloo backends of groups that the function has destroyed


@contextlib.contextmanager
def watchdog_of_nccl_ends_nothing() -> Iterator[None]:
    """Have torch's watchdog report errors of NCCL, and leave to the abort hook what they end.

    For groups that are created in this context. What the environment says already stays, but for what the agent of
    torchrun, and of the launcher, gives to each of its workers unless the user has given something else: it ends them.
    """
    before = {name: os.environ.get(name) for name in _WATCHDOG}
    if "NCCL_ASYNC_ERROR_HANDLING" in os.environ:  # the older name, which torch looks at first
        before[_ERROR_HANDLING] = os.environ["NCCL_ASYNC_ERROR_HANDLING"]
    of_agent = {_ERROR_HANDLING: "1"} if "TORCHELASTIC_RUN_ID" in os.environ else {}
    ours = {name: value for name, value in _WATCHDOG.items() if before[name] in (None, of_agent.get(name))}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in ours.items():
            if os.environ.get(name) == value:  # else the function has set it
                del os.environ[name]
                if (given := before[name]) is not None:
                    os.environ[name] = given


@contextlib.contextmanager
def gloo_outlives_modules() -> Iterator[None]:
    """Keep the gloo backends of groups that the function destroys until its frames are freed.

    `DistributedDataParallel` refers to its group in C++. If it is freed after `destroy_process_group`, as at the return
    of a training function, it ends the group with the interpreter lock held: it waits for the group's threads, and one
    of them may be waiting for that lock, to release the last operation (torch 2.13 and before). References of Python
    end a backend without the lock. Torch must be loaded, or nothing is changed; groups other than the default one end
    with it, or as torch has it.
    """
    groups = _groups_module()
    backend_type = getattr(groups, "ProcessGroupGloo", None)
    original = getattr(groups, "_update_default_pg", None)
    if groups is None or backend_type is None or original is None:
        yield
        return

    def update(group: Any) -> Any:
        if group is None:
            _kept.extend(_gloo_backends(groups, backend_type))
        return original(group)

    groups._update_default_pg = update
    try:
        yield
        release_gloo()  # after an exception its traceback refers to the frames
    finally:
        if groups._update_default_pg is update:  # a later change of other code stays
            groups._update_default_pg = original


def release_gloo() -> None:
    """End the gloo backends that `gloo_outlives_modules` has kept: the frames of the function are freed."""
    _kept.clear()


def discard_process_groups(timeout: float = 5.0) -> None:
    """Destroy all process groups, and number the next one like the first; errors are logged.

    Call it on the main thread between two iterations, when no code of the wrapped function runs: a group that was being
    created during the abort is known to torch only now. Takes microseconds if there is nothing to do, at most about
    `timeout` seconds.
    """
    groups = _groups_module()
    if groups is None:
        return
    destroy_groups(timeout)
    # The name of a group, which is also its prefix in the store, is a count. Destroying the groups resets it, but a
    # creation that failed increments it, and this rank would then wait under another name than the other ranks.
    groups._world.group_count = 0


def abort_nccl(timeout: float) -> int:
    """Abort the NCCL backends of all groups concurrently; return how many there are.

    Concurrently, because the abort of one communicator may wait for that of another. Runs on the monitor thread, at
    most about `timeout` seconds; errors and hangs are logged.
    """
    calls = [BoundedCall(abort, f"abort of NCCL in process group {name!r}") for name, abort in _nccl_aborts()]
    deadline = time.monotonic() + timeout
    for call in calls:
        try:
            call.result(max(deadline - time.monotonic(), 0.0))
        except TimeoutError as error:
            _log.error("%s; its operations may go on hanging", error)
        except Exception:
            _log.exception("%s failed", call.name)
    return len(calls)


def destroy_groups(timeout: float) -> None:
    """Destroy all process groups, if there are any; errors and hangs are logged.

    A group that something still refers to, for example the frame of a blocked main thread, ends with that reference.
    """
    groups = _groups_module()
    if groups is None or not groups.is_initialized():
        return
    try:
        bounded_call(groups.destroy_process_group, timeout, "destroying the process groups")
    except TimeoutError as error:
        _log.error("%s; a pending operation cannot be interrupted", error)
    except Exception:
        _log.exception("the process groups cannot be destroyed regularly")
        abort = getattr(groups, "_abort_process_group", None)  # since torch 2.6; forgets them all the same
        if abort is not None and groups.is_initialized():
            with contextlib.suppress(Exception):
                bounded_call(abort, timeout, "forgetting the process groups")


def _groups_module() -> Any:
    """Return torch.distributed.distributed_c10d if it is loaded."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def _gloo_backends(groups: Any, gloo: type) -> list[Any]:
    cpu = sys.modules["torch"].device("cpu")
    found = []
    for group in list(groups._world.pg_map):
        with contextlib.suppress(RuntimeError):  # none for this device
            backend = group._get_backend(cpu)
            found.append(getattr(backend, "wrapped_pg", backend))  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return [backend for backend in found if isinstance(backend, gloo)]


def _nccl_aborts() -> list[tuple[str, Callable[[], Any]]]:
    groups = _groups_module()
    nccl = getattr(groups, "ProcessGroupNCCL", None)
    if groups is None or nccl is None:
        return []
    device = sys.modules["torch"].device("cuda")
    found: dict[int, tuple[str, Callable[[], Any]]] = {}
    for group, name in list(groups._world.pg_names.items()):
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # none for this device
            continue
        backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, nccl):
            found[id(backend)] = (str(name), getattr(backend, "abort", None) or backend._shutdown)  # abort: torch 2.6
    return list(found.values())
