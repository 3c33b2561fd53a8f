# ruff: noqa: B905 (both sides of each zip have the dimensions of one array)
"""A reader written from docs/format.md alone, with json, numpy and its own CRC; no zstd. Docstrings name sections."""

import json
import math
import re
from itertools import product
from pathlib import Path

import numpy as np

from tests.ckpt.interop.standalone_values import plain

ITEM_BYTES = {"bfloat16": 2, "complex32": 4, "complex64": 8, "complex128": 16, "bits16": 2, "qint32": 4}  # others: 1
ITEM_BYTES |= {f"{kind}{bits}": bits // 8 for kind in ("int", "uint", "float") for bits in (16, 32, 64)}
TABLE = []  # the CRC, by byte
for number in range(256):
    for _ in range(8):
        number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
    TABLE.append(number)


def crc32c(data):
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ TABLE[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF


def checked(data):
    """Arrays: check bytes that end with their CRC, and return them without it."""
    assert crc32c(data[:-4]) == int.from_bytes(data[-4:], "little"), "damaged chunk"
    return data[:-4]


def parsed(data):
    """Documents: check and parse a document."""
    member = re.search(rb'"crc32c":([0-9]+),', data)
    assert crc32c(data[: member.start()] + data[member.end() :]) == int(member[1]), "damaged document"
    return json.loads(data)


class Step:
    def __init__(self, folder):
        self.folder = Path(folder)
        root = parsed((self.folder / "zarr.json").read_bytes())
        self.about = root["attributes"]["ckpt"]
        assert self.about["format"] == 1
        state = (self.folder / "state.json").read_bytes()
        assert self.about["state"] == {"bytes": len(state), "crc32c": crc32c(state)}
        self.state = parsed(state)
        nodes = root["consolidated_metadata"]["metadata"]
        self.arrays = {name: node for name, node in nodes.items() if node["node_type"] == "array"}
        self.checksums = {}  # of chunk files, from the parts
        for rank in range(self.about["world_size"]):
            data = (self.folder / f"parts/000/rank_{rank:05d}.json").read_bytes()
            assert crc32c(data) == self.about["parts"][rank]
            for directory, chunks in parsed(data)["chunks"].items():
                self.checksums |= {f"{directory}/{key}": (size, crc) for key, size, crc in chunks}

    def tensors(self):
        """(key path, rank or None) -> dtype, shape, the bytes in C order."""
        found = {}
        for directory, node in self.arrays.items():
            about, dtype = node["attributes"]["ckpt"], node["attributes"].get("torch_dtype", node["data_type"])
            if not about.get("pack"):
                values = self.array(directory)
                if values.dtype.itemsize != ITEM_BYTES.get(
                    dtype, 1
                ):  # the last dimension is that of the bytes of an element
                    values = values.view(f"V{ITEM_BYTES[dtype]}")[..., 0]
                self._add(found, about["name"], about, dtype, values)
        packed = self.array("packed").tobytes() if "packed" in self.arrays else b""
        for entry in self.state["packed"]:
            size, shape = ITEM_BYTES.get(entry["dtype"], 1), entry["shape"]
            data = packed[entry["offset"] :][: math.prod(shape) * size]
            self._add(found, entry["path"], entry, entry["dtype"], np.frombuffer(data, f"V{size}").reshape(shape))
        found = {key: (dtype, list(whole.shape), whole.tobytes()) for key, (dtype, whole) in found.items()}
        for name, target in self.state["aliases"]:
            found |= {(tuple(name), rank): same for (path, rank), same in found.items() if path == tuple(target)}
        return found

    def values(self):
        return {(tuple(name), rank): plain(value) for name, rank, value in self.state["values"]}

    @staticmethod
    def _add(found, path, about, dtype, box):
        fresh = dtype, np.zeros(about.get("tensor_shape", box.shape), box.dtype)
        _, whole = found.setdefault((tuple(path), about.get("rank")), fresh)
        whole[tuple(slice(o, o + n) for o, n in zip(about.get("box_offset", [0] * box.ndim), box.shape))] = box

    def array(self, directory):
        """Arrays: return the elements, each as opaque bytes."""
        node = self.arrays[directory]
        shape, chunk = node["shape"], node["chunk_grid"]["configuration"]["chunk_shape"]
        whole = np.zeros(shape, f"V{ITEM_BYTES.get(node['data_type'], 1)}")
        for index in product(*(range(-(-n // c)) for n, c in zip(shape, chunk))):
            file = f"{directory}/{'.'.join(['c', *map(str, index)])}"
            data, checksums = (self.folder / file).read_bytes(), b""
            for corner, piece_shape, piece in self._inner_chunks(node["codecs"][0], chunk, data):
                first = [i * c + o for i, c, o in zip(index, chunk, corner)]
                if all(a < n for a, n in zip(first, shape)):
                    checksums += piece[-4:]
                    values = np.frombuffer(checked(piece), whole.dtype).reshape(piece_shape)
                    part = whole[(*(slice(a, a + n) for a, n in zip(first, piece_shape)), ...)]
                    part[...] = values[(*map(slice, part.shape), ...)]
            assert self.checksums[file] == (len(data), crc32c(checksums)), "a chunk of another save"
        return whole

    @staticmethod
    def _inner_chunks(codec, chunk, data):
        """Arrays: yield the offset of each inner chunk in its chunk, its shape, and its bytes with their CRC."""
        if codec["name"] == "bytes":
            yield [0] * len(chunk), chunk, data
            return
        inner = codec["configuration"]["chunk_shape"]
        counts = [c // i for c, i in zip(chunk, inner)]
        index = np.frombuffer(checked(data[-16 * math.prod(counts) - 4 :]), "<u8").reshape(-1, 2).tolist()
        for (offset, size), place in zip(index, product(*map(range, counts)), strict=True):
            yield [p * i for p, i in zip(place, inner)], inner, data[offset : offset + size]
