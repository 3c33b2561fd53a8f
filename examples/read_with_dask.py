"""Read one tensor of a checkpoint lazily, chunk by chunk, with dask.

    python examples/read_with_dask.py /data/run7/step_00000100 model/embed.weight

The arguments are a published step and the directory of a tensor in it. For xarray, wrap the result:
`xarray.DataArray(tensor, dims=["row", "column"])`.
"""

import sys

import dask.array
import zarr

from ckpt.storage.zarr_plugin import register


def open_tensor(step: str, name: str) -> dask.array.Array:
    """Return the tensor as a dask array with its stored chunks. Reads no data yet."""
    register()  # bfloat16 and float8, which zarr-python does not support
    tensor: dask.array.Array = dask.array.from_zarr(zarr.open_group(step, mode="r")[name])
    return tensor


if __name__ == "__main__":
    tensor = open_tensor(*sys.argv[1:])
    print(f"{tensor.dtype} {tensor.shape} in {tensor.npartitions} chunks, largest {tensor.max().compute()}")
