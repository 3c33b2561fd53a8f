"""Read one tensor of a checkpoint lazily, chunk by chunk: `python examples/read_with_dask.py STEP NAME`.

STEP is a published step, `/data/run7/step_00000100`; NAME is the directory of a tensor in it, `model/embed.weight`. For
xarray, wrap the result: `xarray.DataArray(tensor, dims=["row", "column"])`.
"""

import sys

import dask.array
import zarr

from ckpt.storage.zarr_plugin import register


def open_tensor(step: str, name: str) -> dask.array.Array:
    """The tensor as a dask array in the chunks it is stored in; nothing of it is read yet."""
    register()  # bfloat16 and float8, which zarr-python lacks
    tensor: dask.array.Array = dask.array.from_zarr(zarr.open_group(step, mode="r")[name])
    return tensor


if __name__ == "__main__":
    tensor = open_tensor(*sys.argv[1:])
    print(f"{tensor.dtype} {tensor.shape} in {tensor.npartitions} chunks, largest {tensor.max().compute()}")
