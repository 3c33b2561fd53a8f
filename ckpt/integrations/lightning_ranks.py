"""Messages between the ranks of a Lightning job: the answer of rank 0, or the first error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import ckpt
from ckpt import CheckpointError

__all__ = ["together"]


def _error_class(name: str) -> type[CheckpointError]:
    """Return the class of an error of another rank."""
    kind = getattr(ckpt, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, CheckpointError) else CheckpointError


def together(ranks: ckpt.Ranks, action: Callable[[], Any]) -> Any:
    """Run `action` on all ranks and return what that of rank 0 returned; raise on all if one raised. Collective.

    Results are JSON.
    """
    failure: CheckpointError | None = None
    try:
        own = {"result": action()}
    except CheckpointError as error:
        failure = error
        own = {"kind": type(error).__name__, "text": str(error)}
    answers = [json.loads(answer) for answer in ranks(json.dumps(own).encode())]
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if "kind" in answer:
            raise _error_class(answer["kind"])(f"rank {rank}: {answer['text']}", rank=rank)
    return answers[0]["result"]
