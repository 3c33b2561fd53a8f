"""Random changes of a published step, as a bad disk, a broken tool or an attacker could make them.

A document that is changed gets a new checksum in most cases, and so does the document that records it: otherwise the
checksums would hide all other checks.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.native import crc32c
from ckpt.storage.documents import canonical_json

_PLACEHOLDER = "here goes what json cannot write"
_STRANGE = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 256, 1 << 20, 1 << 31, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1, 10**30),
    *(1.0, 0.5, -0.0, 1e308, "", "a", "..", "../x", "/etc/passwd", "packed", "float32", "float128", "uint8", "object"),
    *("zstd", "$", "\ud800", "x" * 300, [], {}, [[]], [0], [1, 1], [-1], [[0, 0]], {"$": "numpy"}, {"$": "dict"}),
)
_RAW = (b"NaN", b"-Infinity", b"1e999", b"[" * 900 + b"]" * 900, b'{"a":' * 900 + b"1" + b"}" * 900)
_RAW += (b"[" * 100_000 + b"]" * 100_000, b"9" * 10_000, b"[1]]", b'"\\"')


def mutate(step: Path, rng: random.Random) -> str:
    """Change something in the step, and return a description of the change."""
    kinds: tuple[Callable[[Path, random.Random], str], ...] = (_document, _document, _document, _file, _chunk)
    return rng.choice(kinds)(step, rng)


# -- documents ---------------------------------------------------------------------------------------------------------


def _document(step: Path, rng: random.Random) -> str:
    names = [str(file.relative_to(step)) for file in sorted(step.rglob("*.json"))]
    checksummed = [name for name in names if "/" not in name or name.startswith("parts/")]
    name = rng.choice(
        ("zarr.json", "index.json", "index.json", "state.json", rng.choice(checksummed), rng.choice(names))
    )
    document = json.loads((step / name).read_bytes())
    without_checksum(document)
    what = [_change(document, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    raw = rng.choice(_RAW)
    data = canonical_json(document).replace(json.dumps(_PLACEHOLDER).encode(), raw)
    if name not in checksummed or rng.random() < 0.1:
        (step / name).write_bytes(data)
        return f"{name} without a correct checksum: {'; '.join(what)}"
    put(step, name, data)
    return f"{name}: {'; '.join(what)}"


def without_checksum(document: Any) -> None:
    """Remove the checksum from a parsed document."""
    document.pop("crc32c", None)
    about = document.get("attributes", {})
    if isinstance(about, dict) and isinstance(about.get("ckpt"), dict):
        about["ckpt"].pop("crc32c", None)


def put(step: Path, name: str, data: bytes) -> None:
    """Write a document with its checksum, and record it in the root."""
    member = b'"crc32c":%d,' % crc32c(data)
    at = data.find(b'"ckpt":{') + len(b'"ckpt":{') if name == "zarr.json" else 1
    (step / name).write_bytes(data[:at] + member + data[at:])
    if name == "zarr.json":
        return
    root = json.loads((step / "zarr.json").read_bytes())
    without_checksum(root)
    summary, data = root["attributes"]["ckpt"], (step / name).read_bytes()
    kind = name.removesuffix(".json")
    if kind in summary:
        summary[kind] = {"bytes": len(data), "crc32c": crc32c(data)}
    elif name.startswith("parts/"):
        summary["parts"][int(name[-10:-5])] = crc32c(data)
    put(step, "zarr.json", canonical_json(root))


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Return every container of the document with each of its keys or indices."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    found = [(node, key) for key in keys]
    for key in keys:
        found += _places(node[key])
    return found


def _change(document: Any, rng: random.Random) -> str:
    places = _places(document)
    if not places:
        return "nothing left"
    node, key = rng.choice(places)
    old, (other, other_key) = node[key], rng.choice(places)
    text = f"{str(key)[:40]} = {str(old)[:60]}"
    match rng.choice(("strange", "strange", "copy", "swap", "remove", "twice", "near", "raw", "rename")):
        case "strange":
            node[key] = json.loads(json.dumps(rng.choice(_STRANGE)))
        case "copy":
            node[key] = json.loads(json.dumps(other[other_key]))
        case "swap" if isinstance(node, list):
            place = rng.randrange(len(node))
            node[key], node[place] = node[place], node[key]
        case "remove":
            del node[key]
            return f"{text} is removed"
        case "twice" if isinstance(node, list):
            node.insert(rng.randrange(len(node) + 1), json.loads(json.dumps(old)))
        case "near" if type(old) in (int, float):
            node[key] = old + rng.choice((-1, 1, -16, 16, -4, 4, 256, old, -2 * old, 0.0))
        case "raw":
            node[key] = _PLACEHOLDER
        case "rename" if isinstance(node, dict):
            node[rng.choice((key + "x", "", "a/b", "../" + key, "packed", "$", "state.json"))] = node.pop(key)
            return f"{text} is renamed"
        case _:
            node[key] = rng.choice((None, -1, "x", []))
    return f"{text} becomes {str(node[key])[:60]}"


# -- files -------------------------------------------------------------------------------------------------------------


def _files(step: Path) -> list[Path]:
    return [file for file in sorted(step.rglob("*")) if file.is_file()]


_KINDS = ("cut", "flip", "longer", "swap", "zeros", "sparse", "gone", "pipe", "link", "null", "directory", "socket")
_KINDS += ("parent",)


def _file(step: Path, rng: random.Random) -> str:
    file = rng.choice(_files(step))
    name, data = str(file.relative_to(step)), file.read_bytes()
    kind = rng.choice(_KINDS)
    if kind in ("gone", "pipe", "link", "directory", "socket", "null"):
        file.unlink()
    match kind:
        case "cut":
            file.write_bytes(data[: rng.randrange(len(data) + 1)])
        case "flip":
            bit = rng.randrange(8 * len(data))
            file.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        case "longer":
            file.write_bytes(data + rng.randbytes(rng.choice((1, 4, 16, 5000))))
        case "swap":
            other = rng.choice(_files(step))
            file.write_bytes(other.read_bytes())
            other.write_bytes(data)
        case "pipe":
            os.mkfifo(file)
        case "link":
            outside = step.parent / "outside"
            outside.write_bytes(data)
            file.symlink_to(rng.choice((outside, "/dev/zero", file)))
        case "null":
            file.symlink_to("/dev/null")
        case "directory":
            file.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                here = os.getcwd()
                os.chdir(file.parent)  # the path of a socket must be short
                listener.bind(file.name)
                os.chdir(here)
        case "sparse":
            os.truncate(file, rng.choice((1 << 20, 1 << 31, 1 << 40)))
        case "zeros":
            file.write_bytes(bytes(len(data)))
        case "parent" if file.parent != step:
            shutil.move(file.parent, step.parent / "elsewhere")
            file.parent.symlink_to(step.parent / "elsewhere")
    return f"{name}: {kind}"


def _chunk(step: Path, rng: random.Random) -> str:
    """Change bytes of a chunk, and sometimes its checksum, in a plain chunk or in the index of a shard."""
    file = rng.choice([file for file in _files(step) if file.parent.parent.name == "packs"])
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 2, 8))):
        at = rng.choice((rng.randrange(len(data)), max(0, len(data) - 5 - rng.randrange(64))))
        data[at] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
    start = rng.choice((0, 0, max(0, len(data) - 4 - 16 * rng.randrange(1, 9))))
    data[-4:] = crc32c(bytes(data[start:-4])).to_bytes(4, "little")
    file.write_bytes(data)
    return f"{file.relative_to(step)}: other bytes with a checksum"
