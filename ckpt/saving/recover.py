"""Decide what an earlier owner of a root left: undecided saves, steps of another branch, steps found damaged.

A restore decides saves only when their owner is dead, and lets writers finish that have outlived their trainer. The
first save of an owner has claimed the root: it decides everything that is left, and moves aside what is not of its
branch. Both publish what is complete and abandon the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, FencedError, StorageError
from ckpt.ranks.failure import Failure
from ckpt.saving.publish import publish
from ckpt.storage.documents import FORMAT_VERSION
from ckpt.storage.interface import Aside, Pending, Root
from ckpt.storage.names import parse_save_name
from ckpt.storage.outcomes import NotDurableError
from ckpt.storage.ownership import OwnerState

_SHOWN = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Branch:
    """What the steps of a run continue: the `step` that was restored, and its `save`.

    The step is -1 if there was none, and None if nothing was restored. `damaged` are the newer steps that were skipped
    for damage, `unreadable` those that were because the storage failed.
    """

    step: int | None = None
    save: str | None = None
    damaged: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()

    def before(self, root: Root, token: int) -> dict[str, Any] | None:
        """Return what the next save of the owner with `token` continues: a step, and its save; None for nothing.

        That is its own newest step, also if the trainer does not know yet that this is published.
        """
        tip = root.tip()
        tip_save = None if tip is None else parse_save_name(tip["save"] or "")
        if self.step is None or (tip_save is not None and tip_save.owner == token):
            return tip
        return {"step": self.step, "save": self.save} if self.step >= 0 else None


def recover_for_restore(root: Root, seen: int, own: int | None, timeout_s: float, warn: Callable[[str], None]) -> int:
    """Decide the saves of a dead owner; return the newest token, for a later claim.

    While a trainer of the owner is alive nothing is touched; writers that finish what was staged are waited for, at
    most `timeout_s`. Where the root may not be written to, nothing is done. `seen` is the newest token known, `own`
    that of this job if it has claimed the root.
    """
    try:
        return _recover(root, seen, own, timeout_s, warn)
    except StorageError as error:
        if _is_refused(error):
            return seen
        raise


def _is_refused(error: StorageError) -> bool:
    """Return whether an error says that this process may not write here."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NOT_WRITABLE


def _recover(root: Root, seen: int, own: int | None, timeout_s: float, warn: Callable[[str], None]) -> int:
    root.check_links()
    ownership = root.ownership
    newest, owner = ownership.newest(), ownership.owner()
    if own is not None and own in (newest, owner):
        _decide_pending(root, own, timeout_s, warn, is_restore=True)
        return newest
    deadline = time.monotonic() + timeout_s
    state = _when_finished(root, newest, deadline)
    if state is OwnerState.GONE:  # and the job before a restore that took it for dead?
        state = _when_finished(root, owner, deadline)
    if state is OwnerState.ACTIVE or (state is OwnerState.GONE and not root.pending()):
        return newest
    try:
        token = ownership.claim(max(seen, newest), temporary=True, above=0 if newest else lost_token(root))
    except FencedError:
        return newest  # another start was faster, and its owner is alive
    try:
        _decide_pending(root, token, timeout_s, warn, is_restore=True)
    finally:
        ownership.release(token)
    return token


def lost_token(root: Root) -> int:
    """Return the largest token that steps and undecided saves tell of, for a root without claims; 0 if there is none.

    Claims are lost where a root was copied without its hidden folders. The clock alone would not do for the next one:
    it may have been set back, and then everything that is there would count as saved by a later owner.
    """
    tokens = [save.owner for save in root.pending()]
    for step in root.steps():
        with contextlib.suppress(StorageError):  # one that cannot be read tells nothing
            tokens.append(root.owner_of(step))
    return max(tokens, default=0)


def whole_steps(root: Root) -> list[int]:
    """Return the published steps, and those of undecided saves that are complete, which `take_over` publishes."""
    complete = [save.step for save in root.pending() if _is_complete(root.pending_save(save))]
    return sorted({*root.steps(), *complete})


def _is_complete(pending: Pending) -> bool:
    world_size = _world_size(pending)
    return world_size is not None and pending.parts_present() >= set(range(world_size))


def take_over(root: Root, token: int, branch: Branch, timeout_s: float, warn: Callable[[str], None]) -> None:
    """Decide the saves of earlier owners, then move damaged steps aside. Before the first save of a token's owner.

    Waits at most `timeout_s` for writers that outlived their trainers. Whatever is done already is not done again.
    """
    _decide_pending(root, token, timeout_s, warn)
    for step in branch.damaged:
        if root.owner_of(step) < token:
            try:
                _move_aside(root, token, step, "damaged", "is damaged", warn)
            except StorageError as error:
                warn(f"step {step} is damaged, and cannot be moved aside: {error}")


