"""What a safetensors file is: 8 bytes with the length of the header (little-endian), the header in JSON, the data.

    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"format": "pt"}}

The offsets count from the first byte of the data. The data are little-endian, in C order, without gaps.
The format is described at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

from types import MappingProxyType

__all__ = ["DTYPES", "INDEX_NAME", "MAX_HEADER_BYTES", "METADATA", "SINGLE_NAME", "SUFFIX"]

METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # what other readers take
SUFFIX = ".safetensors"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

DTYPES = MappingProxyType(
    {f"{kind}int{bits}": f"{letter}{bits}" for kind, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)}
    | {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
    | {"bool": "BOOL", "bfloat16": "BF16", "complex64": "C64"}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    | {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
)
"""The names of torch's dtypes in a header; dtypes that are not here have none."""
