"""`clean`: remove abandoned saves, stale pending saves, and files kept for a next save.

A published step is never removed, nor a pending save that a restart would publish.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

from ckpt.ranks.failure import Failure
from ckpt.storage.directory_root import recycled_path
from ckpt.storage.interface import Root
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.step_source import LocalStep, StepSource

from .output import Exit, Output, duration, plural, size
from .root import UnpublishedSave, abandoned_saves, any_root, confirmed, owned, pending_saves

HELP = "remove abandoned and stale pending saves, and files kept for a next save; never a published step"

_STALE_AFTER_MIN = 10.0
_RECORDS_STAY_S = 3600.0  # as long as Root.clean keeps them


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
    root = any_root(arguments.root)
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
    """Something that `clean` may remove. `source` has its files: None if only a record is left."""

    name: str
    age_s: float
    bytes: int
    remove: bool
    why: str
    source: StepSource | None = None
    save: UnpublishedSave | None = None


def _items(root: Root, stale_after_s: float) -> list[_Item]:
    items = [_pending_item(root, save, stale_after_s) for save in pending_saves(root)]
    places = {moved.name: moved.source for moved in root.removed()}
    for save in abandoned_saves(root):
        source = places.pop(save.id.name, None)
        data = source is not None and _holds_data(root, source)
        keep = not data and save.age_s < _RECORDS_STAY_S
        why = "only its reason is left, which ranks may still read" if keep else save.note
        items.append(_Item(save.id.name, save.age_s, save.bytes, not keep, why, source))
    for name, source in sorted(places.items()):
        total, newest = _usage(source)
        items.append(_Item(name, _age_s(newest), total, True, "a removal that was interrupted", source))
    return [*items, *_recycled_items(root)]


def _recycled_items(root: Root) -> list[_Item]:
    """The recycled files of removed steps. A job that goes on creates new files instead."""
    if not isinstance(root, CheckpointRoot):
        return []
    items = []
    folder = recycled_path(root)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        source = LocalStep(os.path.join(folder, name))
        total, newest = _usage(source)
        if newest:  # else a save uses it now
            why = "files of a removed step, kept for the next save to overwrite"
            items.append(_Item(name, _age_s(newest), total, True, why, source))
    return items


def _usage(source: StepSource) -> tuple[int, float]:
    """Return what `StepSource.usage` does; of a link that of the link, since only that is removed."""
    is_link = isinstance(source, LocalStep) and os.path.islink(source.path)
    return (0, os.lstat(source.path).st_mtime) if is_link else source.usage()


def _age_s(changed_s: float) -> float:
    return max(0.0, time.time() - changed_s)


def _holds_data(root: Root, source: StepSource) -> bool:
    """Whether there is more than the reason of an abandoned save; in a directory, that is beside its subdirectories."""
    sizes, _ = source.scan()
    return any(nbytes and ("/" in name or not isinstance(root, CheckpointRoot)) for name, nbytes in sizes.items())


def _pending_item(root: Root, save: UnpublishedSave, stale_after_s: float) -> _Item:
    remove, why = False, f"pending: {save.note}"
    if save.in_use or not save.is_known:
        pass
    elif save.complete:
        why += "; the next start of the job publishes it"
    elif save.age_s < stale_after_s:
        why += f"; stale after {duration(stale_after_s)}"
    else:
        remove = True
    return _Item(save.id.name, save.age_s, save.bytes, remove, why, root.pending_save(save.id).source, save)


def _remove(root: Root, items: list[_Item]) -> int:
    """Remove `items`; return the bytes freed. Stale saves are abandoned first, so that they can never be published."""
    with owned(root) as token:
        for item in items:
            if item.save is not None:
                reason = Failure(None, "SaveAbandonedError", f"removed by inspect_ckpt clean ({item.why})")
                root.pending_save(item.save.id, token).abandon(reason)
        root.discard_recycled()
        root.clean()
        places = {moved.name: moved.source for moved in root.removed()}
    left = [places.get(item.name, item.source) for item in items]
    return max(0, sum(item.bytes for item in items) - sum(_usage(source)[0] for source in left if source is not None))


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not minutes >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes")
    return minutes
