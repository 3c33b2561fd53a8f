"""`ckpt.zarr_store`: zarr-python, xarray and dask open every tensor by its name, without a copy."""

from __future__ import annotations

import asyncio
import functools
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import WrapperStore

import ckpt
from ckpt.storage import dtypes
from ckpt.storage.names import directory
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.interop import states
from tests.ckpt.interop.by_hand import WORLD_SIZE, layouts, write_step
from tests.ckpt.interop.conftest import Saved
from tests.support.saves import save_here
from tests.support.selection import full_only

RANGES: list[tuple[ByteRequest | None, slice]] = [
    (None, slice(None)),
    (RangeByteRequest(1, 7), slice(1, 7)),
    (RangeByteRequest(3, 1 << 40), slice(3, None)),
    (OffsetByteRequest(5), slice(5, None)),
    (SuffixByteRequest(20), slice(-20, None)),
    (SuffixByteRequest(1 << 40), slice(None)),
]


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """Return a root with step 5, which has a tensor of several shards."""
    with ckpt.Checkpointer(tmp_path / "run", staging=ckpt.Staging(inner_bytes=1000)) as checkpointer:
        state = {"model": {"weight": torch.arange(6000.0).reshape(60, 100)}, "lr": 0.1}
        save_here(checkpointer, state, 5)
    return tmp_path / "run"


def _get(store: Any, key: str, byte_range: ByteRequest | None = None) -> bytes | None:
    found = asyncio.run(store.get(key, default_buffer_prototype(), byte_range))
    return None if found is None else bytes(found.to_bytes())


def _all(keys: Callable[[], AsyncIterator[str]]) -> list[str]:
    async def collect() -> list[str]:
        return [key async for key in keys()]

    return asyncio.run(collect())


def _arrays(group: Any) -> dict[str, Any]:
    return {name: node for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}


@pytest.mark.parametrize("step", ["plain", "zstd", "large"])
def test_every_dtype(saved: Saved, step: str) -> None:
    with ckpt.zarr_store(saved.steps[step]) as store:
        group: Any = zarr.open_group(store, mode="r")
        for kind, tensors in states.many_dtypes().items():
            for key, tensor in tensors.items():
                array = group[directory((kind, key))]
                how = dtypes.stored(dtypes.torch_dtype_name(tensor.dtype))
                assert (array.shape, array.dtype) == ((*tensor.shape, *how.trailing), how.numpy_dtype)
                assert array[...].tobytes() == states.bytes_of(tensor), (kind, key)
        for rank in range(2):
            assert (group[f"own/__rank_{rank:05d}"][:] == rank).all()


