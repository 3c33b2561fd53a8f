"""`ckpt.zarr_store`, which is there without zarr-python, too: that is imported when a step is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.loading.zarr_store import ZarrStore


def zarr_store(
    path: str | os.PathLike[str], step: int | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> ZarrStore:
    """Open a published step as a store of zarr-python: the arguments are those of `ckpt.open`.

    ``zarr.open_group(store, mode="r")`` lists all tensors with one read; xarray and dask take the store, too. The data
    types of ml_dtypes (bfloat16, float8) are registered with zarr-python in this process. Close the store, use it as a
    context manager, or drop it. Raises as `ckpt.open`; ImportError without zarr-python.
    """
    from ckpt.loading.zarr_store import open_store

    return open_store(path, step, storage_options)
