"""The interface of the ranks of a job, and phases that succeed on all or fail on all, with the same kind of error.

Nothing here imports torch in a process that does not use it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.ranks.failure import Failure

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


_FINE, _FAILED = b"+", b"-"


@dataclass(slots=True)
class CollectivePhase:
    """A part of a collective operation: its name for messages, the payload of this rank, then those of all, by rank."""

    action: str
    told: bytes = b""
    answers: list[bytes] = field(default_factory=list)


class Group:
    """The ranks of a job as one of them sees them, and their collectives, of bytes: without a subclass, of one rank."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    def __call__(self, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all ranks, by rank. Collective."""
        return [payload]

    def maximum(self, payload: bytes) -> bytes:
        """Return the largest byte at each position of the payloads of all ranks, which have one size. Collective."""
        return bytes(map(max, zip(*self(payload), strict=True)))

    def outcomes(self, own: bytes | Failure) -> list[bytes | Failure]:
        """Give every rank what each has to tell, or why it failed, by rank. Collective."""
        answers = self(_FAILED + own.to_bytes() if isinstance(own, Failure) else _FINE + own)
        return [Failure.from_bytes(answer[1:]) if answer.startswith(_FAILED) else answer[1:] for answer in answers]

    @contextmanager
    def all_or_none(self, action: str, step: int | None = None) -> Iterator[CollectivePhase]:
        """Run a block that raises on all ranks if it raises on one, everywhere the same kind of error.

        The lowest rank that failed decides the kind. A rank that failed in the same way raises its own error.
        Collective, one all-gather, except for an exception that is no `Exception`, such as an interrupt: that leaves
        the block at once. `action` and `step` say what is done, for messages.
        """
        phase = CollectivePhase(action)
        try:
            yield phase
        except Exception as error:
            what = phase.action if step is None else f"{phase.action} step {step}"
            own = Failure.of(error, self.rank, what)
            first = next(each for each in self.outcomes(own) if isinstance(each, Failure))
            if first.error_class is own.error_class:  # callers decide by the class how they go on
                raise
            raise first.error(first.report, step=step) from error
        for each in self.outcomes(phase.told):
            if isinstance(each, Failure):
                raise each.error(each.report, step=step)
            phase.answers.append(each)

    def result_of_first(self, action: str, run: Callable[[], Any]) -> Any:
        """Call `run` on all ranks and return the result of rank 0, which is JSON; see `all_or_none`. Collective."""
        with self.all_or_none(action) as phase:
            phase.told = json.dumps(run()).encode()
        return json.loads(phase.answers[0])


class Alone(Group):
    """A group of one rank, for a restore without communication. `rank` is that among all ranks of the job."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)


# -- torch.distributed -------------------------------------------------------------------------------------------------


def torch_distributed() -> Any:
    """Return the module torch.distributed if it is initialized in this process, else None."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def own_rank() -> int | None:
    """Return the global rank; None when torch.distributed is not initialized."""
    distributed = torch_distributed()
    return None if distributed is None else int(distributed.get_rank())


def collective_device(group: ProcessGroup | None) -> torch.device:
    """Return the device on which the backend of a group (None: the default group) wants its tensors."""
    import torch
    import torch.distributed as dist

    has_cpu_backend = "cpu" in str(dist.get_backend_config(group))
    return torch.device("cpu") if has_cpu_backend else torch.device("cuda", torch.cuda.current_device())
