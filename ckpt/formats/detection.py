"""Tell checkpoints of other formats apart, by their first bytes or the names in a directory. Nothing is loaded."""

from __future__ import annotations

import os
import stat
from types import MappingProxyType
from typing import Literal

from ckpt.formats.safetensors import SUFFIX, is_safetensors_directory, looks_like_safetensors

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
    if path.endswith(SUFFIX) or looks_like_safetensors(start):
        return "safetensors"
    return "torch" if start[:4] == b"PK\3\4" or start[:1] == b"\x80" else None
