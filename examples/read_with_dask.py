"""Read one tensor of a checkpoint lazily, chunk by chunk, with dask.

    python examples/read_with_dask.py /data/run7/step_00000100 model/embed.weight

The arguments are a published step and the name of a tensor in it. For xarray, wrap the result:
`xarray.DataArray(tensor, dims=["row", "column"])`.
"""

import sys

import dask.array
import zarr

import ckpt


def open_tensor(step: str, name: str) -> dask.array.Array:
    """Return the tensor as a dask array with its stored chunks. Reads no data yet."""
    group = zarr.open_group(ckpt.zarr_store(step), mode="r")
    tensor: dask.array.Array = dask.array.from_zarr(group[name])
    return tensor


if __name__ == "__main__":
    tensor = open_tensor(*sys.argv[1:])
    print(f"{tensor.dtype} {tensor.shape} in {tensor.npartitions} chunks, largest {tensor.max().compute()}")
