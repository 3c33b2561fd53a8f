"""Checkpoints of large PyTorch training jobs: saved in the background, whole or absent, restored anywhere.

Importing this package is cheap: neither torch nor tensorstore is imported before they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    CheckpointUnreachableError,
    ConversionError,
    FencedError,
    FormatVersionError,
    RemoteTraceback,
    SaveAbandonedError,
    StateError,
    StateMismatchError,
    StorageError,
    WriterError,
)
from inprocess.ipc.lazy_names import lazy_names

if TYPE_CHECKING:
    from ckpt import events as events
    from ckpt import integrations as integrations
    from ckpt import restart as restart
    from ckpt import sinks as sinks
    from ckpt.async_calls import (
        AsyncCallsQueue,
        AsyncRequest,
        DistributedAsyncCaller,
        WriterConfig,
        abort_nvrx_checkpoint,
    )
    from ckpt.checkpointer import Checkpointer
    from ckpt.exporting.export import export
    from ckpt.exporting.options import ExportOptions
    from ckpt.formats.foreign_state import load_foreign
    from ckpt.loading.lazy import Checkpoint, LazyTensor
    from ckpt.loading.lazy import open_checkpoint as open
    from ckpt.loading.load import load
    from ckpt.loading.zarr_open import zarr_store
    from ckpt.mirroring.options import Mirror
    from ckpt.observing import Observation, observe
    from ckpt.options import FailedSaves, Snapshots, Staging
    from ckpt.pace import Budget, Continuous, Optimal, Pace, Seconds, Steps
    from ckpt.planning.given_leaves import Leaves
    from ckpt.planning.state_dict import PerRank, RngState
    from ckpt.preemption import PreemptionWatcher
    from ckpt.ranks.collectives import Ranks
    from ckpt.saving.retention import Best, Every, EverySeconds, Keep, Latest, Pinned
    from ckpt.saving.scheduled import pending_steps, wait_until_written
    from ckpt.storage.compression import Compression
    from ckpt.storage.small_files import SmallFiles
    from ckpt.values.registry import Unregistered, register_encoder
    from ckpt.values.tensor_subclasses import register_tensor_subclass
    from ckpt.version import __version__ as __version__

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "Best",
    "Budget",
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointTimeoutError",
    "CheckpointUnreachableError",
    "Checkpointer",
    "Compression",
    "Continuous",
    "ConversionError",
    "DistributedAsyncCaller",
    "ExportOptions",
    "Every",
    "EverySeconds",
    "FailedSaves",
    "FencedError",
    "FormatVersionError",
    "Keep",
    "Latest",
    "LazyTensor",
    "Leaves",
    "Mirror",
    "Observation",
    "Optimal",
    "Pace",
    "PerRank",
    "Pinned",
    "PreemptionWatcher",
    "Ranks",
    "RemoteTraceback",
    "RngState",
    "SaveAbandonedError",
    "Seconds",
    "SmallFiles",
    "Snapshots",
    "Staging",
    "Steps",
    "StateError",
    "StateMismatchError",
    "StorageError",
    "Unregistered",
    "WriterConfig",
    "WriterError",
    "abort_nvrx_checkpoint",
    "load",
    "load_foreign",
    "export",
    "observe",
    "open",
    "pending_steps",
    "register_encoder",
    "register_tensor_subclass",
    "wait_until_written",
    "zarr_store",
]

_LAZY = {
    "AsyncCallsQueue": "ckpt.async_calls",
    "AsyncRequest": "ckpt.async_calls",
    "DistributedAsyncCaller": "ckpt.async_calls",
    "WriterConfig": "ckpt.async_calls",
    "abort_nvrx_checkpoint": "ckpt.async_calls",
    "Checkpointer": "ckpt.checkpointer",
    "Compression": "ckpt.storage.compression",
    "ExportOptions": "ckpt.exporting.options",
    "export": "ckpt.exporting.export",
    **dict.fromkeys(("Budget", "Continuous", "Optimal", "Pace", "Seconds", "Steps"), "ckpt.pace"),
    **dict.fromkeys(("Best", "Every", "EverySeconds", "Keep", "Latest", "Pinned"), "ckpt.saving.retention"),
    "Mirror": "ckpt.mirroring.options",
    "Observation": "ckpt.observing",
    "observe": "ckpt.observing",
    "FailedSaves": "ckpt.options",
    "Snapshots": "ckpt.options",
    "Staging": "ckpt.options",
    "Leaves": "ckpt.planning.given_leaves",
    "PerRank": "ckpt.planning.state_dict",
    "PreemptionWatcher": "ckpt.preemption",
    "Ranks": "ckpt.ranks.collectives",
    "RngState": "ckpt.planning.state_dict",
    "Unregistered": "ckpt.values.registry",
    "register_encoder": "ckpt.values.registry",
    "load": "ckpt.loading.load",
    "load_foreign": "ckpt.formats.foreign_state",
    "Checkpoint": "ckpt.loading.lazy",
    "LazyTensor": "ckpt.loading.lazy",
    "open": "ckpt.loading.lazy:open_checkpoint",
    "register_tensor_subclass": "ckpt.values.tensor_subclasses",
    "SmallFiles": "ckpt.storage.small_files",
    "pending_steps": "ckpt.saving.scheduled",
    "wait_until_written": "ckpt.saving.scheduled",
    "zarr_store": "ckpt.loading.zarr_open",
    "__version__": "ckpt.version",
}

__getattr__, __dir__ = lazy_names(__name__, _LAZY, modules=("events", "integrations", "restart", "sinks"))
