"""The common state of a save: from Megatron's strategy, which writes it to common.pt, to the save of the step.

dist_checkpointing.save --> CommonSave.save_common --> common.pt
                        --> CkptSaveStrategy.async_save, which takes the state: nothing reads common.pt for a save
"""

from __future__ import annotations

import os
from typing import Any

try:
    from megatron.core.dist_checkpointing.strategies.base import (
        SaveCommonStrategy,
        StrategyAction,
        get_default_strategy,
        register_default_strategy,
    )
except ImportError as error:
    raise ImportError(
        "ckpt.integrations.megatron needs megatron-core 0.16: pip install 'ckpt-inprocess[megatron]'"
    ) from error

__all__ = ["CommonSave", "common_save"]

_NAME = ("torch", 1)  # of the one strategy for the common state that dist_checkpointing.save takes


class CommonSave(SaveCommonStrategy):
    """Megatron's strategy for the common state, which also keeps the state for the save of the step that follows."""

    def __init__(self, inner: SaveCommonStrategy) -> None:
        super().__init__(inner.backend, inner.version)
        self._inner = inner
        self._written: tuple[str, dict[Any, Any]] | None = None  # the directory and the state

    @property
    def can_handle_sharded_objects(self) -> bool:
        """The answer of Megatron's strategy."""
        return bool(self._inner.can_handle_sharded_objects)

    def save_common(self, common_state_dict: dict[Any, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write the state as Megatron does."""
        self._written = None
        self._inner.save_common(common_state_dict, checkpoint_dir)
        self._written = os.path.abspath(checkpoint_dir), common_state_dict

    def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write objects as Megatron does."""
        self._inner.save_sharded_objects(sharded_objects_state_dict, checkpoint_dir)

    def take(self, checkpoint_dir: str) -> dict[Any, Any] | None:
        """Return the state if it was written to this directory since the last call, and forget it; else None."""
        written, self._written = self._written, None
        return written[1] if written is not None and written[0] == os.path.abspath(checkpoint_dir) else None


def common_save() -> CommonSave:
    """Return the strategy for the common state that Megatron finds; the first call puts it around Megatron's own."""
    found = get_default_strategy(StrategyAction.SAVE_COMMON, *_NAME)
    if not isinstance(found, CommonSave):
        found = CommonSave(found)
        register_default_strategy(StrategyAction.SAVE_COMMON, *_NAME, found)
    return found
