"""Checkpoints of other formats: told apart, opened, and loaded as torch tensors.

They are told apart by their first bytes or the names in a directory; nothing is loaded for that. A step of this library
is none of them, whatever else lies beside its documents.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ckpt.errors import CheckpointError, ConversionError
from ckpt.formats.foreign_files import file_size, foreign_file, read_bytes
from ckpt.formats.lazy_state import Bytes, FileTensor, LazyState
from ckpt.formats.orbax_metadata import MANIFEST, is_orbax
from ckpt.formats.safetensors import (
    SUFFIX,
    is_safetensors_directory,
    looks_like_safetensors,
    looks_like_torch,
    open_directory,
    open_file,
)
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.storage.documents import INTENT, step_around
from ckpt.storage.dtypes import torch_dtype
from ckpt.storage.names import PUBLISHED_STEP, parse_save_name
from ckpt.values.containers import rebuild

if TYPE_CHECKING:
    import torch


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
"""The description of each kind, for messages."""


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


# -- opened ------------------------------------------------------------------------------------------------------------

_log = logging.getLogger("ckpt")
_PIECE_BYTES = 16 << 20


def open_foreign(
    path: str, *, string_keys: bool = False, skip_unsafe: bool = False, follow_links: bool = False
) -> LazyState | None:
    """Open a checkpoint of another format; None if there is none of those that are known. For options see below.

    FileNotFoundError or NotADirectoryError if there is nothing; ValueError if it is no path. ConversionError and
    CheckpointCorruptError, as `load_foreign`.
    """
    match kind_of(path):
        case "safetensors":
            return open_file(path)
        case "safetensors-directory":
            return open_directory(path, follow_links)
        case "torch":
            from ckpt.formats.torch_file import open_torch_file

            return open_torch_file(path, skip_unsafe)
        case "dcp":
            from ckpt.formats.dcp_reader import open_dcp, state_of_dcp

            opened = open_dcp(path, follow_links)
            return state_of_dcp(opened, string_keys=string_keys, skip_unsafe=skip_unsafe)
        case "orbax":
            from ckpt.formats.zarr_tree import open_orbax

            return open_orbax(path, follow_links)
        case "ocdbt":
            from ckpt.formats.zarr_tree import open_ocdbt

            return open_ocdbt(path, follow_links)
        case "zarr":
            from ckpt.formats.zarr_tree import open_zarr

            return open_zarr(path, follow_links)
    return None


def load_foreign(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    string_keys: bool = False,
    skip_unsafe: bool = False,
    follow_links: bool = False,
) -> Any:
    """Return the state of a checkpoint that another library wrote, nested, with new torch tensors, bit by bit.

    `path` is a checkpoint of Orbax, a directory or an OCDBT database of Zarr arrays, a directory of
    torch.distributed.checkpoint, a file of torch.save, or a safetensors file or directory, on a disk of this host.
    `inspect_ckpt convert` makes a step of the same in bounded memory; for steps of our own there is `load`.

    Nothing in the checkpoint is executed. `skip_unsafe` leaves out objects that could not be loaded without that.
    `string_keys`: keys of DCP that read like numbers stay strings. Links that lead out of a directory are refused
    unless `follow_links`. What a reader of the checkpoint should know is logged as a warning.

    For any thread, without communication. FileNotFoundError; ConversionError, also for what is not one of these;
    CheckpointCorruptError.
    """
    path = os.fspath(path)
    state = open_foreign(path, string_keys=string_keys, skip_unsafe=skip_unsafe, follow_links=follow_links)
    if state is None:
        raise ConversionError(
            f"{path} is not a checkpoint of Orbax, Zarr, torch.distributed.checkpoint, torch.save or safetensors; "
            "ckpt.load reads steps of ckpt"
        )
    tensors = {name: _loaded(tensor, name, device) for name, tensor in state.tensors.items()}
    for note in state.notes:  # reading adds to them
        _log.warning("%s: %s", path, note)
    aliases = {name: tensors[target] for name, target in state.aliases.items()}
    return rebuild(tensors | aliases | state.values, state.containers)


def _loaded(tensor: FileTensor, name: Path, device: torch.device | str | None) -> torch.Tensor:
    """Read a tensor in pieces, in C order."""
    import torch

    try:
        loaded = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
    except RuntimeError as error:
        raise ConversionError(f"{display(name)} has {tensor.nbytes} bytes, which do not fit into memory") from error
    if tensor.nbytes:
        out: Bytes = loaded.reshape(-1).view(torch.uint8).numpy().reshape(*tensor.shape, tensor.itemsize)
        if not tensor.shape:
            tensor.read(Box((), ()), out)
        else:
            rows = max(1, _PIECE_BYTES // (tensor.nbytes // tensor.shape[0]))
            for first in range(0, tensor.shape[0], rows):
                count = min(rows, tensor.shape[0] - first)
                where = Box((first, *(0,) * (len(tensor.shape) - 1)), (count, *tensor.shape[1:]))
                tensor.read(where, out[first : first + count])
    return loaded if device is None else loaded.to(device)
