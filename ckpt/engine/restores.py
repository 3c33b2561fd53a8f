"""The restores of a `Checkpointer`, and the branch of training that its saves continue.

    restore      saves in flight are finalized, those of an ended run decided; all ranks agree on a step
    after a fault, without communication: what every rank restores to the same step by itself
    in the next iteration of a restart, through a store: also what is in memory alone

Each notes what was restored, tells the memory tier, and says which branch the next save continues.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.arguments import check_name
from ckpt.engine.parts import Parts
from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from ckpt.loading.candidates import run_of, saves_of
from ckpt.loading.options import RestoreOptions
from ckpt.loading.restore import Candidates, Undecided, candidates, published_saves, restore
from ckpt.loading.restore_step import RestoreReport
from ckpt.ranks.group import Alone, Group
from ckpt.saving.recover import Branch, recover_for_restore
from ckpt.saving.scheduled import wait_for_program, wait_for_step
from ckpt.storage.interface import Root
from ckpt.storage.names import parse_save_name
from ckpt.storage.roots import note_seen
from inprocess.ipc.reported_step import report_step
from inprocess.ipc.restart_index import current_restart_index

_log = logging.getLogger("ckpt")


class Restores:
    """Restores states, and knows the position in the history of the job. For the thread that trains."""

    def __init__(self, parts: Parts, restored: Callable[[Mapping[str, Any] | None], None]) -> None:
        self._parts = parts
        self._restored = restored  # the schedule begins anew
        self._saver = parts.saver
        self._timeout_s = parts.settings.timeout_s
        self.registered: dict[str, Any] = {}  # what is restored after a fault
        self.branch = Branch()
        self.last: RestoreReport | None = None
        self.current_step: int | None = None
        self._run: str | None = None  # the one that `start_over` was told
        self.has_prepared = False  # for the first save
        self._seen_left: int | None = None  # the newest token, when the last restore decided what an ended run left

    @property
    def resume_step(self) -> int | None:
        """The step that was restored last; None if none was."""
        return None if self.last is None else self.last.step

    def register(self, state: dict[str, Any]) -> None:
        """See `Checkpointer.register`."""
        for name, value in state.items():
            if value is None or isinstance(value, (bool, int, float, complex, str, bytes, tuple)):
                raise TypeError(
                    f"{name}={value!r} cannot be restored in place, it is a {type(value).__name__}: register a dict "
                    "that holds it"
                )
        self.registered.update(state)

    def restore(self, state: Any, step: int | None, options: RestoreOptions) -> int | None:
        """See `Checkpointer.restore`."""
        parts, ranks = self._parts, self._parts.ranks
        ranks.doing = "the restore" if step is None else f"the restore of step {step}"
        read_only = parts.settings.read_only
        tiers, memory, left = parts.tiers(parts.mirror_root), self._saver.memory, self._undecided(step)
        report = restore(tiers, state, step, options, ranks, memory, left, read_only)
        note_seen(parts.root.path)
        self.note(report)
        self._settle(report, current_restart_index() or 0)
        self._continue_from(report, self._seen_left, ranks.rank)
        # Without a step nothing of `state` is called: an optimizer's `state_dict` may begin its state.
        if report is not None and not read_only and options.only is None:
            self.has_prepared = True
            self._saver.warmup_in_background(state)
        return self.resume_step

    def first_seen(self, state: Any) -> None:
        """Begin to prepare for the first save, unless a restore has. Collective the first time, then without effect."""
        if self.has_prepared or self._parts.settings.read_only:
            return
        self.has_prepared = True
        if not current_restart_index():  # later a newcomer would be alone in this
            self._saver.warmup_in_background(state)

    def recover(self) -> list[int]:
        """See `Checkpointer.recover`."""
        parts = self._parts
        parts.ranks.doing = "the recovery of earlier saves"
        found = candidates(parts.tiers(parts.mirror_root), None, parts.ranks, self._undecided(None))
        note_seen(parts.root.path)
        return sorted({candidate.step for candidate in found.ordered})

    def start_over(self, run: str) -> bool:
        """See `Checkpointer.start_over`."""
        check_name("run", run)
        parts, ranks, claim = self._parts, self._parts.ranks, self._saver.root_claim
        ranks.doing = f"the start of the run {run!r}"
        tiers = parts.tiers(parts.mirror_root)
        found = candidates(tiers, None, ranks, self._undecided(None))
        with ranks.all_or_none(f"start the run {run!r}") as phase:
            is_begun = claim.run == run or (ranks.rank == 0 and self._is_begun(run, found))
            phase.told = b"begun" if is_begun else b""
        self._run = claim.run = run
        if found.ordered and any(phase.answers):
            return False  # only its steps count: those that it has left are not among them
        saves = published_saves(tiers, found, ranks)
        note_seen(parts.root.path)
        self.note(None)
        self._saver.memory_tier.settle(None, restart=current_restart_index() or 0, left=saves)
        if parts.mirror is not None and saves:
            parts.mirror.another_branch()
        self._continue_from(None, self._seen_left, ranks.rank)
        return True

    def _is_begun(self, run: str, found: Candidates) -> bool:
        """Return whether the newest published step, but for damaged ones, is of a run. False if there is no step.

        StorageError for one that cannot be read. CheckpointCorruptError if those that may be of the run are damaged.
        """
        damaged: dict[int, CheckpointCorruptError] = {}
        other: int | None = None
        for candidate in found.ordered:
            root = self._parts.mirror_root if candidate.in_mirror else self._parts.root
            if candidate.save is None and root is not None:
                try:
                    is_of_run = run_of(root, candidate.step) == run
                except CheckpointNotFoundError:
                    continue  # it was removed meanwhile
                except CheckpointCorruptError as error:
                    _log.warning("it is not known which run step %d of %s is of: %s", candidate.step, root.path, error)
                    damaged[candidate.step] = error
                    continue
                damaged.pop(candidate.step, None)  # a copy of it is whole
                if is_of_run:
                    return True
                other = candidate.step
                break
        if damaged:
            steps, path = sorted(damaged), self._parts.root.path
            which = "all are damaged" if other is None else f"they are damaged, and step {other} is of another one"
            raise CheckpointCorruptError(
                f"it is not known which run the steps {steps} of {path} are of, as {which}; to begin anew, "
                f"remove them: inspect_ckpt rm {path} {' '.join(map(str, steps))}; or give another root"
            ) from damaged[steps[-1]]
        return False

    def restore_registered_alone(self, last: RestoreReport | None, rank: int) -> None:
        """Restore the registered state after a fault, without communication; `last` was restored before that."""
        tiers = self._parts.tiers(self._mirror_after_fault(last))
        report = restore(tiers, self.registered, None, RestoreOptions(), Alone(rank), self._saver.memory)
        self.note(report)
        self._settle(report, 1 + self._saver.snapshots.last_restart)
        self._continue_from(report, None, rank)

    def restore_registered(self, ranks: Group, restart: int) -> None:
        """Restore the registered state, to a step on which `ranks` agree. Collective, through `ranks`."""
        tiers = self._parts.tiers(self._parts.mirror_root)
        report = restore(tiers, self.registered, None, RestoreOptions(), ranks, self._saver.memory)
        self.note(report)
        self._settle(report, restart)
        self._continue_from(report, None, ranks.rank)

    def note(self, report: RestoreReport | None) -> None:
        """Note what was restored last; None for nothing."""
        self.last = report
        self._restored(None if report is None else report.pace)
        if report is not None:
            report_step(report.step)
        self.current_step = None if report is None or report.in_memory else report.step

    # -- saves that are undecided when a restore begins ----------------------------------------------------------------

    def _undecided(self, step: int | None) -> Undecided:
        """Wait for saves of other Checkpointers of this program, and return how the others are decided.

        That is before a restore, of `step`, which begins now.
        """
        self._seen_left = None
        deadline = time.monotonic() + self._timeout_s
        wait_for_program(self._parts.root, deadline - self._timeout_s / 2, but=self._saver.scheduled)
        return Undecided(
            lambda: self._decide_left(step),
            lambda: [save.name for save in self._saver.scheduled()],
            lambda common: self._saver.drain(common, deadline),
        )

    def _decide_left(self, step: int | None) -> None:
        """Wait for the writers of `step`, if it is named, and decide what an ended run left, on the coordinator.

        With `read_only` nothing is decided.
        """
        root, saver = self._parts.root, self._saver
        wait_s = self._timeout_s / 2  # the other ranks wait for this one meanwhile
        if step is not None:
            wait_for_step(root, step, time.monotonic() + wait_s, saver.scheduled)
        if self._parts.settings.read_only:
            return
        if self._parts.mirror_root is not None:
            with contextlib.suppress(StorageError):
                saver.root_claim.above = self._parts.mirror_root.ownership.newest()
        self._seen_left = recover_for_restore(root, saver.root_claim.seen, saver.root_claim.token, wait_s, _log.warning)

    # -- the branch that the next save continues -----------------------------------------------------------------------

    def _mirror_after_fault(self, last: RestoreReport | None) -> Root | None:
        """Return the mirror if the newest step is there, and None otherwise: so that all ranks look in one place.

        They have restored the same step from the same place before, and published the same steps since.
        """
        root, mirror = self._parts.root, self._parts.mirror_root
        if mirror is None or last is None or last.root != mirror.path:
            return None
        left = self._saver.memory_tier.left
        newer = [step for step in root.steps() if step >= last.step and root.save_of(step) not in left]
        return None if newer else mirror

    def _settle(self, report: RestoreReport | None, restart: int) -> None:
        tier = self._saver.memory_tier
        if report is None:  # what `start_over` has left stays so
            tier.settle(None, restart=restart, left=tier.left)
        else:
            tier.settle(report.step, report.save, restart=restart, left=report.left)

    def _continue_from(self, report: RestoreReport | None, seen: int | None, rank: int) -> None:
        self.branch = Branch(-1) if report is None else self._branch_of(report, rank)
        if report is not None and self._run is None:  # else this run goes on, also from a step of another one
            self._saver.root_claim.run = report.run
        if self._parts.mirror is not None and report is not None and report.left:
            self._parts.mirror.another_branch()
        self._saver.continue_from(self.branch, seen)

    def _branch_of(self, report: RestoreReport, rank: int) -> Branch:
        """Return the branch that the next save continues: for a step in memory alone, the last one published before it.

        Not one of a branch that training has left, and that no save has moved aside yet.
        """
        left, root = self._saver.root_claim.branch, self._parts.root
        damaged, unreadable = report.damaged, report.unreadable
        if left is not None:  # these were found by an earlier restore, and no save has moved them aside yet
            damaged += tuple(step for step in left.damaged if step > report.step and step not in damaged)
            unreadable += tuple(step for step in left.unreadable if step > report.step and step not in unreadable)
        if not report.in_memory or rank != 0:
            return Branch(report.step, report.save, damaged, unreadable)

        def save_of(step: int) -> str | None:  # no error, which rank 0 alone would have
            return saves_of(root, None, [step]).get(step)

        steps = [step for step in root.steps() if step <= report.step]
        if left is not None and left.step is not None and left.step <= report.step:
            own = self._saver.root_claim.token
            saves = {step: parse_save_name(save_of(step) or "") for step in steps if step > left.step}
            steps = [step for step in steps if step <= left.step or ((save := saves[step]) and save.owner == own)]
        before = max(steps, default=None)
        return Branch(-1) if before is None else Branch(before, save_of(before), damaged, unreadable)
