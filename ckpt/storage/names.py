"""Where a leaf of the state dict lives inside a step: an injective, readable map from paths of keys to directories.

Most keys are stored as they are, so a checkpoint can be browsed. The others are escaped such that no two paths meet,
nothing leaves the root of the step, and nothing meets the files that the format itself puts there:

====================  ==========================================================
key                   directory
====================  ==========================================================
``"layers.0.weight"``  ``layers.0.weight``
``3``, ``-3``          ``3``, ``%-3``
``"3"``                ``%33`` (a string of digits is not a number)
``"a b"``              ``a%20b`` (the bytes of its UTF-8)
``""``                 ``%``
``"parts"``            ``%70arts`` (reserved by the format)
a very long key        its first 100 characters, ``~`` and a hash
====================  ==========================================================
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ckpt.paths import Path

__all__ = ["PACK_DIRECTORY", "SaveId", "directory", "parse_save_name", "part_name", "step_name"]

PACK_DIRECTORY = "packed"
"""The array that tensors are packed in; no key is stored under this name."""

_PLAIN = re.compile(rb"[A-Za-z0-9_.-]")
_RESERVED = frozenset({"zarr.json", "state.json", "intent.json", "reason.json", "parts", PACK_DIRECTORY, "c"})
_RESERVED_PREFIXES = (".", "c.", "__")
_MAX_COMPONENT_BYTES = 180  # file systems allow 255; temporary siblings need some
_MAX_PATH_BYTES = 900  # of 4096 that Linux allows, and of 1024 that object stores allow
_READABLE_PREFIX = 100


def directory(path: Path) -> str:
    """Return the relative POSIX path of the leaf at `path`.

    Injective: different paths have different directories (for very long ones, up to collisions of a 128-bit hash), and
    also no directory is the parent of another unless its path is a prefix of the other's.
    """
    if not path:
        return "~root"  # a state that is a single leaf; "~" never comes out of a key unescaped
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
        return f"{key:d}" if key >= 0 else f"%{key:d}"  # "-" is no hex digit, so this is no escaped byte
    if not key:
        return "%"
    raw = key.encode("utf-8", "surrogatepass")
    if re.fullmatch("[0-9]+", key) or key in _RESERVED or key.startswith(_RESERVED_PREFIXES):
        return f"%{raw[0]:02X}" + _escaped_bytes(raw[1:])
    return _escaped_bytes(raw)


def _escaped_bytes(raw: bytes) -> str:
    return "".join(chr(byte) if _PLAIN.match(bytes([byte])) else f"%{byte:02X}" for byte in raw)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


PUBLISHED_STEP = re.compile(r"step_(\d{8,18})")
_SAVE = re.compile(r"step_(\d{8,18})-o(\d+)-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class SaveId:
    """One attempt to save one step. `owner` is the token of the job that saves; `nonce` tells the attempt from every
    other one. All ranks derive the same without communication."""

    step: int
    owner: int
    nonce: str

    @property
    def name(self) -> str:
        """The directory of the save while it is not published."""
        return f"{step_name(self.step)}-o{self.owner}-{self.nonce}"


def step_name(step: int) -> str:
    """The directory of a published step."""
    return f"step_{step:08d}"


def parse_save_name(name: str) -> SaveId | None:
    """The save whose directory has this name; None for anything else."""
    match = _SAVE.fullmatch(name)
    return SaveId(int(match[1]), int(match[2]), match[3]) if match else None


def part_name(rank: int) -> str:
    """A rank's part manifest, relative to the save."""
    return f"parts/rank_{rank:05d}.json"
