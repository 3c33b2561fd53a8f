"""Publish a step: check the parts of all ranks against each other, write the documents of the whole, commit.

Runs in the coordinator's writer at the end of a save, in a trainer that publishes in its place after a fault, and in
the process that recovers what an earlier start left. Needs only what is in the directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.native import crc32c
from ckpt.saving.replicas import Warn, all_names, check_replicas
from ckpt.storage import files
from ckpt.storage.array_metadata import ArrayMeta, group_document, groups, root_document
from ckpt.storage.commit import Abandoned, PendingSave, Published
from ckpt.storage.documents import EncodedList, canonical_json, encode_document, encode_root

__all__ = ["PartFile", "publish"]


_OF_INTENT = ("format", "save", "step", "owner", "continues", "world_size", "plan")

PartFile = tuple[dict[str, Any], int]
"""A part manifest, and the checksum of its file."""


def publish(
    pending: PendingSave,
    tick: Callable[[], None],
    written: Mapping[int, PartFile] | None = None,
    *,
    warn: Warn = lambda names, mixed: None,
    before_commit: Callable[[], None] = lambda: None,
) -> Published | Abandoned:
    """Publish a save of which every part is there; return what was decided, by this or by another process.

    The parts of the ranks in `written` need not be read: the caller has just written them. Several processes may do
    this at once: they write the same documents, and one renames the directory.

    Raises CheckpointCorruptError when the parts do not make up a step, CheckpointExistsError when the step is published
    by another save, StateError when parameters of ranks differ, and what `PendingSave.publish` raises. `tick` is
    called between steps, to show progress; `warn` is called with what else differs; `before_commit` is called
    when everything is durable.
    """
    intent = pending.intent()
    if intent is None:
        outcome = pending.decided()
        if outcome is None:
            raise CheckpointCorruptError(f"{pending.path} has lost its intent.json; was it changed by hand?")
        return outcome
    summary, arrays, state = _merge(pending, intent, written or {}, tick, warn)
    tick()
    state_bytes = encode_document(state)
    summary["state"] = {"bytes": len(state_bytes), "crc32c": crc32c(state_bytes)}
    directories = groups(arrays)
    documents = {f"{directory}/zarr.json": canonical_json(group_document()) for directory in directories}
    documents |= {"state.json": state_bytes, "zarr.json": encode_root(root_document(arrays, summary))}
    for name, data in documents.items():
        path = os.path.join(pending.path, name)
        if not files.holds(path, data):  # those of recycled files hold it already
            files.write_document(path, data, pending.root.pending_path)
    made = [pending.path, *(os.path.join(pending.path, directory) for directory in directories)]
    parts = [os.path.join(pending.path, "parts"), *pending.parts_directories()]
    files.sync_files([os.path.join(pending.path, name) for name in documents], [*parts, *made])
    tick()
    before_commit()
    return pending.publish()


def _merge(
    pending: PendingSave, intent: dict[str, Any], parts: Mapping[int, PartFile], tick: Callable[[], None], warn: Warn
) -> tuple[dict[str, Any], dict[str, ArrayMeta], dict[str, Any]]:
    """Return the summary for the root, all arrays by directory, and the state document, from all parts."""
    arrays: dict[str, ArrayMeta] = {}
    chunks: set[str] = set()
    state: dict[str, Any] = {"values": [], "aliases": []}
    packed: list[EncodedList] = []
    replicas: list[dict[str, str]] = []
    summary: dict[str, Any] = {key: intent[key] for key in _OF_INTENT}
    summary |= {"bytes": 0, "files": 0, "parts": []}
    for rank in range(intent["world_size"]):
        part, part_checksum = parts[rank] if rank in parts else pending.read_part(rank)
        where = f"{pending.path}: the part of rank {rank}"
        expected = {key: intent[key] for key in ("save", "plan", "world_size")} | {"rank": rank}
        if any(part.get(key) != value for key, value in expected.items()):
            raise CheckpointCorruptError(f"{where} belongs to another save or plan")
        for directory, document in part["arrays"].items():
            if directory in arrays:
                raise CheckpointCorruptError(f"{where} describes {directory}, which another part describes")
            arrays[directory] = ArrayMeta.from_document(document, f"{where}, array {directory}")
        for directory, written in part["chunks"].items():
            for key, file_bytes, _ in written:
                if f"{directory}/{key}" in chunks:
                    raise CheckpointCorruptError(f"{where} holds {directory}/{key}, which another part holds")
                chunks.add(f"{directory}/{key}")
                summary["bytes"] += file_bytes
                summary["files"] += 1
        for kind in state:
            state[kind] += part[kind]
        packed.append(EncodedList.of(part["packed"]))
        replicas.append(part.get("replicas", {}))
        summary["parts"].append(part_checksum)
        tick()
    _check_cover(pending, arrays, chunks)
    all_packed = EncodedList.joined(packed)
    attributes = [meta.attributes for meta in arrays.values()]
    check_replicas(replicas, lambda: all_names(attributes, json.loads(all_packed.data), state["values"]), warn)
    summary["tensors"] = len(arrays) + all_packed.items
    return summary, arrays, {**state, "packed": all_packed}


def _check_cover(pending: PendingSave, arrays: dict[str, ArrayMeta], chunks: set[str]) -> None:
    """Raise CheckpointCorruptError unless every chunk of every array is in a part. `_merge` rejects duplicates."""
    expected = 0
    for directory, meta in arrays.items():
        for index in meta.chunk_indices():
            expected += 1
            if f"{directory}/{meta.chunk_key(index)}" not in chunks:
                raise CheckpointCorruptError(f"{pending.path}: no part holds chunk {index} of {directory}")
    if expected != len(chunks):
        raise CheckpointCorruptError(f"{pending.path}: the parts hold {len(chunks)} chunks, the arrays have {expected}")
