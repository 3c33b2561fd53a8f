"""A database of tensorstore over files that exist: keys, each with a text or a range of bytes in one of the files.

tensorstore's key-value store ``ocdbt`` is a B+tree. A value stands in the tree, or in any file below the base of the
database. So two files beside the packs of a step make it readable for every program that has tensorstore:

    manifest.ocdbt    where the root of the tree is
    ocdbt.nodes       its nodes, children before parents

The encoding is described at https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format; what is used
of it is in docs/format.md. numpy makes the columns of a node: there is no loop over entries. The same entries make the
same bytes, so several processes may write them at once. Free of torch.

Compressed nodes are frames of zstd, by `numcodecs`. What is to be decompressed is checked first: it is one frame, says
how many bytes it holds, and ends where the data end. So no more memory is needed than for the content, whatever the
bytes are.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.native import crc32c
from ckpt.storage.names import NODES
from ckpt.storage.regular_files import DamagedFileError

MAX_TEXT_BYTES = 1 << 20
"""tensorstore refuses a larger value in a node."""

FRAME_HEAD_BYTES, FRAME_TAIL_BYTES = 14, 4
"""The bytes of a node before and behind its content."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Compress = Callable[[bytes], bytes | None]  # None: the node is not compressed

_NODE_BYTES = 256 << 10  # a reader gets the root, and a leaf for each array that it opens
_ENTRY_BYTES = 16  # of an entry in a node, about, without its key and its text
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_VERSION, _SINGLE_MANIFEST, _GENERATION = 0, 0, 1
_UNCOMPRESSED, _ZSTD = 0, 1
_COMPRESSED_BYTES = 1 << 20  # of the nodes of a database, in all
_MAX_NODE_BYTES = 8 << 20  # only a program that writes to the database heeds it
_ARITY_LOG2 = 4  # of the tree of versions, of which there is one
_COMMIT_TIME = 1  # in ns; always the same, as the bytes are

_MAGIC = b"\x28\xb5\x2f\xfd"  # of a frame of zstd
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_DICTIONARY_BYTES = (0, 1, 2, 4)
_BLOCK_HEADER_BYTES = 3
_RLE = 1  # a type of blocks: one byte, repeated
_CHECKSUM_BYTES = 4
_LEVEL = 1


# -- compressed nodes --------------------------------------------------------------------------------------------------


def compressed(data: bytes) -> bytes:
    """Return a frame with this content."""
    from numcodecs import zstd  # here: it takes a while, and small databases are not compressed

    frame: bytes = zstd.compress(data, _LEVEL)
    return frame


def decompressed(frame: bytes | memoryview, nbytes: int) -> Bytes:
    """Return the content of a frame as bytes. DamagedFileError unless these are `nbytes` bytes."""
    from numcodecs import zstd

    _check(frame, nbytes)
    content: Bytes = np.empty(nbytes, np.uint8)
    try:
        zstd.decompress(frame, content)
    except (RuntimeError, ValueError) as error:
        raise DamagedFileError(f"cannot be decompressed: {error}") from error
    return content


