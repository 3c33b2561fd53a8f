"""A save without any process, for tests that are about what was saved."""

from __future__ import annotations

from typing import Any

import ckpt


def save_here(checkpointer: ckpt.Checkpointer, state: Any, step: int, **options: Any) -> None:
    """Save as `Checkpointer.save` does, entirely in this thread.

    The processes that `save` starts take a quarter of a second of a processor.
    """
    checkpointer.save_request(state, step, **options).execute_sync()
