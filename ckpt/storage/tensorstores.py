"""Opens arrays of a step in tensorstore. It is imported when first used, for not every writer needs it."""

from __future__ import annotations

import os
from typing import Any

from ckpt.storage.metadata import ArrayMeta

__all__ = ["new_context", "open_array"]


def new_context(threads: int) -> Any:
    """Return a tensorstore context: `threads` file operations and copies at once, no cache, no syncs."""
    import tensorstore as ts

    limit = {"limit": threads}
    return ts.Context({"file_io_concurrency": limit, "data_copy_concurrency": limit, "file_io_sync": False})


def open_array(root: str, directory: str, meta: ArrayMeta, context: Any) -> Any:
    """Return the array in `directory` below `root` (a local directory or a URL) as a tensorstore, without any access to
    it.

    A chunk that is missing is an error in reads, and one that is all zeros is written like any other.
    """
    import tensorstore as ts

    if "://" in root:
        kvstore: Any = f"{root.rstrip('/')}/{directory}/"
    else:
        kvstore = {"driver": "file", "path": os.path.join(root, directory) + "/"}
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": meta.array_document(),
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, context=context, open=True, assume_metadata=True).result()
