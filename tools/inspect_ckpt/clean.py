"""`clean`: remove abandoned saves, stale pending saves, and files kept for a next save.

A published step is never removed, nor a pending save that a restart would publish.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

from ckpt.storage.commit import CheckpointRoot, PendingSave, Reason
from ckpt.storage.retired import discard_retired, retired_path

from .output import Exit, Output, duration, plural, size
from .root import UnpublishedSave, abandoned_saves, confirmed, owned, pending_saves, root_of, tree_bytes

__all__ = ["HELP", "add_arguments", "run"]

HELP = "remove abandoned and stale pending saves, and files kept for a next save; never a published step"

_STALE_AFTER_MIN = 10.0
_RECORDS_STAY_S = 3600.0  # as long as CheckpointRoot.clean keeps them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "--stale-after",
        type=_minutes,
        default=_STALE_AFTER_MIN,
        metavar="MINUTES",
        help="a pending save without a live writer is stale if nothing in it changed for this long (default 10)",
    )


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = root_of(arguments.root)
    items = _items(root, 60 * arguments.stale_after)
    chosen = [item for item in items if item.remove]
    rows = [("remove" if i.remove else "keep", i.name, duration(i.age_s), size(i.bytes), i.why) for i in items]
    if rows:
        output.table(("action", "name", ">age", ">size", "why"), rows)
    total = sum(item.bytes for item in chosen)
    freed = 0
    if not chosen:
        output.line("nothing to remove")
    elif arguments.dry_run:
        output.line(f"would remove {plural(len(chosen), 'save')}, {size(total)}")
    elif not arguments.yes and not confirmed(f"Remove {plural(len(chosen), 'save')}, {size(total)}? [y/N] ", output):
        output.line("nothing was removed")
        chosen = []
    else:
        freed = _remove(root, chosen)
        output.line(f"removed {size(freed)}; the reasons of saves abandoned within the last hour are kept for a while")
    removed = [] if arguments.dry_run else [item.name for item in chosen]
    documents = [{"name": i.name, "remove": i.remove, "age_s": i.age_s, "bytes": i.bytes, "why": i.why} for i in items]
    output.json({"root": root.path, "items": documents, "removed": removed, "freed_bytes": freed})
    return Exit.WHOLE


@dataclass(frozen=True)
class _Item:
    name: str
    path: str
    age_s: float
    bytes: int
    remove: bool
    why: str
    save: UnpublishedSave | None = None


def _items(root: CheckpointRoot, stale_after_s: float) -> list[_Item]:
    items = [_pending_item(save, stale_after_s) for save in pending_saves(root)]
    saves = {save.id.name: save for save in abandoned_saves(root)}
    names = os.listdir(root.abandoned_path) if os.path.isdir(root.abandoned_path) else []
    for name in sorted(names):
        path = os.path.join(root.abandoned_path, name)
        total, newest = tree_bytes(path)
        age_s = max(0.0, time.time() - newest)
        if name in saves and age_s < _RECORDS_STAY_S and not _holds_data(path):
            items.append(_Item(name, path, age_s, total, False, "only its reason is left, which ranks may still read"))
        else:
            why = saves[name].note if name in saves else "a removal that was interrupted"
            items.append(_Item(name, path, age_s, total, True, why))
    return [*items, *_recycled_items(root)]


def _recycled_items(root: CheckpointRoot) -> list[_Item]:
    """The recycled files of removed steps. A job that goes on creates new files instead."""
    items = []
    folder = retired_path(root)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        path = os.path.join(folder, name)
        try:
            total, newest = tree_bytes(path)
        except FileNotFoundError:
            continue  # a save uses it now
        why = "files of a removed step, kept for the next save to overwrite"
        items.append(_Item(name, path, max(0.0, time.time() - newest), total, True, why))
    return items


def _holds_data(path: str) -> bool:
    """Whether a directory of an abandoned save contains more than the reason."""
    with os.scandir(path) as entries:
        return any(entry.is_dir(follow_symlinks=False) and tree_bytes(entry.path)[0] for entry in entries)


def _pending_item(save: UnpublishedSave, stale_after_s: float) -> _Item:
    remove, why = False, f"pending: {save.note}"
    if save.in_use:
        pass
    elif save.complete:
        why += "; the next start of the job publishes it"
    elif save.age_s < stale_after_s:
        why += f"; stale after {duration(stale_after_s)}"
    else:
        remove = True
    return _Item(save.id.name, save.path, save.age_s, save.bytes, remove, why, save)


def _remove(root: CheckpointRoot, items: list[_Item]) -> int:
    """Remove `items`; return the bytes freed. Stale saves are abandoned first, so that they can never be published."""
    with owned(root) as token:
        for item in items:
            if item.save is not None:
                reason = Reason(None, "SaveAbandonedError", f"removed by inspect_ckpt clean ({item.why})")
                PendingSave(root, item.save.id, token).abandon(reason)
        discard_retired(root)
        root.clean()
    left = sum(tree_bytes(path)[0] for item in items for path in _places(root, item) if os.path.isdir(path))
    return max(0, sum(item.bytes for item in items) - left)


def _places(root: CheckpointRoot, item: _Item) -> tuple[str, ...]:
    return (item.path,) if item.save is None else (item.path, os.path.join(root.abandoned_path, item.name))


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not minutes >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes")
    return minutes