def superseded(root: Root, token: int, branch: Branch) -> list[int]:
    """Return the steps of earlier owners that are newer than the one the owner with `token` continues."""
    if branch.step is None:
        return []
    newer = [step for step in root.steps() if step > branch.step]
    return [step for step in newer if _owner_of(root, step, branch) < token]


def _owner_of(root: Root, step: int, branch: Branch) -> int:
    """Return the token of the owner of a step. One that the restore could not read is of an earlier owner."""
    try:
        return root.owner_of(step)
    except StorageError:
        if step not in branch.unreadable:
            raise
        return 0


def supersede(root: Root, token: int, branch: Branch, warn: Callable[[str], None]) -> None:
    """Move the `superseded` steps aside.

    Not before the first save of the owner is about to be published: an earlier owner may have removed what it
    continues, and then these are the only steps.
    """
    for step in superseded(root, token, branch):
        # -1 stands for no step: training that restored nothing comes before all steps.
        began = "began anew" if branch.step == -1 else f"went on from step {branch.step}"
        why = f"is of another branch: training {began}"
        _move_aside(root, token, step, "superseded", why, warn)


def _move_aside(root: Root, token: int, step: int, aside: Aside, why: str, warn: Callable[[str], None]) -> None:
    target = root.move_aside(step, token, aside)
    if target is not None:
        warn(f"step {step} {why}; moved to {target}. `inspect_ckpt ls --all` lists it, `inspect_ckpt rm` removes it")


def _when_finished(root: Root, token: int, deadline: float) -> OwnerState:
    """Wait while an owner is FINISHING, until `deadline`, and return its state."""
    pause_s = _FIRST_PAUSE_S
    while (state := root.ownership.state(token)) is OwnerState.FINISHING and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return state


def _decide_pending(
    root: Root, token: int, timeout_s: float, warn: Callable[[str], None], *, is_restore: bool = False
) -> None:
    """Decide the saves of owners before `token`. StorageError if one cannot be read: it may be complete.

    A restore leaves such a save as it is, and those of a job that was taken for dead and goes on.
    """
    deadline = time.monotonic() + timeout_s
    root.refresh()
    for save in root.pending():
        if save.owner >= token:
            continue
        if _when_finished(root, save.owner, deadline) is OwnerState.ACTIVE and is_restore:
            continue
        pending = root.pending_save(save, token)
        try:
            if pending.outcome() is None:
                adopt(pending, warn, is_restore=is_restore)
        except StorageError as error:
            if not is_restore or _is_refused(error):
                raise
            warn(f"the save of step {save.step}, which an earlier run left, stays undecided until the next: {error}")
    root.ownership.check(token)
    root.clean_records()  # the files of abandoned saves are deleted after the next save


def adopt(pending: Pending, warn: Callable[[str], None], *, is_restore: bool = False) -> None:
    """Publish a complete save; abandon one that is not.

    StorageError, with the save as it was, if it cannot be read or published: then nothing is known of it. One that is
    incomplete and cannot be abandoned is an error in a restore, else a warning: it does not keep a job from saving.
    """
    world_size = _world_size(pending)
    missing: list[int] = []
    problem = None
    if world_size is None:
        problem = "it has no intent"
    elif missing := sorted(set(range(world_size)) - pending.parts_present()):
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        problem = f"the parts of ranks {missing[:_SHOWN]}{more} are missing"
    else:
        try:
            publish(pending, lambda: None)
            warn(f"published step {pending.save.step}, which an earlier run had completely written")
        except FencedError:
            raise
        except NotDurableError as error:
            warn(str(error))
        except StorageError:
            if pending.outcome() is None:  # else another process was faster
                raise
        except CheckpointError as error:
            problem = str(error)
    if problem is not None:
        who = f"process {os.getpid()} on {os.uname().nodename}"
        why = f"left behind by an earlier run, according to {who}: {problem}"
        what = f"the unfinished save of step {pending.save.step} of an earlier run"
        try:
            pending.abandon(Failure(None, "SaveAbandonedError", why))
            warn(f"abandoned {what}: {problem}")
        except StorageError as error:
            if is_restore:
                raise
            warn(f"{what} can neither be published ({problem}) nor abandoned, and stays: {error}")


def _world_size(pending: Pending) -> int | None:
    """Return the world size of a save; None if it has not begun, or is of another format."""
    try:
        intent = pending.intent()
    except CheckpointCorruptError:
        return None
    return int(intent["world_size"]) if intent is not None and intent.get("format") == FORMAT_VERSION else None
