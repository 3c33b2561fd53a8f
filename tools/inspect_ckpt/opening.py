"""From a path that a user typed to a step that can be read, and the names in it."""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from ckpt.loading.consistency import all_tensors
from ckpt.loading.index import ILL_FORMED, CheckpointIndex, StoredTensor, checked_summary, read_index
from ckpt.native import crc32c
from ckpt.paths import display
from ckpt.storage.documents import decode_document, decode_root
from ckpt.storage.names import parse_save_name
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.step_reader import StepReader
from ckpt.validation import read_document

__all__ = [
    "CannotReadError",
    "NotPublishedError",
    "Step",
    "open_step",
    "overview_of",
    "reading",
    "root_of",
    "step_path",
    "steps_of",
    "summary_of",
]


class CannotReadError(Exception):
    """The path, or a name in it, is not what the command needs."""


class NotPublishedError(Exception):
    """There is a save, but it is not published."""


@dataclass(frozen=True)
class Step:
    """A step by the names that people type: keys joined by "/", and ``<name>@rank<r>`` for what belongs to one rank.

    `tensors` holds aliases, too; `aliases` says of which name.
    """

    path: str
    index: CheckpointIndex
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]
    aliases: dict[str, str]

    def select(self, patterns: Sequence[str]) -> list[str]:
        """The names of the tensors that any of `patterns` is or matches (`*`, `?`, `[...]`).

        CannotReadError for a pattern that matches nothing.
        """
        chosen: dict[str, None] = {}
        for pattern in patterns:
            if pattern in self.tensors:
                chosen[pattern] = None
                continue
            matching = [name for name in self.tensors if fnmatch.fnmatchcase(name, pattern)]
            if not matching:
                near = difflib.get_close_matches(pattern, [*self.tensors, *self.values], 3)
                hint = f"; did you mean {' or '.join(near)}?" if near else "; `inspect_ckpt show` lists all names"
                raise CannotReadError(f"{self.path}: no tensor matches {pattern!r}{hint}")
            chosen |= dict.fromkeys(matching)
        return list(chosen)


@contextmanager
def open_step(path: str) -> Iterator[Step]:
    """The step at `path`, or the newest of the root at `path`; no job removes it meanwhile.

    Raises what `step_path` and `read_index` raise.
    """
    where = step_path(path)
    with reading(where, None if where == path else path):
        yield _step(where)


@contextmanager
def reading(path: str, root: str | None = None) -> Iterator[None]:
    """Keeps the retention of a running job from removing the step at `path`, as far as leases and locks reach.

    CannotReadError if it was removed all the same: then what was read may be of another step.
    """
    try:
        with StepReader(path, root, renewing=True) as reader:
            try:
                yield
            except (CheckpointError, OSError):
                reader.check()  # of a step that is gone, nothing is damaged
                raise
            reader.check()
    except CheckpointNotFoundError as error:
        raise CannotReadError(str(error)) from error


def _step(where: str) -> Step:
    index = read_index(where)
    tensors = dict(all_tensors(index))
    aliases = {}
    for alias, target in index.aliases.items():
        if target in index.tensors:
            aliases[display(alias)] = display(target)
        for rank in index.per_rank_tensors.get(target, {}):
            aliases[f"{display(alias)}@rank{rank}"] = f"{display(target)}@rank{rank}"
    tensors |= {alias: tensors[target] for alias, target in aliases.items()}
    values = {display(name): value for name, value in index.values.items()}
    for name, own in index.per_rank_values.items():
        values |= {f"{display(name)}@rank{rank}": value for rank, value in own.items()}
    return Step(where, index, dict(sorted(tensors.items())), dict(sorted(values.items())), aliases)


def step_path(path: str) -> str:
    """The directory of the step that `path` means: itself, or the newest published step of a root.

    Raises NotPublishedError, CannotReadError.
    """
    _check_directory(path)
    _check_published(path)
    if os.path.lexists(os.path.join(path, "zarr.json")):
        _check_ours(path)
        return path
    steps = steps_of(path)
    if steps:
        return CheckpointRoot(path).step_path(steps[-1])
    if _looks_like_step(path):
        return path  # its root is missing: whoever reads it says so
    _check_root(path)
    raise NotPublishedError(f"{path} has no published step, only saves that are pending or abandoned")


