"""Names of nvidia_resiliency_ext for what a queue does anyway: on the class, on all queues of a process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol


class _Queue(Protocol):
    def start(self) -> None: ...
    def give_up_calls(self) -> None: ...


# Of the whole process: an abort hook does not know which queues a program has made. Changed by atomic operations only.
_queues: weakref.WeakValueDictionary[int, _Queue] = weakref.WeakValueDictionary()


def remember(queue: _Queue) -> None:
    """Let `abort_nvrx_checkpoint` find a queue as long as it exists."""
    _queues[id(queue)] = queue


def abort_nvrx_checkpoint() -> None:
    """Kill the writers of all queues of this process, and give up what they have not finished. From any thread.

    The queues can be used again: the next call that is scheduled gets a new writer. Calls that were given up are
    neither finalized nor raised; a save that is among them is abandoned. For an abort hook of a program that makes
    background calls without a `Checkpointer`; with one, `ckpt.restart` loses no save that is completely staged.
    """
    for reference in _queues.valuerefs():
        if (queue := reference()) is not None:
            queue.give_up_calls()


class WarmupPersistentCaller:
    """A method that can be called on a queue, which it starts, and on the class, where it has no effect.

    Its parameters have no effect: a queue knows its rank, and writers are always forked from a small process of their
    own, which has neither threads nor CUDA. It does not exist before the queue.
    """

    def __get__(self, queue: _Queue | None, kind: type) -> Callable[..., None]:
        def warmup_persistent_caller(
            rank: int,
            mp_mode: str = "spawn",
            is_daemon: bool = True,
            cpu_priority: int | None = None,
            io_priority: int | None = None,
            sigterm_timeout: float | None = None,
            cpu_shm_mode: bool = True,
        ) -> None:
            if queue is not None:
                queue.start()

        return warmup_persistent_caller
