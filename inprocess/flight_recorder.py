"""Write the flight recorder of torch, which knows the last collectives of every process group, into a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from inprocess.state import FrozenState

__all__ = ["TRACE_PATH_VARIABLES", "dump_flight_recorder"]

_log = logging.getLogger(__name__)
TRACE_PATH_VARIABLES = ("INPROCESS_FR_TRACE_PATH", "NVRX_FR_TRACE_PATH")
_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def dump_flight_recorder(folder: str | os.PathLike[str] | None, state: FrozenState) -> Path | None:
    """Write `<folder>/iteration_<i>/rank_<rank>`, which `torchfrtrace --prefix rank_` reads; return its path.

    `folder` is by default in INPROCESS_FR_TRACE_PATH or NVRX_FR_TRACE_PATH. Does nothing without a folder, or when no
    variable says that the recorder records (TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE), or when this torch has
    no recorder. OSError if the file cannot be written.
    """
    folder = folder or next(filter(None, map(os.environ.get, TRACE_PATH_VARIABLES)), None)
    if folder is None or not any(_positive(variable) for variable in _SIZE_VARIABLES):
        return None
    import torch

    bindings = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(bindings, "_dump_nccl_trace", None) or getattr(bindings, "_dump_fr_trace", None)
    if dump is None:
        _log.debug("this torch has no flight recorder")
        return None
    rank = state.rank if state.active_rank is None else state.active_rank
    file = Path(folder) / f"iteration_{state.iteration}" / f"rank_{rank}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(dump())
    _log.info("wrote the flight recorder to %s", file)
    return file


def _positive(variable: str) -> bool:
    try:
        return int(os.environ.get(variable, "0")) > 0
    except ValueError:
        return False