def root_of(path: str) -> CheckpointRoot:
    """The checkpoint root at `path`. CannotReadError if it is none, with a hint if it is a step."""
    _check_directory(path)
    if os.path.lexists(os.path.join(path, "zarr.json")) or _looks_like_step(path):
        raise CannotReadError(f"{path} is a step, not a checkpoint root; give {os.path.dirname(os.path.abspath(path))}")
    _check_root(path)
    return CheckpointRoot(path)


def steps_of(path: str) -> list[int]:
    """The published steps of a root, ascending; symbolic links are not followed, so they are not among them."""
    root = CheckpointRoot(path)
    return [step for step in root.steps() if _is_own_directory(root.step_path(step))]


def summary_of(path: str) -> dict[str, Any]:
    """The summary in the root document of the step at `path`. CheckpointCorruptError, StorageError."""
    with _described(path, "zarr.json"):
        return checked_summary(_root_document(path)["attributes"]["ckpt"], os.path.join(path, "zarr.json"))


def overview_of(path: str) -> tuple[dict[str, Any], int]:
    """The summary in the root document, and how many tensors there are, without their metadata being looked at.

    CheckpointCorruptError, StorageError.
    """
    with _described(path, "zarr.json"):
        root = _root_document(path)
        summary = checked_summary(root["attributes"]["ckpt"], os.path.join(path, "zarr.json"))
        nodes = root["consolidated_metadata"]["metadata"].values()
        abouts = [node["attributes"]["ckpt"] for node in nodes if node["node_type"] == "array"]
        names = {(json.dumps(about["name"]), about.get("rank")) for about in abouts if not about.get("pack")}
    with _described(path, "state.json"):
        state = read_document(path, "state.json")
        if summary["state"] != {"bytes": len(state), "crc32c": crc32c(state)}:
            raise CheckpointCorruptError(f"{os.path.join(path, 'state.json')} is not the one that belongs to this step")
        packed = decode_document(state, os.path.join(path, "state.json"))["packed"]
        names |= {(json.dumps(entry["path"]), entry.get("rank")) for entry in packed}
    return summary, len(names)


@contextmanager
def _described(path: str, name: str) -> Iterator[None]:
    try:
        yield
    except ILL_FORMED as error:
        where = os.path.join(path, name)
        raise CheckpointCorruptError(f"{where} does not describe a checkpoint: {error!r:.200}") from None


def _root_document(path: str) -> dict[str, Any]:
    return decode_root(read_document(path, "zarr.json"), os.path.join(path, "zarr.json"))


def _check_directory(path: str) -> None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CannotReadError(f"{path}: there is no such directory") from None
    except (OSError, ValueError) as error:
        raise CannotReadError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise CannotReadError(f"{path} is a file; give the directory of a step, or a checkpoint root")
    try:
        os.listdir(path)
    except OSError as error:
        raise CannotReadError(f"{path} cannot be listed: {error.strerror}") from None


def _check_published(path: str) -> None:
    parent, name = os.path.split(os.path.abspath(path))
    if parse_save_name(name) is None:
        return
    if os.path.basename(parent) in (".superseded", ".damaged"):
        return
    if os.path.basename(parent) == ".abandoned":
        raise NotPublishedError(f"{path} is a save that was abandoned: it can never be published")
    raise NotPublishedError(f"{path} is a pending save: it is not published")


def _check_root(path: str) -> None:
    root = CheckpointRoot(path)
    if root.steps() or os.path.isdir(root.pending_path) or os.path.isdir(root.abandoned_path):
        return
    if not os.listdir(path):
        raise CannotReadError(f"{path} is empty: there is no checkpoint")
    raise CannotReadError(f"{path} is not a checkpoint, and there is none in it")


def _check_ours(path: str) -> None:
    """A damaged root document is damage only where the rest looks like a step; else it is somebody else's file."""
    if _looks_like_step(path):
        return
    try:
        summary_of(path)
    except CheckpointCorruptError:
        raise CannotReadError(f"{path} is not a checkpoint: its zarr.json is not one of a step") from None
    except (CheckpointError, OSError):
        return  # whoever reads it says so


def _looks_like_step(path: str) -> bool:
    if re.fullmatch(r"step_\d{8,18}", os.path.basename(os.path.abspath(path))):
        return True
    return any(os.path.lexists(os.path.join(path, name)) for name in ("intent.json", "state.json", "parts"))


def _is_own_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
