# ruff: noqa: B905 (both sides of each zip have the dimensions of one array)
"""A reader written from docs/format.md alone, with json, numpy and its own CRC; no Blosc. Docstrings name sections."""

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
    """Chunks: check bytes that end with their CRC, and return them without it."""
    assert crc32c(data[:-4]) == int.from_bytes(data[-4:], "little"), "damaged chunk"
    return data[:-4]


def parsed(data):
    """Checksums of documents: check and parse a document."""
    member = re.search(rb'"crc32c":([0-9]+),', data)
    assert crc32c(data[: member.start()] + data[member.end() :]) == int(member[1]), "damaged document"
    return json.loads(data)


def numbers(runs):
    """index.json: the numbers that runs stand for."""
    return [first + step * i for first, count, step in runs for i in range(count)]


class Step:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.about = parsed((self.folder / "zarr.json").read_bytes())["attributes"]["ckpt"]
        assert self.about["format"] == 2
        self.state, self.index = self._document("state"), self._document("index")
        self.regions = [{name: numbers(runs) for name, runs in region.items()} for region in self.index["regions"]]
        self.packs, self.checksums = {}, {}  # by rank and number of the file: its bytes, CRCs by offset
        for rank in range(self.about["world_size"]):
            data = (self.folder / f"parts/{rank // 512:03d}/rank_{rank:05d}.json").read_bytes()
            assert crc32c(data) == self.about["parts"][rank]
            for file, size, checksum in parsed(data)["files"]:
                pack = (self.folder / f"packs/{rank // 512:03d}/rank_{rank:05d}_{file:03d}").read_bytes()
                assert len(pack) == size
                self.packs[rank, file] = pack, checksum

    def _document(self, name):
        """The root: check and parse another document."""
        data = (self.folder / f"{name}.json").read_bytes()
        assert self.about[name] == {"bytes": len(data), "crc32c": crc32c(data)}
        return parsed(data)

    def tensors(self):
        """(key path, rank or None) -> dtype, shape, the bytes in C order."""
        found = {}
        for entry in self.index["arrays"]:
            key, box = (tuple(entry["path"]), entry.get("rank")), self._array(entry)
            fresh = entry["dtype"], np.zeros(entry.get("tensor_shape", box.shape), box.dtype)
            _, whole = found.setdefault(key, fresh)
            whole[tuple(slice(o, o + n) for o, n in zip(entry.get("box_offset", [0] * box.ndim), box.shape))] = box
        for place, (_, checksum) in self.packs.items():
            crcs = [crc for _, crc in sorted(self.checksums[place].items())]
            assert crc32c(b"".join(crcs)) == checksum, "a file of another save"
        found = {key: (dtype, list(whole.shape), whole.tobytes()) for key, (dtype, whole) in found.items()}
        for name, target in self.state["aliases"]:
            found |= {(tuple(name), rank): same for (path, rank), same in found.items() if path == tuple(target)}
        return found

    def values(self):
        return {(tuple(name), rank): plain(value) for name, rank, value in self.state["values"]}

    def _array(self, entry):
        """index.json: return the elements of an array, each as opaque bytes."""
        shape, chunk, inner = entry["shape"], entry["chunk"], entry.get("inner", entry["chunk"])
        assert "compression" not in entry, "Blosc"
        whole = np.zeros(shape, f"V{ITEM_BYTES.get(entry['dtype'], 1)}")
        for k, index in enumerate(product(*(range(-(-n // c)) for n, c in zip(shape, chunk)))):
            region = self.regions[entry["region"]]
            place = region["ranks"][k], region["files"][k]
            start = region["starts"][k] + entry["offset"]
            origin = [i * c for i, c in zip(index, chunk)]
            for corner, offset, size in self._inner_chunks(entry, whole.itemsize, origin, place, start):
                piece = self.packs[place][0][offset : offset + size]
                self.checksums.setdefault(place, {})[offset] = piece[-4:]
                values = np.frombuffer(checked(piece), whole.dtype).reshape(inner)
                first = [o + c for o, c in zip(origin, corner)]
                part = whole[(*(slice(a, a + n) for a, n in zip(first, inner)), ...)]
                part[...] = values[(*map(slice, part.shape), ...)]
        return whole

    def _inner_chunks(self, entry, item_bytes, origin, place, start):
        """Chunks: yield the corner of each inner chunk in its chunk, its offset in the file, and its bytes."""
        chunk, inner = entry["chunk"], entry.get("inner", entry["chunk"])
        counts = [c // i for c, i in zip(chunk, inner)]
        corners = [[p * i for p, i in zip(at, inner)] for at in product(*map(range, counts))]
        inside = [all(o + c < n for o, c, n in zip(origin, corner, entry["shape"])) for corner in corners]
        size = math.prod(inner) * item_bytes + 4
        if "inner" in entry:
            after = start + size * sum(inside)
            table = checked(self.packs[place][0][after : after + 16 * len(corners) + 4])
            offsets = [tuple(pair) for pair in np.frombuffer(table, "<u8").reshape(-1, 2).tolist()]
            left_out = (2**64 - 1, 2**64 - 1)
            expected = iter(range(0, size * len(corners), size))
            assert offsets == [(next(expected), size) if there else left_out for there in inside]
        here = [corner for corner, there in zip(corners, inside) if there]
        yield from ((corner, start + number * size, size) for number, corner in enumerate(here))