def test_every_layout_by_its_own_name(saved: Saved) -> None:
    """Also the tensors that are several arrays on disk."""
    with ckpt.zarr_store(saved.steps["layouts"]) as store:
        group: Any = zarr.open_group(store, mode="r")
        arrays = _arrays(group)
        assert not [name for name in arrays if "__box" in name]
        tensors = {path: saved.layouts[path] for path in saved.layouts if path not in {("own",), ("again",)}}
        assert arrays.keys() == {directory(path) for path in tensors} | {f"own/__rank_{rank:05d}" for rank in range(4)}
        for path, (_, shape, data) in tensors.items():
            array = arrays[directory(path)]
            assert (list(array.shape), array[...].tobytes()) == (shape, data), path
            part = tuple(slice(size // 3, -(-5 * size // 6)) for size in shape)
            assert array[part].tobytes() == array[...][part].tobytes()


def test_boxes_and_meshes_of_many_ranks(tmp_path: Path) -> None:
    made = layouts()
    write_step(tmp_path / "step_00000001", made.index, made.contents, WORLD_SIZE)
    with ckpt.zarr_store(tmp_path, 1) as store:
        group: Any = zarr.open_group(store, mode="r")
        boxes = []
        for array, values in zip(made.arrays, made.contents, strict=True):
            if array.is_whole:
                name = directory(array.path) + ("" if array.rank is None else f"/__rank_{array.rank:05d}")
                assert group[name][...].tobytes() == values.tobytes(), name
            else:
                opened: Any = zarr.open_array(store, path=f"boxes/__box_{len(boxes):05d}", mode="r")
                assert (opened[...] == values).all()
                boxes.append(values)
        assert (group["boxes"][...] == np.concatenate(boxes)).all()


@pytest.mark.parametrize("step", [pytest.param("plain", marks=full_only), "zstd"])
def test_xarray_and_dask(saved: Saved, step: str) -> None:
    import dask.array
    import xarray

    many = states.many_dtypes()
    with ckpt.zarr_store(saved.steps[step]) as store:
        dataset = xarray.open_zarr(store, group="matrix", chunks=None, consolidated=False)
        scalars = xarray.open_dataset(store, engine="zarr", group="scalar", consolidated=False)  # type: ignore[arg-type]
        cubes: Any = zarr.open_group(store, path="cube", mode="r")
        for name in states.DTYPES:
            lazy: Any = dask.array.from_zarr(cubes[name])
            found = [dataset[name].values, scalars[name].values, lazy.compute()]
            expected = [states.bytes_of(many[kind][name]) for kind in ("matrix", "scalar", "cube")]
            assert [np.asarray(values).tobytes() for values in found] == expected, name


def test_tensorstore_by_name(saved: Saved) -> None:
    with ckpt.open(saved.steps["plain"]) as step:
        for kind, tensors in states.many_dtypes().items():
            for key, tensor in tensors.items():
                opened = step[f"{kind}/{key}"].tensorstore()
                assert opened.read().result().tobytes() == states.bytes_of(tensor)
                assert not opened.writable
    with ckpt.open(saved.steps["layouts"]) as step:
        for path, (_, shape, data) in saved.layouts.items():
            if path != ("own",):
                opened = step["/".join(map(str, path))].tensorstore()
                assert (list(opened.shape), opened.read().result().tobytes()) == (shape, data), path


class Counting(WrapperStore[Any]):
    """Counts the bytes of the values that are read."""

    nbytes = 0

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        value = await self._store.get(key, prototype, byte_range)
        self.nbytes += 0 if value is None else len(value)
        return value  # type: ignore[no-any-return]


def test_a_part_of_a_shard_is_read_alone(one: Path) -> None:
    with ckpt.zarr_store(one) as store:
        counting = Counting(store)
        array: Any = zarr.open_array(counting, path="model/weight", mode="r")
        assert array.shards is not None
        counting.nbytes = 0
        assert array[10, 7] == 1007.0
        assert counting.nbytes < 2500, "an inner chunk and the index of a shard"


@pytest.mark.parametrize(("byte_range", "part"), RANGES)
def test_ranges_of_bytes(saved: Saved, byte_range: ByteRequest | None, part: slice) -> None:
    """Of documents, chunks, compressed chunks, and chunks that are put together."""
    for step in ("plain", "zstd", "layouts"):
        with ckpt.zarr_store(saved.steps[step]) as store:
            keys = _all(store.list)
            assert len(keys) == len(set(keys)) > 100
            for key in keys[:: 1 + len(keys) // 60]:
                whole = _get(store, key)
                assert whole is not None
                assert _get(store, key, byte_range) == whole[part]
                assert asyncio.run(store.getsize(key)) == len(whole)


def test_listing(saved: Saved) -> None:
    with ckpt.zarr_store(saved.steps["layouts"]) as store:
        keys = set(_all(store.list))

        def walk(prefix: str) -> Iterator[str]:
            for child in _all(lambda: store.list_dir(prefix)):
                key = f"{prefix}/{child}".lstrip("/")
                if key in keys:
                    yield key
                else:
                    yield from walk(key)

        assert sorted(walk("")) == sorted(keys)
        for prefix in ("fsdp/", "fs", "tied/c.", "no"):
            listed = set(_all(functools.partial(store.list_prefix, prefix)))
            assert listed == {key for key in keys if key.startswith(prefix)}
            assert bool(listed) == (prefix != "no")
        assert all(asyncio.run(store.exists(key)) for key in keys)
        for key in ("", "no", "tied", "tied/c.0", "tied/c.999.0", "tied/c.-1.0", "tied/c.00.0", "tied/d.0.0", "tied/c"):
            assert not asyncio.run(store.exists(key)), key
            assert _get(store, key) is None


def test_the_group_is_listed_with_one_read(saved: Saved) -> None:
    with ckpt.zarr_store(saved.steps["plain"]) as store:
        counting = Counting(store)
        group: Any = zarr.open_group(counting, mode="r")
        read = counting.nbytes
        assert len(_arrays(group)) > 100
        assert counting.nbytes == read
        assert group.attrs["ckpt"]["step"] == 5


def test_a_store_holds_its_step(one: Path) -> None:
    store = ckpt.zarr_store(one)
    assert not CheckpointRoot(str(one)).remove_step(5)
    store.close()
    assert CheckpointRoot(str(one)).remove_step(5)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_step_that_is_removed_is_an_error(one: Path, replaced: bool) -> None:
    with ckpt.zarr_store(one) as store:
        array: Any = zarr.open_array(store, path="model/weight", mode="r")
        assert array[0, 1] == 1.0
        (one / "step_00000005").rename(one / "gone")
        if replaced:
            with ckpt.Checkpointer(one, staging=ckpt.Staging(inner_bytes=1000)) as checkpointer:
                save_here(checkpointer, {"model": {"weight": torch.zeros(60, 100)}, "lr": 0.1}, 5)
        with pytest.raises(ckpt.CheckpointNotFoundError, match="removed or replaced"):
            array[0, 1]


def test_a_copy_opens_the_same_step(one: Path) -> None:
    with ckpt.zarr_store(one) as store:
        data = pickle.dumps(store)
        copy = pickle.loads(data)
        assert copy == store
        array: Any = zarr.open_array(copy, path="model/weight", mode="r")
        assert array[3, 4] == 304.0
        copy.close()
    (one / "step_00000005").rename(one / "gone")
    with ckpt.Checkpointer(one) as checkpointer:
        save_here(checkpointer, {"other": torch.zeros(3)}, 5)
    with pytest.raises(ckpt.CheckpointNotFoundError, match="replaced"):
        pickle.loads(data)


@pytest.mark.parametrize("how", ["truncated", "missing", "a link"])
def test_a_pack_that_is_not_whole_is_an_error(one: Path, how: str) -> None:
    """And never zeros."""
    for pack in (one / "step_00000005" / "packs" / "000").iterdir():
        data = pack.read_bytes()
        pack.unlink()
        if how == "truncated":
            pack.write_bytes(data[:100])
        elif how == "a link":
            (one / "elsewhere").write_bytes(data)
            pack.symlink_to(one / "elsewhere")
    with ckpt.zarr_store(one) as store:
        array: Any = zarr.open_array(store, path="model/weight", mode="r")
        with pytest.raises(ckpt.CheckpointCorruptError, match="model/weight"):
            array[...]


def test_a_flipped_bit_is_an_error(one: Path) -> None:
    for pack in (one / "step_00000005" / "packs" / "000").iterdir():
        data = bytearray(pack.read_bytes())
        data[9] ^= 16
        pack.write_bytes(data)
    with ckpt.zarr_store(one) as store:
        array: Any = zarr.open_array(store, path="model/weight", mode="r")
        with pytest.raises(ValueError, match="checksum"):
            array[...]
    with ckpt.open(one) as step, pytest.raises(ckpt.CheckpointCorruptError, match="checksum"):
        step["model/weight"].tensorstore().read().result()


def test_nothing_can_be_written(one: Path) -> None:
    with ckpt.zarr_store(one) as store:
        with pytest.raises(ValueError, match="read-only"):
            zarr.open_group(store, mode="a")
        array: Any = zarr.open_array(store, path="model/weight")
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1.0


def test_without_zarr_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['zarr'] = None; import ckpt; ckpt.zarr_store('/nowhere')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert "ImportError: ckpt.zarr_store needs zarr-python 3: pip install" in done.stderr
    assert (
        "torch"
        not in subprocess.run(
            [sys.executable, "-c", "import ckpt, sys; ckpt.zarr_store; print(*sys.modules)"],
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        ).stdout.split()
    )
