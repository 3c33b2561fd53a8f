"""Tell checkpoints of other formats apart, by their first bytes or the names in a directory. Nothing is loaded."""

from __future__ import annotations

import os
import stat
from types import MappingProxyType
from typing import Literal

from ckpt.formats.foreign_files import foreign_file
from ckpt.formats.safetensors import SUFFIX, is_safetensors_directory, looks_like_safetensors, looks_like_torch

__all__ = ["DESCRIPTIONS", "Kind", "kind_of"]

Kind = Literal["dcp", "torch", "safetensors", "safetensors-directory"]

DESCRIPTIONS = MappingProxyType(
    {
        "dcp": "a directory of torch.distributed.checkpoint",
        "torch": "a file of torch.save",
        "safetensors": "a safetensors file",
        "safetensors-directory": "a directory of safetensors files",
    }
)
"""What each kind is, for messages."""


def kind_of(path: str) -> Kind | None:
    """Return the format of the file or directory at `path`; None if it is none. OSError."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        if os.path.lexists(os.path.join(path, ".metadata")):
            return "dcp"
        is_zarr = os.path.lexists(os.path.join(path, "zarr.json"))
        return "safetensors-directory" if not is_zarr and is_safetensors_directory(path) else None
    if not stat.S_ISREG(mode):
        return None
    with open(path, "rb") as stream:
        start = stream.read(16)
    if looks_like_safetensors(start):
        return "safetensors"
    if looks_like_torch(start):
        return "torch"
    # The suffix counts only where the first bytes say nothing: then the header is damaged.
    return "safetensors" if path.endswith(SUFFIX) and foreign_file(path) is None else None
