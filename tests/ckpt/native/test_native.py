"""Copies and checksums: every implementation in C and the portable one agree with a known one."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpt import native
from ckpt.planning.tensor_records import TensorRecords

LEVELS = {-1: "portable", 0: "any processor", 1: "128 bits", 2: "512 bits"}
GUARD = 64  # bytes around a target that must stay as they are
NOISE = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)


@pytest.fixture(params=LEVELS, ids=LEVELS.values(), scope="module", autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    used = native.choose(request.param)
    if used != request.param:
        native.choose(max(LEVELS))
        pytest.skip(f"this processor cannot work with {LEVELS[request.param]}")
    yield used
    native.choose(max(LEVELS))


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def copy(source: np.ndarray, target: np.ndarray, checksum: np.ndarray | None = None) -> int:
    runs = np.zeros(1, native.RUN)
    runs["to"], runs["from"], runs["bytes"] = address(target), address(source), source.nbytes
    runs["checksum_at"] = 0 if checksum is None else address(checksum)
    native.copy_runs(runs)
    return int(runs["crc32c"][0])


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # the examples of RFC 3720, appendix B.4, and the check value of CRC catalogues
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_known_checksums(data: bytes, crc: int) -> None:
    assert native.crc32c(data) == crc
    assert native.crc32c(memoryview(bytearray(data))) == crc


@given(size=st.integers(0, 20_000), start=st.integers(0, 300), initial=st.integers(0, 2**32 - 1))
@example(size=1 << 19, start=1, initial=0)
def test_checksums_of_any_size_and_start(size: int, start: int, initial: int) -> None:
    data = NOISE[start : start + size]
    assert native.crc32c(data.data, initial) == google_crc32c.extend(initial, data.tobytes())


@given(size=st.integers(0, 20_000), source_at=st.integers(0, 130), target_at=st.integers(0, 130))
@example(size=(1 << 19) + 3, source_at=1, target_at=63)
@example(size=4096, source_at=0, target_at=0)
def test_copies_of_any_size_and_place(size: int, source_at: int, target_at: int) -> None:
    source = NOISE[source_at : source_at + size]
    around = np.full(GUARD + target_at + size + GUARD, 0xA5, np.uint8)
    first = GUARD + target_at
    assert copy(source, around[first:]) == google_crc32c.value(source.tobytes())
    assert np.array_equal(around[first : first + size], source)
    assert (around[:first] == 0xA5).all()
    assert (around[first + size :] == 0xA5).all()


def test_the_checksum_is_put_behind_the_bytes() -> None:
    source = NOISE[5 : 5 + 70_001]
    target = np.zeros(len(source) + 4 + GUARD, np.uint8)
    crc = copy(source, target, target[len(source) :])
    assert target[len(source) :].tobytes() == crc.to_bytes(4, "little") + bytes(GUARD)
    assert crc == google_crc32c.value(source.tobytes())


def test_many_runs_in_one_call() -> None:
    sizes = [0, 1, 17, 4095, 4096, 4097, 100_000]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    runs = np.zeros(len(sizes), native.RUN)
    for run, target in zip(runs, targets, strict=True):
        run["to"], run["from"], run["bytes"] = address(target), address(NOISE), len(target)
    native.copy_runs(runs[:-1])
    assert all(np.array_equal(target, NOISE[: len(target)]) for target in targets[:-1])
    assert not targets[-1].any()
    assert runs["crc32c"].tolist()[:-1] == [google_crc32c.value(NOISE[:size].tobytes()) for size in sizes[:-1]]


@given(
    parts=st.lists(st.tuples(st.sampled_from(["copied", "checked", "zeros"]), st.integers(0, 5_000)), min_size=1),
    alone=st.integers(0, 3),
)
@example(parts=[("zeros", 3 << 20), ("copied", 1), ("zeros", 1 << 40)], alone=0)
def test_runs_that_continue_have_one_checksum(parts: list[tuple[str, int]], alone: int) -> None:
    """Other runs, which do not continue, come before."""
    whole, target, stored = b"", np.zeros(sum(size for kind, size in parts if kind == "copied"), np.uint8), bytearray(4)
    runs = np.zeros(alone + len(parts), native.RUN)
    runs["from"], runs["bytes"] = address(NOISE), 100
    expected, at = 0, 0
    for number, (kind, size) in enumerate(parts):
        source = 0 if kind == "zeros" else address(NOISE) + number
        copied = address(target) + at if kind == "copied" else 0
        runs[alone + number] = copied, source, size, 0, number > 0, 0
        if kind == "zeros":
            expected = native.crc32c_joined(expected, zeros_checksum(size), size)
        else:
            expected = google_crc32c.extend(expected, NOISE[number : number + size].tobytes())
        if kind == "copied":
            whole += NOISE[number : number + size].tobytes()
            at += size
    runs["checksum_at"][-1] = address(np.frombuffer(stored, np.uint8))
    native.copy_runs(runs)
    assert int(runs["crc32c"][-1]) == expected == int.from_bytes(stored, "little")
    assert target.tobytes() == whole
    assert set(runs["crc32c"][:alone].tolist()) <= {google_crc32c.value(NOISE[:100].tobytes())}


def zeros_checksum(size: int) -> int:
    """Return the checksum of zeros, joined from halves: a terabyte does not fit into memory."""
    if size <= 1 << 16:
        return int(google_crc32c.value(bytes(size)))
    half = zeros_checksum(size // 2)
    both = native.crc32c_joined(half, half, size // 2)
    return both if size % 2 == 0 else native.crc32c_joined(both, zeros_checksum(1), 1)


@given(parts=st.lists(st.integers(0, 5_000), max_size=6))
def test_joined_checksums(parts: list[int]) -> None:
    joined, at = 0, 0
    for size in parts:
        joined = native.crc32c_joined(joined, native.crc32c(NOISE[at : at + size].data), size)
        at += size
    assert joined == native.crc32c(NOISE[:at].data)


def write_blocks(path: Path, content: bytes, piece_bytes: int) -> None:
    pieces = [content[at : at + piece_bytes] for at in range(0, len(content), piece_bytes)]
    path.write_bytes(b"".join(piece + google_crc32c.value(piece).to_bytes(4, "little") for piece in pieces))


def series(piece_bytes: int, segments: list[tuple[int, int, int]]) -> np.ndarray:
    """Return segments of one series at the beginning of a file: first byte, address, bytes."""
    return np.array([(0, piece_bytes, at, to, size, 1, 0, 0) for at, to, size in segments], native.SEGMENT)


def read_segments(path: Path, piece_bytes: int, segments: list[tuple[int, int, int]]) -> bool:
    return read_table(path, series(piece_bytes, segments))


def read_table(path: Path, table: np.ndarray) -> bool:
    """Read from the file; bytes of it that are in memory give the same result."""
    sound = read_file(path, table)
    first = int(table["base"].min(initial=0))
    assert native.check_pieces(path.read_bytes()[first:], first, table) == sound
    return sound


def read_file(path: Path, table: np.ndarray) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return native.read_checked(fd, table)
    finally:
        os.close(fd)


@pytest.mark.parametrize("piece_bytes", [1, 100, (256 << 10) - 4, (256 << 10) - 2, 256 << 10, 700_000])
@pytest.mark.parametrize("padding", [0, 1, 99])
def test_a_piece_is_read_and_checked(tmp_path: Path, piece_bytes: int, padding: int) -> None:
    content = NOISE[: 2 * piece_bytes].tobytes()[:-padding] if padding else NOISE[: 2 * piece_bytes].tobytes()
    content = content.ljust(2 * piece_bytes, b"\0")
    file = tmp_path / "file"
    write_blocks(file, content, piece_bytes)
    wanted = max(1, piece_bytes - padding)
    target = np.full(wanted + GUARD, 0xA5, np.uint8)
    second = [(piece_bytes, address(target), wanted)]
    assert read_segments(file, piece_bytes, second)
    assert target.tobytes() == content[piece_bytes:][:wanted] + b"\xa5" * GUARD
    data, start = bytearray(file.read_bytes()), piece_bytes + 4
    for at in (start, start + piece_bytes - 1, start + piece_bytes, start + piece_bytes + 3):  # its ends, its checksum
        data[at] ^= 0x10
        file.write_bytes(data)
        assert not read_segments(file, piece_bytes, second)
        data[at] ^= 0x10
    data[0] ^= 0x10  # of another block
    file.write_bytes(data)
    assert read_segments(file, piece_bytes, second)
    for size in (start, start + piece_bytes, start + piece_bytes + 3):
        file.write_bytes(data[:size])
        assert not read_segments(file, piece_bytes, second)


@given(
    piece_bytes=st.integers(1, 400) | st.just(300_000),
    lengths=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 700)), min_size=1, max_size=8),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_segments_go_to_their_places(tmp_path: Path, piece_bytes: int, lengths: list[tuple[int, int]]) -> None:
    total = sum(gap + size for gap, size in lengths)
    content = NOISE[: -(-max(total, 1) // piece_bytes) * piece_bytes].tobytes()
    file = tmp_path / "file"
    write_blocks(file, content, piece_bytes)
    targets = [np.full(size + GUARD, 0xA5, np.uint8) for _, size in lengths]
    segments, at = [], 0
    for (gap, size), target in zip(lengths, targets, strict=True):
        segments.append((at + gap, address(target), size))
        at += gap + size
    assert read_segments(file, piece_bytes, segments)
    for (at, _, size), target in zip(segments, targets, strict=True):
        assert target.tobytes() == content[at : at + size] + b"\xa5" * GUARD


@given(
    parts=st.lists(
        st.tuples(
            st.integers(0, 6000),  # bytes before the series
            st.integers(1, 400) | st.just(9000),  # bytes of a block
            st.integers(0, 500),  # the first byte
            st.integers(0, 300) | st.just(3000),  # bytes of a row
            st.integers(0, 12),  # rows
            st.integers(0, 3000),  # bytes between rows
        ),
        min_size=1,
        max_size=8,
    ),
    backwards=st.booleans(),
    flip=st.none() | st.integers(0, 1 << 20),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_many_series(tmp_path: Path, parts: list[tuple[int, ...]], backwards: bool, flip: int | None) -> None:
    """A flipped bit is found if it is in a block that is needed, and nowhere else."""
    content, table, expected, needed = b"", [], [], set[int]()
    for gap, block, at, size, rows, between in parts:
        base = len(content) + gap
        step = size + between
        length = -(-(at + rows * step) // block) * block
        data = np.resize(NOISE[len(table) :], length).tobytes()
        checked = b"".join(
            data[n : n + block] + google_crc32c.value(data[n : n + block]).to_bytes(4, "little")
            for n in range(0, length, block)
        )
        content += bytes(gap) + checked
        target = np.full((rows, size + GUARD), 0xA5, np.uint8)
        first, to_step = (rows - 1, -(size + GUARD)) if backwards and rows else (0, size + GUARD)
        to = address(target) + first * (size + GUARD)
        table.append((base, block, at, to, size, rows, step, to_step % (1 << 64)))
        wanted = [data[at + row * step :][:size] + b"\xa5" * GUARD for row in range(rows)]
        expected.append((target, b"".join(wanted[::-1] if backwards else wanted)))
        for row in range(rows if size else 0):
            for number in range((at + row * step) // block, (at + row * step + size - 1) // block + 1):
                needed |= set(range(base + number * (block + 4), base + (number + 1) * (block + 4)))
    file = tmp_path / "file"
    changed = bytearray(content)
    if flip is not None and content:
        changed[flip % len(content)] ^= 0x20
    file.write_bytes(changed)
    sound = flip is None or not content or flip % len(content) not in needed
    assert read_table(file, np.array(table, native.SEGMENT)) == sound
    if sound:
        for target, whole in expected:
            assert target.tobytes() == whole


def bytes_read(path: Path, table: np.ndarray, level: int) -> tuple[int, int]:
    """Return how many calls read a file, and how many bytes they read. Without a map, which needs none."""

    def counts() -> list[int]:
        lines = Path("/proc/self/io").read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith(("syscr", "rchar"))]

    counts()
    overhead = [after - before for before, after in zip(counts(), counts(), strict=True)]
    native.choose(min(level, 0))
    before = counts()
    assert read_file(path, table)
    after = counts()
    native.choose(level)
    nbytes, calls = (b - a - c for a, b, c in zip(before, after, overhead, strict=True))
    return calls, nbytes


def test_small_blocks_near_each_other_are_read_together(tmp_path: Path, level: int) -> None:
    file, target = tmp_path / "file", np.zeros(1 << 20, np.uint8)
    block = NOISE[:500].tobytes()
    checked = block + google_crc32c.value(block).to_bytes(4, "little") + bytes(8)
    file.write_bytes(checked * 1000)
    table = np.array([(512 * n, 500, 0, address(target) + 500 * n, 500, 1, 0, 0) for n in range(1000)], native.SEGMENT)
    calls, nbytes = bytes_read(file, table, level)
    assert calls < 10
    assert 512 * 999 <= nbytes <= 512 * 1000
    assert target[: 500 * 1000].tobytes() == block * 1000
    calls, nbytes = bytes_read(file, table[::100].copy(), level)
    assert (calls, nbytes) == (10, 10 * 504)


def test_the_buffer_ends_in_a_checksum(tmp_path: Path) -> None:
    """With blocks of this size, the first read of the system ends after two bytes of a checksum."""
    block_bytes = (256 << 10) - 2
    file, target = tmp_path / "file", np.full(3 * block_bytes + GUARD, 0xA5, np.uint8)
    write_blocks(file, NOISE[: 3 * block_bytes].tobytes(), block_bytes)
    segments = [(n * block_bytes, address(target) + n * block_bytes, block_bytes) for n in range(3)]
    assert read_segments(file, block_bytes, segments)
    assert np.array_equal(target[: 3 * block_bytes], NOISE[: 3 * block_bytes])
    assert (target[3 * block_bytes :] == 0xA5).all()


def test_blocks_between_rows_are_not_read(tmp_path: Path, level: int) -> None:
    file, target = tmp_path / "file", np.zeros((10, 100), np.uint8)
    write_blocks(file, NOISE[: 100 * 10_000].tobytes(), 10_000)
    rows = np.array([(0, 10_000, 5, address(target), 100, 10, 100_000, 100)], native.SEGMENT)
    assert bytes_read(file, rows, level) == (10, 10 * 10_004)
    assert np.array_equal(target, NOISE[: 10 * 100_000].reshape(10, 100_000)[:, 5:105])


@pytest.mark.parametrize(
    "segments",
    [
        [(0, 64, 8, 8, 1, 0), (0, 64, 0, 8, 1, 0)],
        [(0, 64, 0, 8, 1, 0), (0, 64, 7, 8, 1, 0)],
        [(0, 64, 0, 8, 4, 16), (0, 64, 8, 8, 1, 0)],
        [(68, 64, 0, 8, 1, 0), (0, 64, 0, 8, 1, 0)],
        [(0, 64, 0, 8, 1, 0), (67, 64, 0, 8, 1, 0)],
        [(0, 64, 0, 8, 2, 7)],
    ],
)
def test_segments_must_be_in_order(segments: list[tuple[int, ...]]) -> None:
    target = np.zeros(64, np.uint8)
    table = [(base, block, at, address(target), size, rows, step, 8) for base, block, at, size, rows, step in segments]
    with pytest.raises(ValueError, match="in order"):
        native.read_checked(-1, np.array(table, native.SEGMENT))


def test_blocks_have_bytes() -> None:
    with pytest.raises(ValueError, match="blocks"):
        native.read_checked(-1, series(0, [(0, address(NOISE), 8)]))


def test_an_error_of_the_system_is_an_error() -> None:
    target = np.zeros(8, np.uint8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.read_checked(-1, series(8, [(0, address(target), 8)]))


def test_runs_must_be_what_the_library_takes() -> None:
    with pytest.raises(ValueError, match="RUN"):
        native.copy_runs(np.zeros((2, 5), np.uint64))
    with pytest.raises(ValueError, match="contiguous"):
        native.copy_runs(np.zeros(4, native.RUN)[::2])
    runs = np.zeros(1, native.RUN)
    runs["continues"] = 1
    with pytest.raises(ValueError, match="first run"):
        native.copy_runs(runs)


def _described(tensors: list[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    records = TensorRecords.of(tensors)
    return None if records is None else (records.addresses.tolist(), records.described.tolist())


def test_tensors_are_described_as_python_describes_them(level: int) -> None:
    """Also those of so many dimensions that there is no room for them at first."""
    matrix = torch.zeros(40, 60)
    tensors = [
        torch.zeros([1] * 40 + [2] * 8),
        torch.zeros(()),
        torch.zeros(0, 7),
        matrix[3:, ::2].T,
        matrix.view(torch.int32),
        torch.nn.Parameter(matrix),
    ]
    found = _described(tensors)
    if level == -1:
        assert found is None
        return
    assert found is not None
    addresses, words = found
    assert addresses == [tensor.data_ptr() for tensor in tensors]
    dtypes, devices = [], set()
    for tensor in tensors:
        dtype, device, *words = words
        assert words[: 1 + 2 * tensor.dim()] == [tensor.dim(), *tensor.shape, *tensor.stride()]
        words = words[1 + 2 * tensor.dim() :]
        dtypes.append(dtype)
        devices.add(device)
    assert words == []
    assert len(devices) == 1
    assert dtypes[4] != dtypes[3] == dtypes[5]
    assert _described([]) == ([], [])


def test_tensors_that_are_not_strided_or_are_negated_are_not_described() -> None:
    plain = torch.zeros(3)
    for other in (torch.zeros(3).to_sparse(), torch._neg_view(plain), torch.tensor([1j]).conj().imag):
        assert _described([plain, other, plain]) is None


def _key(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, native.DIGEST_KEY_BYTES, np.uint8).tobytes()


@pytest.mark.parametrize("pages", [0, 1, 2, 5])
def test_digests_tell_data_apart(pages: int) -> None:
    data = NOISE[: pages * 4096].copy()
    made = native.digest(data.data, _key(1))
    assert native.digest(data.copy().data, _key(1)) == made
    assert len(made) == 32
    if pages:
        assert native.digest(data.data, _key(2)) != made
    for at in range(0, len(data), 97):
        for bit in (1, 128):
            data[at] ^= bit
            assert native.digest(data.data, _key(1)) != made
            data[at] ^= bit
    assert native.digest(data.data, _key(1)) == made


@given(first=st.integers(0, 1023), second=st.integers(0, 1023))
def test_words_that_change_places_have_another_digest(first: int, second: int) -> None:
    """No sum over words that are alone, or over pairs without an order, is like that."""
    data = NOISE[:8192].copy()
    words = data.view(np.uint64)
    made = native.digest(data.data, _key(3))
    words[[first, second]] = words[[second, first]]
    assert (native.digest(data.data, _key(3)) == made) == (first == second)


def test_the_hashes_of_pages_are_those_of_the_formula(level: int) -> None:
    if level < 0:
        pytest.skip("the portable digest is that of hashlib")
    key = _key(4)
    words, keys = NOISE[:12288].view(np.uint64).tolist(), np.frombuffer(key, np.uint64).tolist()

    def polynomials(a: int, b: int) -> int:
        return int(np.bitwise_xor.reduce(np.array([a << bit for bit in range(64) if b >> bit & 1] or [0], object)))

    def hashed(block: list[int], shift: int) -> int:
        total = 0
        for n in range(0, len(block), 2):
            a, b, k, next_k = block[n], block[n + 1], keys[n + shift], keys[n + shift + 1]
            if level < 2:
                total += ((a + k) % 2**64) * ((b + next_k) % 2**64)
            else:
                total ^= polynomials(a ^ k, b ^ next_k)
        return total % 2**128

    hashes = [hashed(block, shift) for block in (words[:1024], words[1024:]) for shift in (0, 2)]
    expected = b"".join(each.to_bytes(16, "little") for each in hashes)
    assert native.digest(NOISE[:12288].data, key) == hashlib.blake2b(expected, digest_size=32).digest()


def test_digests_are_of_whole_pages() -> None:
    with pytest.raises(ValueError, match="whole pages"):
        native.digest(NOISE[:100].data, _key(1))
    with pytest.raises(ValueError, match="not a key"):
        native.digest(NOISE[:4096].data, b"short")
