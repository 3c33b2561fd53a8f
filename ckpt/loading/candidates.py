"""Which copies of which steps a restore tries, in a root and in its mirror.

The newest step comes first, wherever it is; of the same save the copy in the root comes before that in the mirror. A
step of the mirror that is of another branch than the steps of the root is none: it has been superseded, but the mirror
does not know it yet. A published save that training has left counts only if its step is asked for.

A step may be published and in memory. If that is one save, memory comes first; of two saves of a step, the one that was
made later. No name decides.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from ckpt.storage.documents import INTENT, decode_document, decode_root, well_formed
from ckpt.storage.interface import Root
from ckpt.storage.names import parse_save_name
from ckpt.storage.step_source import StepSource, read_document

_log = logging.getLogger("ckpt")


class Candidate(NamedTuple):
    """A step to try, and where it is: in the mirror, or in memory as this `save`, or else in the root."""

    step: int
    in_mirror: bool = False
    save: str | None = None


class PublishedCandidates(NamedTuple):
    """The published steps that a restore may try, in order, and the saves of some of them."""

    candidates: tuple[Candidate, ...]
    saves: Mapping[int, str | None]

    def newer_than(self, step: int) -> list[int]:
        """Return the published steps after this one."""
        return sorted({each.step for each in self.candidates if each.step > step})


def in_order(
    published: PublishedCandidates, held: Sequence[tuple[int, str]], before: Callable[[str], int], left: Collection[str]
) -> list[Candidate]:
    """Return the published steps and those in memory, in the order to try them. Pure.

    `held` are the steps in memory, newest first, and their saves; `before` tells how many of these are tried before a
    published save, and saves in `left` are tried last. The saves that are published as the steps of `held` must be
    known.
    """
    keyed = [((-step, index, 1), Candidate(step, save=save)) for index, (step, save) in enumerate(held)]
    for candidate in published.candidates:
        save = published.saves.get(candidate.step)
        first = 0 if save is None else len(held) if save in left else before(save)
        keyed.append(((-candidate.step, first, 0), candidate))
    keyed.sort(key=lambda each: each[0])  # stable: the mirror stays behind the root
    return [candidate for _, candidate in keyed]


def saves_of(root: Root, mirror: Root | None, steps: Iterable[int]) -> dict[int, str | None]:
    """Return the saves that are published as some steps, in the root, or else in the mirror.

    None for one that is not known, also because it cannot be read: its turn to be tried comes as for the others.
    """
    steps = set(steps)
    here = set(root.steps()) if steps else set()
    found = {step: _save_of(root, step) for step in steps & here}
    if mirror is not None:
        found |= {step: _save_of(mirror, step) for step in steps - here}
    return found


def _save_of(root: Root, step: int) -> str | None:
    """Return the save that is published as a step; None if it is damaged, or cannot be read, which is logged."""
    try:
        return root.save_of(step)
    except StorageError as error:
        _log.warning("it is not known which save step %d of %s is: %s", step, root.path, error)
        return None


def run_of(root: Root, step: int) -> str | None:
    """Return the name of the run that a published step is of, as its intent or its summary says; None if it has none.

    CheckpointCorruptError if both are damaged, StorageError if one cannot be read.
    """
    source = root.source_of(step)
    try:
        run = _document(source, INTENT, decode_document).get("run")
    except CheckpointCorruptError:
        run = _document(source, "zarr.json", decode_root)["attributes"]["ckpt"].get("run")
    return run if isinstance(run, str) else None


def _document(source: StepSource, name: str, decode: Callable[[bytes, str], dict[str, Any]]) -> dict[str, Any]:
    where = os.path.join(source.path, name)
    data = read_document(source, name)
    with well_formed(where):
        if data is None:
            raise CheckpointCorruptError(f"{where} is missing")
        return decode(data, where)


def published_candidates(root: Root, mirror: Root | None, *, needs_mirror: bool) -> list[Candidate]:
    """Return what a restore may try, in this order.

    StorageError if the mirror cannot be read and it is needed, as it is when the root has no steps: then training must
    not start from scratch. For the same reason, CheckpointNotFoundError if all steps were superseded.
    """
    steps = root.steps()
    found = [Candidate(step) for step in steps]
    if mirror is not None:
        try:
            found += [Candidate(step, in_mirror=True) for step in _copies(root, _saves(mirror, required=not steps))]
        except StorageError as error:
            if needs_mirror or not steps:
                raise StorageError(
                    f"the mirror {mirror.path} of {root.path} may have a newer step, and cannot be read: {error}"
                ) from error
            _log.warning("the mirror %s cannot be read, restoring from %s alone: %s", mirror.path, root.path, error)
    superseded = [] if found else root.superseded()
    if superseded:
        raise CheckpointNotFoundError(
            f"{root.path} has no published step, but superseded ones: a job was killed just before it published the "
            f"first step of another branch. Make one the newest again: inspect_ckpt restore-branch {root.path} "
            f"{superseded[-1]}; or remove them: inspect_ckpt rm"
        )
    return sorted(found, key=lambda candidate: (-candidate.step, candidate.in_mirror))


def _copies(root: Root, copies: Mapping[int, str | None]) -> list[int]:
    """Return the steps of the mirror that are of the branch of the root."""
    here = _saves(root)
    owners = {step: _owner(save) for step, save in here.items()}
    superseded = root.superseded()  # names of saves, some with a suffix
    return [step for step, save in copies.items() if save is not None and _is_of(step, save, here, owners, superseded)]


def _saves(root: Root, *, required: bool = False) -> dict[int, str | None]:
    """Return the steps of a root and their saves: None for one that cannot be read, or is damaged.

    StorageError instead if they are `required` and none is known: the steps are there.
    """
    try:
        return root.saves()
    except StorageError:
        pass  # the step that it is about is found below, if steps can be listed
    found = {step: _save_of(root, step) for step in root.steps()}
    if required and found and not any(found.values()):
        raise StorageError(f"{root.path} has the steps {sorted(found)}, and it is not known of which saves they are")
    return found


def _is_of(
    step: int, save: str, here: Mapping[int, str | None], owners: Mapping[int, int], superseded: list[str]
) -> bool:
    if here.get(step) is not None:  # else the step is not there, or it is not known which save it is
        return here[step] == save
    if any(name.startswith(save) for name in superseded):
        return False
    return all(owner <= _owner(save) for other, owner in owners.items() if other < step)


def _owner(save: str | None) -> int:
    found = parse_save_name(save or "")
    return 0 if found is None else found.owner
