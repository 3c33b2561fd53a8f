"""Make a step out of the parts of all ranks: check them against each other, write what describes the whole, publish.

Runs in the coordinator's writer at the end of a save, and in the coordinator's trainer when a later start finds a save
that was complete but not yet published. Needs nothing but what is in the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointExistsError
from ckpt.saving.replicas import Warn, all_names, check_replicas
from ckpt.storage import files
from ckpt.storage.checksums import crc32c
from ckpt.storage.commit import FORMAT_VERSION, Abandoned, CheckpointRoot, Outcome, PendingSave, Published, Reason
from ckpt.storage.documents import EncodedList, canonical, seal, seal_root, unseal_root
from ckpt.storage.locks import try_lock_exclusive
from ckpt.storage.metadata import ArrayMeta, group_document, groups, root_document
from ckpt.storage.retired import retire_step

__all__ = ["PartFile", "Retention", "is_published", "publish", "recover", "retain"]


_BEGIN_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Which published steps stay: the newest `keep_last`, and every multiple of `keep_every`. None keeps all. With
    `reuse_files` the next save writes over the files of one that does not."""

    keep_last: int | None = None
    keep_every: int | None = None
    reuse_files: bool = False

    def superfluous(self, steps: list[int]) -> list[int]:
        """The steps to remove, oldest first; never the newest."""
        if self.keep_last is None:
            return []
        old = sorted(steps)[: -self.keep_last]
        return [step for step in old if not (self.keep_every and step % self.keep_every == 0)]


PartFile = tuple[dict[str, Any], int]
"""A part manifest, and the checksum of its file."""


def publish(
    pending: PendingSave,
    tick: Callable[[], None],
    written: Mapping[int, PartFile] | None = None,
    warn: Warn = lambda names, mixed: None,
) -> Outcome:
    """Publish a save of which every part is there. Returns what was decided, by this or by anybody else.

    The parts of the ranks in `written` need not be read: the caller has just written them.

    Raises CheckpointCorruptError when the parts do not make a whole, CheckpointExistsError when the step is published
    with other content, StateError when ranks have parameters different. `tick` is called between steps, to show
    progress; `warn` is told what else ranks have different.
    """
    intent = pending.intent()
    if intent is None:
        return pending.outcome()
    summary, arrays, state = _merge(pending, intent, written or {}, tick, warn)
    tick()
    state_bytes = seal(state)
    summary["content"] = _content_digest(summary.pop("chunks"), state_bytes)
    directories = groups(arrays)
    paths = []
    for directory in directories:
        paths.append(os.path.join(pending.path, directory, "zarr.json"))
        files.write_new(paths[-1], canonical(group_document()), replace=True)
    summary["state"] = {"bytes": len(state_bytes), "crc32c": crc32c(state_bytes)}
    for name, data in (("state.json", state_bytes), ("zarr.json", seal_root(root_document(arrays, summary)))):
        paths.append(os.path.join(pending.path, name))
        files.write_new(paths[-1], data, replace=True)
    files.sync_files(paths, [pending.path, *(os.path.join(pending.path, directory) for directory in directories)])
    tick()
    outcome = pending.publish()
    return outcome if outcome is not None else _already_published(pending, summary["content"])


def _merge(
    pending: PendingSave, intent: dict[str, Any], parts: Mapping[int, PartFile], tick: Callable[[], None], warn: Warn
) -> tuple[dict[str, Any], dict[str, ArrayMeta], dict[str, Any]]:
    """The summary for the root, all arrays by directory, and the state document, from the parts of all ranks."""
    arrays: dict[str, ArrayMeta] = {}
    chunks: dict[str, int] = {}
    state: dict[str, Any] = {"values": [], "aliases": []}
    packed: list[EncodedList] = []
    replicas: list[dict[str, str]] = []
    summary: dict[str, Any] = {key: intent[key] for key in ("format", "save", "step", "epoch", "world_size", "plan")}
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
            for key, file_bytes, checksum in written:
                if f"{directory}/{key}" in chunks:
                    raise CheckpointCorruptError(f"{where} holds {directory}/{key}, which another part holds")
                chunks[f"{directory}/{key}"] = checksum
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
    summary["chunks"] = chunks
    return summary, arrays, {**state, "packed": all_packed}