def _check(frame: bytes | memoryview, nbytes: int) -> None:
    """Raise DamagedFileError unless `frame` is one frame of zstd, which says that it holds `nbytes` bytes.

    The format is in RFC 8878, sections 3.1.1.1 (the header) and 3.1.1.2 (the blocks).
    """
    header = bytes(frame[:18])
    if len(header) < 6 or header[:4] != _MAGIC:
        raise DamagedFileError("cannot be decompressed: it has no frame of zstd")
    flags = header[4]
    is_single = flags >> 5 & 1
    size_bytes = _CONTENT_SIZE_BYTES[flags >> 6] or is_single
    start = 5 + (1 - is_single) + _DICTIONARY_BYTES[flags & 3]
    size = int.from_bytes(header[start : start + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    if not size_bytes or size != nbytes:
        raise DamagedFileError(f"cannot be decompressed: its frame does not hold {nbytes} bytes")
    end, is_last = start + size_bytes, False
    while not is_last and end + _BLOCK_HEADER_BYTES <= len(frame):
        block = int.from_bytes(bytes(frame[end : end + _BLOCK_HEADER_BYTES]), "little")
        is_last = bool(block & 1)
        end += _BLOCK_HEADER_BYTES + (1 if block >> 1 & 3 == _RLE else block >> 3)
    end += _CHECKSUM_BYTES * (flags >> 2 & 1)
    if not is_last or end != len(frame):
        raise DamagedFileError("cannot be decompressed: its frame does not end where the chunk does")


# -- the database ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Front:
    """Sorted keys, each without what it shares with the one before.

    `shared` are the lengths of that, `lengths` those of the rest, and `rest` are these, one behind the other.
    """

    shared: Numbers
    lengths: Numbers
    rest: Bytes


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a database, at least one, as columns that are sorted by key.

    A value is in the file number `file` of `files`. If that is -1, it is the next one of `texts`,
    and has no `offset`. `key_of` returns the key of an entry.
    """

    keys: Front
    files: Sequence[str]
    file: Numbers
    offset: Numbers
    nbytes: Numbers
    texts: Sequence[bytes]
    key_of: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class _Child:
    """A node: its first key, how many bytes all keys below it share, its place, and sums over all below."""

    key: bytes
    common: int
    offset: int
    nbytes: int
    keys: int
    tree_bytes: int
    value_bytes: int


def database(entries: Entries, node_bytes: int = _NODE_BYTES, compress: Compress = compressed) -> tuple[bytes, bytes]:
    """Return the manifest and the nodes, of about `node_bytes` each, of a database.

    If there are many, `compress` is called with the content of each, in order. `validate` makes a database again: what
    this function makes of an index must not change. ValueError for a text of more than `MAX_TEXT_BYTES`.
    """
    if max(map(len, entries.texts), default=0) > MAX_TEXT_BYTES:
        raise ValueError(f"the metadata of an array have more than {MAX_TEXT_BYTES} bytes, which tensorstore refuses")
    nodes, written = list[bytes](), 0
    children, height = list[_Child](), 0
    leaves = _Leaves(entries)
    cuts, compression = leaves.cuts(node_bytes), compress if leaves.nbytes >= _COMPRESSED_BYTES else None
    for first, end in itertools.pairwise(cuts):
        key, common = leaves.prefix(first, end, is_root=len(cuts) == 2)
        node = _frame(_NODE_MAGIC, leaves.body(first, end, key[common:], common), compression)
        value_bytes = leaves.value_bytes(first, end)
        children.append(_Child(key, common, written, len(node), end - first, len(node), value_bytes))
        nodes.append(node)
        written += len(node)
    while len(children) > 1:
        height += 1
        parents = list[_Child]()
        groups = _groups(children, node_bytes)
        for group in groups:
            key, last = group[0].key, group[-1]
            common = 0 if len(groups) == 1 else min(common_length(key, last.key), last.common)
            node = _frame(_NODE_MAGIC, _interior(height, group, common), compression)
            keys, tree_bytes = sum(child.keys for child in group), sum(child.tree_bytes for child in group)
            value_bytes = sum(child.value_bytes for child in group)
            parents.append(_Child(key, common, written, len(node), keys, tree_bytes + len(node), value_bytes))
            nodes.append(node)
            written += len(node)
        children = parents
    data = b"".join(nodes)
    return _manifest(children[0], height, data), data


class _Leaves:
    """Makes the leaves of a tree from columns."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._rests = ends_of(entries.keys.lengths)
        self._is_text = entries.file < 0
        self._texts = ends_of(self._is_text)
        self._names = _matrix([file.encode() for file in entries.files])
        sizes = entries.keys.lengths + np.where(self._is_text, entries.nbytes, 0) + _ENTRY_BYTES
        self._sizes = np.cumsum(sizes)

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves, about."""
        return int(self._sizes[-1])

    def cuts(self, node_bytes: int) -> list[int]:
        """Return where leaves begin, and where the last one ends."""
        number = self._sizes // node_bytes
        return [0, *(np.flatnonzero(number[1:] != number[:-1]) + 1).tolist(), len(number)]

    def prefix(self, first: int, end: int, *, is_root: bool) -> tuple[bytes, int]:
        """Return the first key of a leaf, and how many bytes of it all keys share. None are taken off the root's."""
        key = self._entries.key_of(first)
        shared = self._entries.keys.shared[first + 1 : end]
        return key, 0 if is_root else min(len(key), int(shared.min(initial=len(key))))

    def value_bytes(self, first: int, end: int) -> int:
        """Return the bytes of the values that are in files."""
        return int(self._entries.nbytes[first:end][~self._is_text[first:end]].sum())

    def body(self, first: int, end: int, key: bytes, common: int) -> bytes:
        """Return the content of a leaf, whose first key is `key` without the `common` bytes that all keys share."""
        entries, keys, here = self._entries, self._entries.keys, slice(first, end)
        behind = slice(first + 1, end)
        is_text = self._is_text[here]
        used, ids = np.unique(entries.file[here][~is_text], return_inverse=True)
        texts = entries.texts[self._texts[first] : self._texts[end]]
        return b"".join(
            [
                b"\0",  # the height
                _file_table(front_coded(self._names[used])),
                _varints([end - first]),
                _varints(keys.shared[behind] - common),
                _varints([len(key)]),
                _varints(keys.lengths[behind]),
                key,
                keys.rest[self._rests[first + 1] : self._rests[end]].tobytes(),
                _varints(entries.nbytes[here]),
                (~is_text).astype(np.uint8).tobytes(),
                _varints(ids),
                _varints(entries.offset[here][~is_text]),
                *texts,
            ]
        )


def _groups(children: list[_Child], node_bytes: int) -> list[list[_Child]]:
    """Divide several children between parents, of which there are fewer."""
    mean = sum(len(child.key) for child in children) / len(children)
    count = -(-len(children) // max(2, int(node_bytes / (mean + _ENTRY_BYTES))))
    cuts = [len(children) * number // count for number in range(count + 1)]
    return [children[first:end] for first, end in itertools.pairwise(cuts)]


def _interior(height: int, children: list[_Child], common: int) -> bytes:
    """Return the content of a node above others, all of whose keys share `common` bytes."""
    keys = [child.key[common:] for child in children]
    shared = [common_length(one, other) for one, other in itertools.pairwise(keys)]
    rests = [key[length:] for key, length in zip(keys, [0, *shared], strict=True)]
    columns = (
        [child.common - common for child in children],
        [0] * len(children),  # the number of the file
        [child.offset for child in children],
        [child.nbytes for child in children],
        [child.keys for child in children],
        [child.tree_bytes for child in children],
        [child.value_bytes for child in children],
    )
    head = [bytes([height]), _own_file(), _varints([len(keys)]), _varints(shared), _varints([*map(len, rests)])]
    # The lengths of common prefixes stand before the keys.
    return b"".join([*head, _varints(columns[0]), *rests, *map(_varints, columns[1:])])


def _manifest(root: _Child, height: int, nodes: bytes) -> bytes:
    numbers = [0, root.offset, root.nbytes, root.keys, root.tree_bytes, root.value_bytes]
    return _frame(
        _MANIFEST_MAGIC,
        b"".join(
            [
                hashlib.blake2b(nodes, digest_size=16).digest(),  # in place of a random name of the database
                bytes([_SINGLE_MANIFEST]),
                _varints([MAX_TEXT_BYTES, _MAX_NODE_BYTES]),
                bytes([_ARITY_LOG2]),
                _varints([_UNCOMPRESSED]),
                _own_file(),
                _varints([1, _GENERATION]),  # a version
                bytes([height]),
                _varints(numbers),
                struct.pack("<Q", _COMMIT_TIME),
                _varints([0]),  # earlier versions
            ]
        ),
    )


def _frame(magic: int, body: bytes, compress: Compress | None = None) -> bytes:
    """Return the content of a manifest or a node with its head and its checksum."""
    frame = None if compress is None else compress(body)
    content, how = (body, _UNCOMPRESSED) if frame is None else (frame, _ZSTD)
    head = struct.pack(">I", magic), struct.pack("<Q", FRAME_HEAD_BYTES + len(content) + FRAME_TAIL_BYTES)
    data = b"".join([*head, bytes([_VERSION, how]), content])
    return data + struct.pack("<I", crc32c(data))


def head_of(nodes: bytes, at: int) -> tuple[int, bool]:
    """Return the size of the node that begins at a byte, and whether it is compressed. It need not be one."""
    head = nodes[at : at + FRAME_HEAD_BYTES].ljust(FRAME_HEAD_BYTES, b"\0")
    return int.from_bytes(head[4:12], "little"), head[-1] == _ZSTD


def _own_file() -> bytes:
    """Return the table of files of a node that refers to other nodes."""
    return _file_table(front_coded(_matrix([NODES.encode()])))


def _file_table(names: Front) -> bytes:
    """Return the table of files of a node; none of the names begins with the base of another database."""
    count = len(names.lengths)
    columns = [names.shared[1:], names.lengths, np.zeros(count, np.int64)]
    return b"".join([_varints([count]), *map(_varints, columns), names.rest.tobytes()])


def front_coded(rows: Bytes) -> Front:
    """Return sorted texts that are the rows of a matrix. Bytes of 0 in it fill up what is shorter, and do not count."""
    counts = rows != 0
    columns = np.arange(rows.shape[1])
    changed = np.zeros(len(rows), np.int64)  # the first column that differs from the row before
    if len(rows) > 1:
        changed[1:] = (rows[1:] != rows[:-1]).argmax(axis=1)
    is_rest = counts & (columns >= changed[:, np.newaxis])
    lengths = is_rest.sum(axis=1)
    return Front(counts.sum(axis=1) - lengths, lengths, rows[is_rest])


def common_length(one: bytes, other: bytes) -> int:
    """Return how many bytes two keys share at their beginning."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length]) ^ int.from_bytes(other[:length])
    return length - (difference.bit_length() + 7) // 8


def _matrix(texts: Sequence[bytes]) -> Bytes:
    """Return texts as the rows of a matrix, with 0 behind them."""
    strings = np.array(texts, np.bytes_)
    return strings.view(np.uint8).reshape(len(texts), strings.itemsize)


def ends_of(lengths: Sequence[int] | np.ndarray[Any, Any]) -> Numbers:
    """Return where things of these lengths begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _varints(numbers: Sequence[int] | Numbers) -> bytes:
    """Return numbers of 63 bits in 7 bits a byte, the lowest first; all bytes but the last have the highest bit."""
    values = np.asarray(numbers, np.uint64)
    if not len(values):
        return b""
    count = max(1, -(-int(values.max()).bit_length() // 7))
    groups = values[:, np.newaxis] >> np.arange(0, 7 * count, 7, dtype=np.uint64)
    is_used = np.ones(groups.shape, bool)
    is_used[:, 1:] = groups[:, 1:] != 0
    has_next = np.zeros(groups.shape, bool)
    has_next[:, :-1] = is_used[:, 1:]
    coded = (groups & np.uint64(0x7F)).astype(np.uint8) | (has_next.astype(np.uint8) << 7)
    return coded[is_used].tobytes()
