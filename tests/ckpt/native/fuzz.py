"""Random tables of copies and reads for the C code, each compared with numpy, and frames, which Blosc decompresses.

    python -m tests.ckpt.native.fuzz LIBRARY SEED TABLES

loads the C code from LIBRARY, which may be compiled with sanitizers, and fails at the first table with a wrong result.
"""

from __future__ import annotations

import ctypes
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

_GUARD = 0xA5
_SIZES = (0, 1, 3, 7, 8, 15, 16, 63, 64, 65, 255, 256, 257, 1000, 4095, 4096, 4097, 9000, 70_000)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def instead_of_the_installed(library: str) -> None:
    """Have `ckpt.native`, imported after this, use another library."""
    real: Callable[..., ctypes.CDLL] = ctypes.CDLL

    def load(name: Any, *arguments: Any, **options: Any) -> ctypes.CDLL:
        return real(library if "_library." in str(name) else name, *arguments, **options)

    ctypes.CDLL = load  # type: ignore[assignment, misc]


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def _memory(size: int) -> Bytes:
    """Allocate separate memory, so that a sanitizer detects accesses just outside of it."""
    return np.full(size, _GUARD, np.uint8)


def _size(rng: random.Random) -> int:
    return rng.choice(_SIZES) if rng.random() < 0.7 else rng.randrange(20_000)


def _copies(rng: random.Random, noise: Bytes) -> None:
    """A table of copies, checksums alone and of zeros, continued ones, with and without an address for them."""
    import google_crc32c

    from ckpt import native

    runs = np.zeros(rng.randrange(1, 12), native.RUN)
    expected, kept, crc = [], [], 0
    for number, run in enumerate(runs):
        kind, size = rng.choice(("copy", "copy", "check", "zeros")), _size(rng)
        continues = number > 0 and rng.random() < 0.4
        start = rng.randrange(len(noise) - size)
        source = np.zeros(size, np.uint8) if kind == "zeros" else noise[start : start + size].copy()
        target = _memory(size if kind == "copy" else 0)
        checksum = _memory(4 if rng.random() < 0.5 else 0)
        crc = google_crc32c.extend(crc if continues else 0, source.tobytes())
        run["to"] = _address(target) if kind == "copy" else 0
        run["from"] = 0 if kind == "zeros" else _address(source)
        run["bytes"], run["continues"] = size, continues
        run["checksum_at"] = _address(checksum) if len(checksum) else 0
        expected.append(crc)
        kept.append((source, target, checksum, crc))
    native.copy_runs(runs)
    assert runs["crc32c"].tolist() == expected
    for source, target, checksum, crc in kept:
        assert not len(target) or np.array_equal(source, target)
        assert not len(checksum) or int.from_bytes(checksum.tobytes(), "little") == crc


def _reads(rng: random.Random, noise: Bytes) -> None:
    """A table of reads from a file with several series of blocks, which may be damaged or truncated."""
    import google_crc32c

    from ckpt import native

    file_bytes, segments, targets, needed = bytearray(), [], [], set[tuple[int, int]]()
    for _ in range(rng.randrange(1, 5)):
        file_bytes += bytes(rng.choice((0, 12, 5000)))
        base, block_bytes = len(file_bytes), rng.choice((1, 7, 100, 4096, (256 << 10) - 4, (256 << 10) - 2, 300_000))
        content = noise[: rng.randrange(1, 40 if block_bytes < 10_000 else 4) * block_bytes]
        for first in range(0, len(content), block_bytes):
            block = content[first : first + block_bytes].tobytes()
            file_bytes += block + google_crc32c.value(block).to_bytes(4, "little")
        at = 0
        while at < len(content) and rng.random() < 0.9:
            at += rng.choice((0, 0, 1, _size(rng)))
            nbytes = min(_size(rng), max(0, len(content) - at))
            step = nbytes + rng.choice((0, 1, _size(rng)))
            rows = 1 + rng.randrange(4) if step * 4 <= len(content) - at else 1
            row_bytes = nbytes + rng.choice((0, 3))
            target = _memory(rows * row_bytes)
            segments.append((base, block_bytes, at, _address(target), nbytes, rows, step, row_bytes))
            lines = [content[at + row * step :][:nbytes] for row in range(rows)]
            targets.append((target.reshape(rows, row_bytes)[:, :nbytes], lines))
            for row in range(rows if nbytes else 0):
                start = at + row * step
                for number in range(start // block_bytes, (start + nbytes - 1) // block_bytes + 1):
                    place = base + number * (block_bytes + 4)
                    needed.add((place, place + block_bytes + 4))
            at += (rows - 1) * step + nbytes
    whole = True
    if rng.random() < 0.3:
        bit = rng.randrange(8 * len(file_bytes))
        file_bytes[bit // 8] ^= 1 << bit % 8
        whole = not any(start <= bit // 8 < end for start, end in needed)
    if rng.random() < 0.2:
        del file_bytes[rng.randrange(len(file_bytes)) :]
        whole = whole and all(end <= len(file_bytes) for _, end in needed)
    with tempfile.TemporaryFile() as file:
        file.write(file_bytes)
        file.flush()
        got = native.read_checked(file.fileno(), np.array(segments, native.SEGMENT))
    assert got == whole, (got, whole)
    for found, lines in targets:
        assert not whole or all(np.array_equal(row, line) for row, line in zip(found, lines, strict=True))


def _frames(rng: random.Random, noise: Bytes) -> None:
    """Frames of contents that become smaller, or partly, or not at all."""
    from numcodecs import blosc

    from ckpt.storage.fast_zstd import FastZstd

    zstd = FastZstd.load()
    if zstd is None:
        return
    for _ in range(rng.randrange(1, 4)):
        itemsize = rng.choice((2, 4, 8))
        content = noise[: (1 + _size(rng)) * itemsize].copy().reshape(-1, itemsize)
        content[:, : rng.randrange(itemsize + 1)] &= rng.choice((0, 1, 7, 127))
        content[rng.randrange(len(content)) :] &= rng.choice((0, 255))
        frame = _memory(content.nbytes + 16)
        size = zstd.compress(memoryview(content.reshape(-1)), itemsize, memoryview(frame))
        assert size is not None
        assert blosc.decompress(frame[:size].copy()) == content.tobytes()


def main(library: str, seed: int, tables: int) -> None:
    """Try random tables with every implementation that the processor supports."""
    instead_of_the_installed(library)
    from ckpt import native

    noise = np.random.default_rng(seed).integers(0, 256, 1_300_000, np.uint8)
    for number in range(tables):
        rng = random.Random(f"{seed} {number}")
        level = native.choose(rng.randrange(3))
        try:
            rng.choice((_copies, _reads, _frames))(rng, noise)
        except AssertionError as error:
            raise SystemExit(f"seed {seed}, table {number}, level {level}: {error!r}") from error
    print(f"{tables} tables, seed {seed}: all as expected")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
