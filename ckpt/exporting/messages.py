"""The messages of a trainer and the worker of one export.

trainer --- ExportRequest + form in a memory file ---▶ worker
trainer ◀-- ExportEnded ------------------------------ worker
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ckpt.storage.options import StorageOptions
from inprocess.ipc.packets import Codec

__all__ = ["CODEC", "ExportEnded", "ExportRequest", "Message"]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Export a step of `root` to `target`.

    The form, as JSON, is in the memory file sent with this: it may have the files of a tokenizer.
    """

    root: str
    root_options: StorageOptions | None
    step: int
    target: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ExportEnded:
    """The export is complete, or failed with this error and traceback."""

    error: str | None = None
    traceback: str = ""


Message = ExportRequest | ExportEnded
CODEC: Codec[Message] = Codec(*get_args(Message))
