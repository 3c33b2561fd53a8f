"""zarr-python data types for the floats of ml_dtypes that checkpoints contain.

They are entry points of this package (group ``zarr.data_type``). zarr-python up to 3.1 collects these but does not load
them: call `register` once before it opens such an array. Names and fill values are those registered at
https://github.com/zarr-developers/zarr-extensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import ml_dtypes
import numpy as np

try:
    import zarr.errors
    from zarr.core.dtype import ZDType, data_type_registry
    from zarr.core.dtype.common import HasItemSize
except ImportError as error:
    raise ImportError("ckpt.storage.zarr_plugin needs zarr-python 3: pip install 'ckpt-inprocess[zarr]'") from error


# It has moved between releases. Raising it makes zarr-python try the next data type.
_where: Any = zarr.errors if hasattr(zarr.errors, "DataTypeValidationError") else zarr.core.dtype
DataTypeValidationError: type[ValueError] = _where.DataTypeValidationError

_SPECIAL = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Float(ZDType[np.dtype[Any], Any], HasItemSize):
    """A float of ml_dtypes; it has a name only in Zarr v3."""

    native: ClassVar[np.dtype[Any]]

    @property
    def item_size(self) -> int:
        return self.native.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if dtype != cls.native:
            raise DataTypeValidationError(f"{dtype} is not {cls.native}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        return self.native

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"{cls._zarr_v3_name} has no name in Zarr v2")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")
        return cls()

    def to_json(self, zarr_format: Literal[2, 3]) -> Any:
        if zarr_format == 2:
            raise ValueError(f"{self._zarr_v3_name} has no name in Zarr v2")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.integer, np.floating, self.native.type))

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a number, so it cannot be a {self._zarr_v3_name}")
        return self.native.type(data)

    def default_scalar(self) -> Any:
        return np.zeros((), self.native)[()]

    def from_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> Any:
        if isinstance(data, str) and data.startswith("0x"):
            bits = int(data, 16).to_bytes(self.native.itemsize, "little")
            return np.frombuffer(bits, self.native)[0]
        if isinstance(data, (int, float)) or (isinstance(data, str) and data in _SPECIAL):
            return self.native.type(float(data))
        raise TypeError(f"{data!r} is not a fill value for {self._zarr_v3_name}")

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> str | float:
        bits = self.cast_scalar(data).tobytes()
        number = float(np.frombuffer(bits, self.native)[0])
        exact = np.isfinite(number) and self.native.type(number).tobytes() == bits
        return number if exact else f"0x{int.from_bytes(bits, 'little'):0{2 * len(bits)}x}"


class BFloat16(_Float):
    """The upper half of a float32."""

    _zarr_v3_name = "bfloat16"
    native = np.dtype(ml_dtypes.bfloat16)
    dtype_cls = type(native)


class Float8E4M3FNUZ(_Float):
    """4 bits of exponent, 3 of mantissa; finite, no negative zero."""

    _zarr_v3_name = "float8_e4m3fnuz"
    native = np.dtype(ml_dtypes.float8_e4m3fnuz)
    dtype_cls = type(native)


class Float8E5M2(_Float):
    """5 bits of exponent, 2 of mantissa; as IEEE 754."""

    _zarr_v3_name = "float8_e5m2"
    native = np.dtype(ml_dtypes.float8_e5m2)
    dtype_cls = type(native)


class Float8E5M2FNUZ(_Float):
    """5 bits of exponent, 2 of mantissa; finite, no negative zero."""

    _zarr_v3_name = "float8_e5m2fnuz"
    native = np.dtype(ml_dtypes.float8_e5m2fnuz)
    dtype_cls = type(native)


class Float8E8M0FNU(_Float):
    """8 bits of exponent: the scales of microscaling formats."""

    _zarr_v3_name = "float8_e8m0fnu"
    native = np.dtype(ml_dtypes.float8_e8m0fnu)
    dtype_cls = type(native)


def register() -> None:
    """Register these data types with zarr-python in this process. Idempotent."""
    for data_type in (BFloat16, Float8E4M3FNUZ, Float8E5M2, Float8E5M2FNUZ, Float8E8M0FNU):
        data_type_registry.register(data_type._zarr_v3_name, data_type)