def _check_cover(pending: PendingSave, arrays: dict[str, ArrayMeta], chunks: dict[str, int]) -> None:
    """Every chunk of every array is in exactly one part. (That none is in two was checked on the way.)"""
    expected = 0
    for directory, meta in arrays.items():
        for index in meta.chunk_indices():
            expected += 1
            if f"{directory}/{meta.chunk_key(index)}" not in chunks:
                raise CheckpointCorruptError(f"{pending.path}: no part holds chunk {index} of {directory}")
    if expected != len(chunks):
        raise CheckpointCorruptError(f"{pending.path}: the parts hold {len(chunks)} chunks, the arrays have {expected}")


def _content_digest(chunks: dict[str, int], state_bytes: bytes) -> str:
    digest = hashlib.blake2b(canonical(sorted(chunks.items())), digest_size=16)
    digest.update(state_bytes)
    return digest.hexdigest()


def _already_published(pending: PendingSave, content: str) -> Outcome:
    """The step is published by another save. With the same content there is nothing left to do."""
    path = os.path.join(pending.root.step_path(pending.save.step), "zarr.json")
    with open(path, "rb") as stream:
        published = unseal_root(stream.read(), path)["attributes"]["ckpt"]
    if published["content"] == content:
        return pending.abandon(
            Reason(None, "SameContent", f"step {pending.save.step} is published with the same content")
        )
    raise CheckpointExistsError(
        f"step {pending.save.step} is already published in {pending.root.path} with other content; save under another "
        f"step, or "
        "remove that step first",
        step=pending.save.step,
    )


def is_published(outcome: Outcome) -> bool:
    """Whether the content of the save is a published step, by this save or an equal one."""
    return isinstance(outcome, Published) or (isinstance(outcome, Abandoned) and outcome.reason.kind == "SameContent")


def retain(root: CheckpointRoot, retention: Retention, newest: int, plan: str) -> None:
    """Remove superfluous steps and what abandoned saves left. Never a step being read, nor anything newer than
    `newest`. `plan` is the digest of the plan that the next save is likely to have."""
    for step in retention.superfluous([step for step in root.steps() if step <= newest]):
        if retention.reuse_files:
            retire_step(root, step, plan)
        else:
            root.remove_step(step)
    root.clean()


def recover(root: CheckpointRoot, timeout_s: float, warn: Callable[[str], None]) -> None:
    """Decide every save that an earlier run left undecided: publish what is complete, abandon the rest.

    Writers of that run may still be finishing: waits for them at most `timeout_s`. Called by the coordinator when
    nobody of this run saves yet.
    """
    deadline = time.monotonic() + timeout_s
    for save in root.pending():
        pending = PendingSave(root, save)
        while pending.outcome() is None and _somebody_works_on(pending) and time.monotonic() < deadline:
            time.sleep(0.01)
        if pending.outcome() is None:
            _adopt(pending, warn)
    root.clean()


def _somebody_works_on(pending: PendingSave) -> bool:
    try:
        lock = try_lock_exclusive(pending.path)
        if lock is None:
            return True
        lock.close()
        changed_ago_s = time.time() - os.stat(pending.path).st_mtime
        return pending.intent() is None and changed_ago_s < _BEGIN_GRACE_S  # another job may be just beginning it
    except (CheckpointError, OSError):
        return False


def _adopt(pending: PendingSave, warn: Callable[[str], None]) -> None:
    """Publish a complete save; abandon one that is not."""
    intent = _intent_or_none(pending)
    missing: Iterable[int] = ()
    problem = None
    if intent is None:
        problem = "it has no intent"
    elif missing := sorted(set(range(intent["world_size"])) - pending.parts_present()):
        problem = f"the parts of ranks {missing} are missing"
    else:
        try:
            publish(pending, lambda: None)
            warn(f"published step {pending.save.step}, which an earlier run had completely written")
        except CheckpointError as error:
            problem = str(error)
    if problem is not None:
        pending.abandon(Reason(None, "SaveAbandonedError", f"left behind by an earlier run: {problem}"))
        warn(f"abandoned the unfinished save of step {pending.save.step} of an earlier run: {problem}")


def _intent_or_none(pending: PendingSave) -> dict[str, Any] | None:
    try:
        intent = pending.intent()
    except CheckpointCorruptError:
        return None
    return intent if intent is not None and intent.get("format") == FORMAT_VERSION else None
