"""Read every array of some steps with one other reader. A program that imports nothing of this package.

    python foreign_readers.py READER OUTPUT STEP...

READER is ``tensorstore``, ``zarr-python``, ``zarr-python-plain`` (without the data types of ckpt; opens arrays
one by one) or ``zarrs``. STEP may end in ``::`` and the directory of one array. For each step, OUTPUT gets
``<number>.npz`` with the bytes of each array that could be read, by its directory, and ``<number>.json`` with ``[dtype,
shape]`` of each, or the error in place of these.
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Open = Callable[[str, str], Any]
"""Opens the array in a directory of a step, for numpy's indexing."""

BIT_WIDTHS = {"bfloat16": 16, "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8}


def with_tensorstore() -> Open:
    import tensorstore

    def open_array(step: str, directory: str) -> Any:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{step}/{directory}/"}}
        return tensorstore.open(spec, open=True, read=True).result()

    return open_array


def with_zarr_python(data_types: bool) -> Open:
    import zarr

    if not data_types:
        return lambda step, directory: zarr.open_array(f"{step}/{directory}", mode="r")
    from ckpt.storage.zarr_plugin import register

    register()
    open_group = functools.cache(lambda step: zarr.open_group(step, mode="r"))
    return lambda step, directory: open_group(step)[directory]


def with_zarrs() -> Open:
    """Read with the Rust decoder below zarr-python's user interface; what it cannot decode is an error."""
    import zarr
    import zarrs

    _register_bits()
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True})
    open_group = functools.cache(lambda step: zarr.open_group(step, mode="r"))

    def open_array(step: str, directory: str) -> Any:
        array = open_group(step)[directory]
        pipeline = array.async_array.codec_pipeline
        assert type(pipeline) is zarrs.ZarrsCodecPipeline, pipeline
        assert pipeline.impl is not None, "Rust cannot decode this"
        assert pipeline.python_impl is None, "a decoder in Python stands by"
        return array

    return open_array


def _register_bits() -> None:
    """Have zarr-python return the floats that numpy lacks as unsigned integers with the same bits.

    zarrs supports these data types, but not numpy arrays of them.
    """
    from zarr.core.dtype import ZDType, data_type_registry

    try:
        from zarr.errors import DataTypeValidationError
    except ImportError:  # up to 3.1
        from zarr.core.dtype import DataTypeValidationError
    from zarr.core.dtype.common import HasEndianness, HasItemSize

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Bits(ZDType, HasItemSize, HasEndianness):
        name: str
        _zarr_v3_name = "bits"
        dtype_cls = np.dtypes.VoidDType

        @property
        def item_size(self) -> int:
            return BIT_WIDTHS[self.name] // 8

        @classmethod
        def from_native_dtype(cls, dtype: Any) -> Any:
            raise DataTypeValidationError("only by name")

        @classmethod
        def _from_json_v2(cls, data: Any) -> Any:
            raise DataTypeValidationError("not in version 2")

        @classmethod
        def _from_json_v3(cls, data: Any) -> Any:
            if not isinstance(data, str) or data not in BIT_WIDTHS:
                raise DataTypeValidationError(f"{data!r} is another data type")
            return cls(name=data)

        def to_native_dtype(self) -> Any:
            return np.dtype(f"<u{self.item_size}")

        def to_json(self, zarr_format: int) -> Any:
            return self.name

        def _check_scalar(self, data: Any) -> bool:
            return True

        def cast_scalar(self, data: Any) -> Any:
            return self.to_native_dtype().type(data)

        def default_scalar(self) -> Any:
            return self.cast_scalar(0)

        def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
            return self.cast_scalar(0)  # no chunk is missing

        def to_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
            return f"0x{0:0{2 * self.item_size}x}"

    data_type_registry.register("bits", Bits)


def read(opened: Any) -> np.ndarray[Any, Any]:
    """Read a whole array, and check that a part read separately is the same."""
    whole = _numpy(opened[...])
    if whole.size > 1:
        part = tuple(slice(size // 3, -(-5 * size // 6)) for size in whole.shape)
        assert _numpy(opened[part]).tobytes() == whole[part].tobytes(), "a part differs from the same part of the whole"
    return whole


def _numpy(selected: Any) -> np.ndarray[Any, Any]:
    return np.asarray(selected.read().result() if hasattr(selected, "read") else selected)


def main(reader: str, output: str, *steps: str) -> None:
    open_array = {
        "tensorstore": with_tensorstore,
        "zarr-python": lambda: with_zarr_python(data_types=True),
        "zarr-python-plain": lambda: with_zarr_python(data_types=False),
        "zarrs": with_zarrs,
    }[reader]()
    for number, argument in enumerate(steps):
        step, _, only = argument.partition("::")
        nodes = json.loads(Path(step, "zarr.json").read_bytes())["consolidated_metadata"]["metadata"]
        about: dict[str, Any] = {}
        data: dict[str, np.ndarray[Any, Any]] = {}
        for directory in [name for name, node in nodes.items() if node["node_type"] == "array" and only in ("", name)]:
            try:
                values = read(open_array(step, directory))
            except Exception as error:
                about[directory] = f"{error!r} because of {error.__cause__!r}"
            else:
                about[directory] = [values.dtype.name, values.shape]
                data[directory] = np.frombuffer(values.tobytes(), np.uint8)
        np.savez(Path(output, f"{number}.npz"), **data)
        Path(output, f"{number}.json").write_text(json.dumps(about))
    ours = [name for name in sys.modules if name == "torch" or name.partition(".")[0] == "ckpt"]
    assert reader == "zarr-python" or not ours, ours


if __name__ == "__main__":
    main(*sys.argv[1:])
