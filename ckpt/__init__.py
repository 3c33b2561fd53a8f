"""Checkpoints of large PyTorch training jobs: saved in the background, whole or absent, restored anywhere.

Importing this package is cheap: neither torch nor tensorstore is imported before they are needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    FencedError,
    FormatVersionError,
    SaveAbandonedError,
    StateError,
    StateMismatchError,
    StorageError,
    WriterError,
)

if TYPE_CHECKING:
    from ckpt.async_calls import AsyncCallsQueue, AsyncRequest, DistributedAsyncCaller, WriterConfig
    from ckpt.checkpointer import Checkpointer
    from ckpt.loading.lazy import open_checkpoint as open
    from ckpt.loading.zarr_store import zarr_store
    from ckpt.planning.state_dict import PerRank, RngState
    from ckpt.values.registry import Unregistered, register_encoder

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointTimeoutError",
    "Checkpointer",
    "DistributedAsyncCaller",
    "FencedError",
    "FormatVersionError",
    "PerRank",
    "RngState",
    "SaveAbandonedError",
    "StateError",
    "StateMismatchError",
    "StorageError",
    "Unregistered",
    "WriterConfig",
    "WriterError",
    "open",
    "register_encoder",
    "zarr_store",
]

_LAZY = {
    "AsyncCallsQueue": "ckpt.async_calls",
    "AsyncRequest": "ckpt.async_calls",
    "DistributedAsyncCaller": "ckpt.async_calls",
    "WriterConfig": "ckpt.async_calls",
    "Checkpointer": "ckpt.checkpointer",
    "PerRank": "ckpt.planning.state_dict",
    "RngState": "ckpt.planning.state_dict",
    "Unregistered": "ckpt.values.registry",
    "register_encoder": "ckpt.values.registry",
    "open": "ckpt.loading.lazy",
    "zarr_store": "ckpt.loading.zarr_store",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), "open_checkpoint" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted(__all__)
