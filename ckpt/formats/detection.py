"""Tell checkpoints of other formats apart, by their first bytes or the names in a directory. Nothing is loaded.

A step of this library is none of them, whatever else lies beside its documents.
"""

from __future__ import annotations

import json
import os
import stat
from types import MappingProxyType
from typing import Literal

from ckpt.errors import CheckpointError
from ckpt.formats.foreign_files import file_size, foreign_file, read_bytes
from ckpt.formats.orbax_metadata import MANIFEST, is_orbax
from ckpt.formats.safetensors import SUFFIX, is_safetensors_directory, looks_like_safetensors, looks_like_torch
from ckpt.storage.names import PUBLISHED_STEP, parse_save_name
from ckpt.storage.step_documents import INTENT, step_around

__all__ = ["DESCRIPTIONS", "Kind", "kind_of"]

Kind = Literal["dcp", "torch", "safetensors", "safetensors-directory", "orbax", "ocdbt", "zarr"]

DESCRIPTIONS = MappingProxyType(
    {
        "dcp": "a directory of torch.distributed.checkpoint",
        "torch": "a file of torch.save",
        "safetensors": "a safetensors file",
        "safetensors-directory": "a directory of safetensors files",
        "orbax": "an Orbax checkpoint",
        "ocdbt": "an OCDBT database",
        "zarr": "a directory of Zarr arrays",
    }
)
"""What each kind is, for messages."""


def kind_of(path: str) -> Kind | None:
    """Return the format of the file or directory at `path`; None if it is none. OSError."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        return _kind_of_directory(path)
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


_OF_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_OF_STEP = (INTENT, "state.json")
_MAX_LEVELS = 4  # of directories without a document of Zarr above an array
_MAX_LOOKED_AT = 200
_MAX_DOCUMENT_BYTES = 1 << 26


def _kind_of_directory(path: str) -> Kind | None:
    if os.path.lexists(os.path.join(path, ".metadata")):
        return "dcp"
    if _is_own(path) or _has_own_step(path):
        return None
    if is_orbax(path):
        return "orbax"
    if os.path.lexists(os.path.join(path, MANIFEST)):
        return "ocdbt"
    if not os.path.lexists(os.path.join(path, "zarr.json")) and is_safetensors_directory(path):
        return "safetensors-directory"
    return "zarr" if _has_zarr(path) else None


def _is_own(path: str) -> bool:
    """Whether a directory is a step or a save of this library, perhaps damaged, or in a step."""
    if any(os.path.lexists(os.path.join(path, name)) for name in _OF_STEP) or step_around(path) is not None:
        return True
    if parse_save_name(os.path.basename(os.path.abspath(path))) is not None:
        return True
    try:
        where = os.path.join(path, "zarr.json")
        data = read_bytes(where, 0, min(file_size(where), _MAX_DOCUMENT_BYTES))
        return "ckpt" in json.loads(data)["attributes"]
    except (OSError, CheckpointError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _has_own_step(path: str) -> bool:
    """Whether a directory has steps of this library. The steps of Orbax may have such names, too."""
    names = [name for name in os.listdir(path) if PUBLISHED_STEP.fullmatch(name)]
    return any(_is_own(os.path.join(path, name)) for name in names[:_MAX_LOOKED_AT])


def _has_zarr(path: str) -> bool:
    """Whether there is a document of Zarr in a directory, or in one of the first few below; False for our own roots."""
    level, looked_at = [path], 0
    for _ in range(_MAX_LEVELS):
        below: list[str] = []
        for folder in level:
            looked_at += 1
            if looked_at > _MAX_LOOKED_AT or _is_own(folder):
                return False
            if any(os.path.lexists(os.path.join(folder, name)) for name in _OF_ZARR):
                return True
            with os.scandir(folder) as entries:
                below += [e.path for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
        level = sorted(below)
    return False
