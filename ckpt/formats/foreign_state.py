"""Checkpoints of other formats, whichever it is: opened, and loaded as torch tensors."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ckpt.errors import ConversionError
from ckpt.formats.detection import kind_of
from ckpt.formats.lazy_state import Bytes, FileTensor, LazyState
from ckpt.formats.safetensors import open_directory, open_file
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import torch_dtype
from ckpt.values.containers import rebuild

if TYPE_CHECKING:
    import torch

__all__ = ["load_foreign", "open_foreign"]

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
            from ckpt.formats.orbax_reader import open_orbax

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
