"""The names of steps, saves and parts on disk, and of the directory of each leaf in a step.

The map from the path of a leaf to its directory is injective and readable. Most keys are stored as they are, so a
checkpoint can be browsed. The others are escaped such that no two paths have the same directory, nothing leaves the
step, and nothing collides with the files of the format itself:

====================  ==========================================================
key                   directory
====================  ==========================================================
``"layers.0.weight"``  ``layers.0.weight``
``3``, ``-3``          ``3``, ``%-3``
``"3"``                ``%33`` (a string of digits is not a number)
``"a b"``              ``a%20b`` (the bytes of its UTF-8)
``""``                 ``%``
``"c"``                ``%63`` (reserved by Zarr)
a very long key        its first 100 characters, ``~`` and a hash
====================  ==========================================================
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.paths import Path

INDEX = "index.json"
"""The document with the place of every tensor, in a save and in a step."""

REFERENCES = "references.json"
"""The same for fsspec."""

MANIFEST, NODES = "manifest.ocdbt", "ocdbt.nodes"
"""The same for tensorstore: see `ckpt.storage.ocdbt`."""

DATABASE_CHUNKS = 1_000_000
"""A step with more chunks is a database of tensorstore only if it is asked for."""

PUBLISHED_STEP = re.compile(r"step_(\d{8,18})")
"""The directory of a published step; group 1 is the step."""

RANKS_PER_DIRECTORY = 512
"""How many ranks have their parts in one directory."""

_PART = re.compile(r"rank_(\d{5,})\.json")
_PACK = re.compile(r"rank_(\d{5,})_\d{3,}")
_SAVE = re.compile(r"step_(\d{8,18})-o(\d+)-([0-9a-f]{16})")

_ESCAPED = re.compile(rb"[^A-Za-z0-9_.-]")
_RESERVED = frozenset({"zarr.json", "c"})
_RESERVED_PREFIXES = (".", "c.", "__")
_MAX_COMPONENT_BYTES = 180  # file systems allow 255; the names of temporary files need some
_MAX_PATH_BYTES = 900  # of 4096 that Linux allows, and of 1024 that object stores allow
_READABLE_PREFIX = 100


def directory(path: Path) -> str:
    """Return the directory of the leaf at `path`, relative to the step.

    Different paths have different directories (for very long ones, up to collisions of a 128-bit hash), and a directory
    is the parent of another only if its path is a prefix of the other's.
    """
    if not path:
        return "~root"  # a state that is a single leaf; "~" in a key is escaped
    relative = "/".join(_component(key) for key in path)
    if len(relative) > _MAX_PATH_BYTES:
        return "~long/" + _digest("/".join(_escaped(key) for key in path))
    return relative


def _component(key: str | int) -> str:
    escaped = _escaped(key)
    if len(escaped) <= _MAX_COMPONENT_BYTES:
        return escaped
    return f"{escaped[:_READABLE_PREFIX]}~{_digest(escaped)}"


def _escaped(key: str | int) -> str:
    if isinstance(key, int):
        return f"{key:d}" if key >= 0 else f"%{key:d}"  # "-" is not a hex digit, so this cannot be an escaped byte
    if not key:
        return "%"
    raw = key.encode("utf-8", "surrogatepass")
    if re.fullmatch("[0-9]+", key) or key in _RESERVED or key.startswith(_RESERVED_PREFIXES):
        return f"%{raw[0]:02X}" + _escaped_bytes(raw[1:])
    return _escaped_bytes(raw)


def _escaped_bytes(raw: bytes) -> str:
    return _ESCAPED.sub(lambda found: b"%%%02X" % ord(found[0]), raw).decode("ascii")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class SaveId:
    """One attempt to save one step. All ranks derive the same one without communication.

    `owner` is the token of the job that saves; `nonce` distinguishes the attempt from every other one.
    """

    step: int
    owner: int
    nonce: str

    @property
    def name(self) -> str:
        """The name of the directory until the save is published."""
        return f"{step_name(self.step)}-o{self.owner}-{self.nonce}"


def step_name(step: int) -> str:
    """Return the name of the directory of a published step."""
    return f"step_{step:08d}"


def step_numbers(names: Iterable[str]) -> set[int]:
    """Return the steps of which there are names, as `step_name` makes them; other names are ignored."""
    return {int(match[1]) for name in names if (match := PUBLISHED_STEP.fullmatch(name))}


def parse_save_name(name: str) -> SaveId | None:
    """Return the save whose directory has this name; None if it is no save."""
    match = _SAVE.fullmatch(name)
    return SaveId(int(match[1]), int(match[2]), match[3]) if match else None


def part_name(rank: int) -> str:
    """Return the path of a rank's part manifest, relative to the save."""
    return f"{parts_directory(rank)}/rank_{rank:05d}.json"


def parts_directory(rank: int) -> str:
    """Return the directory of a rank's part manifest, relative to the save. It has `RANKS_PER_DIRECTORY` ranks."""
    return f"parts/{rank // RANKS_PER_DIRECTORY:03d}"


def pack_file(rank: int, number: int) -> str:
    """Return the path of a file of a rank's pack, relative to the save. They are numbered from 0."""
    return f"packs/{rank // RANKS_PER_DIRECTORY:03d}/rank_{rank:05d}_{number:03d}"


def pack_rank(name: str) -> int | None:
    """Return the rank of a pack file with this file name; None if it is none."""
    match = _PACK.fullmatch(name)
    return int(match[1]) if match else None


def part_rank(name: str) -> int | None:
    """Return the rank of a part manifest with this file name; None if it is none."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None
