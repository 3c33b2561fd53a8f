"""The worker that copies steps to a mirror; see `background`. Its first message has its arguments.

    trainer ── Due ──▶ thread: wanted saves; the newest that waits is held ──▶ main thread: copy it, remove old ones
       │                └── end of the connection: the trainer has closed or has died;
       │                    what is wanted is copied for a while, then this ends
       ◀── CopyEnded, Notice ── both

The newest wanted save is copied first. A step that fails because a root cannot be reached is tried again, with growing
pauses, as long as it exists.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from ckpt.async_calls.call import unpickled
from ckpt.async_calls.writer_main import failed
from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    FencedError,
    StorageError,
)
from ckpt.keeper.forking import let_go_of_terminal
from ckpt.keeper.messages import Notice
from ckpt.mirroring.step_copy import StepCopy, StoppedError, Throttle
from ckpt.mirroring.wanted import CODEC, MIRROR, CopyEnded, Due, Report, Wanted
from ckpt.saving.recover import adopt
from ckpt.saving.retention import Facts, Keep, Retention, retain
from ckpt.storage.documents import INTENT, MAX_DOCUMENT_BYTES, decode_document
from ckpt.storage.leases import Lease
from ckpt.storage.names import SaveId
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.ownership import OwnerState
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.roots import open_root
from ckpt.storage.step_source import HeldStep
from ckpt.storage.stores.interface import StorageOptions
from inprocess.ipc.packets import receive, send
from inprocess.ipc.process import Process

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_REPORT_S = 60.0
_LOOK_S, _LONGEST_LOOK_S = 0.5, 10.0
_BEGIN_S = 900.0  # the process of rank 0 may copy another step first
_GONE_S = 20.0  # that process is started again sooner, if it was killed
_END_S = 3.0  # for a request that is under way when the time is over
_CAUSE_CHARACTERS = 4000
_COORDINATOR = 0


class _MirrorWorker:
    """Copies wanted steps, in the main thread of its process, and owns the mirror meanwhile."""

    def __init__(
        self,
        report: Callable[[Report], None],
        root: tuple[str, StorageOptions | None],
        mirror: tuple[str, StorageOptions | None],
        keep: Keep | None,
        bandwidth: float | None,
        close_s: float,
        rank: int,
        token: int,
        node_local: str | None,
    ) -> None:
        """Copy from a root to another one, each given by path and options.

        The worker of rank 0 owns the mirror and publishes; the others copy the shares of their ranks. With
        `node_local`, the directory of this node with pack files of the root, each can copy only what is on its node.
        `token` is that which an earlier worker of this job had in the mirror, or 0.
        """
        self._root = open_root(*root)
        self._mirror = open_root(*mirror)
        self._packs = None if node_local is None else NodePacks(node_local, self._root)
        self._rank = rank
        self._keep = keep
        self.close_s = close_s
        self._report = report
        self.stopping = threading.Event()
        self._throttle = Throttle(bandwidth, self.stopping)
        self.wanted = Wanted(self._hold)
        self._leads = rank == _COORDINATOR
        self._job = 0  # the token in the first root of the job that has taken over the mirror
        self._token = token
        self._lease: Lease | None = None
        self._fenced = 0  # jobs with this token and smaller ones do not own the mirror any more
        self._reported_s = -_REPORT_S
        self._facts: Facts = {}
        self._kept: set[int | str] = set()  # steps that could not be removed, and absent metrics
        self._helped: set[str] = set()  # saves of which this process has copied what its node has

    def take(self, due: Due) -> None:
        """Want a save, unless rank 0 does not. In the thread that reads messages."""
        if due.is_due or self._is_due(due.save):
            self.wanted.add(due)
        else:
            self._report(Notice(MIRROR, {"not_due": due.save.name}))

    def _is_due(self, save: SaveId) -> bool:
        """Return whether rank 0 wants a save to be copied, as the step records. True if that cannot be read now.

        One that is gone needs no help: if it was due, the process of rank 0 tells that.
        """
        try:
            with self._root.hold_step(save.step, lease=False) as held:
                where = f"{held.path}/{INTENT}"
                intent = decode_document(held.source.read(INTENT, MAX_DOCUMENT_BYTES), where)
            return intent.get("save") == save.name and intent.get("mirror") is True
        except CheckpointNotFoundError:
            return False
        except (CheckpointError, DamagedFileError, OSError):
            return True

    def _hold(self, save: SaveId) -> HeldStep:
        held = self._root.hold_step(save.step, lease=self._leads, renewing=True)
        if self._root.save_of(save.step) != save.name:  # `HeldStep.check` tells whether that was of the held one
            held.close()
            raise CheckpointNotFoundError(
                f"step {save.step} of {self._root.path} is not of the save {save.name} any more", step=save.step
            )
        return held

    def run(self) -> None:
        """Copy until all is copied and no more can come."""
        pause_s = _FIRST_PAUSE_S
        while (due := self.wanted.next()) is not None:
            try:
                ended = self._try(due)
            except StoppedError:
                break
            if ended is None:  # a newer one is wanted, which comes first
                continue
            if ended.again:
                now = time.monotonic()
                if now - self._reported_s >= _REPORT_S:
                    self._reported_s = now
                    self._report(ended)
                self.wanted.pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            self.wanted.drop(due)
            pause_s = _FIRST_PAUSE_S
            self._report(ended)  # the step is not held any more
            if self._leads and not ended.error:
                with contextlib.suppress(CheckpointError):  # the next copy does it, or finds out why not
                    self._remove()

    def close(self) -> None:
        """Give up the steps and the ownership, as far as that is possible."""
        self.wanted.release_all()
        if self._lease is not None:
            self._lease.close()
            with contextlib.suppress(CheckpointError):
                self._mirror.ownership.release(self._token, _COORDINATOR)

    def _try(self, due: Due) -> CopyEnded | None:
        begin = time.monotonic()

        def failed(cause: object, *, again: bool) -> CopyEnded:
            return CopyEnded(due.save, 0, time.monotonic() - begin, str(cause), again)

        try:
            try:
                if self._leads:
                    return self._copy(due)
                return self._help(due)
            except FencedError:
                if self._lease is None:
                    raise
                self._disown()  # owning it again tells whether it is owned by a job, or was by a process that recovered
                return self._copy(due)
        except FencedError as error:
            if self._lease is None:
                self._fenced = max(self._fenced, due.token)
            return failed(error, again=self._lease is not None)
        except CheckpointNotFoundError as error:
            return failed(f"the step was removed before it was copied: {error}", again=False)
        except StorageError as error:
            return failed(error, again=True)
        except CheckpointError as error:  # some of them are OSErrors, too
            return failed(error, again=False)
        except OSError as error:
            return failed(error, again=True)

    def _own(self, due: Due) -> None:
        """Become the owner of the mirror for a job, and take over what an earlier owner has left there."""
        if due.token <= self._fenced:
            raise FencedError(f"a job that started later owns the mirror {self._mirror.path}")
        if due.token <= self._job:
            return
        self._disown()
        mirror = self._mirror
        mirror.make()
        self._token = mirror.ownership.claim_as(due.token, self._token)
        self._lease = mirror.ownership.leases(self._token).register(_COORDINATOR, Process.here(), lambda: False)
        self._report(Notice(MIRROR, {"owner": self._token}))
        mirror.refresh()
        for save in mirror.pending():
            if self._root.save_of(save.step) == save.name:
                self.wanted.add(Due(save, due.token, due.branch))
            elif save.owner <= self._token:
                adopt(mirror.pending_save(save, self._token), lambda text: None)
        self._job = due.token

    def _disown(self) -> None:
        if self._lease is not None:
            self._lease.close()
        self._lease, self._job = None, 0

    def _copy(self, due: Due) -> CopyEnded:
        begin = time.monotonic()
        self._own(due)
        held = self.wanted.held(due.save)
        try:
            source = held.source if self._packs is None else self._packs.source(due.save.step, held.source)
            copy = StepCopy(source, self._mirror, self._token, self._throttle, is_helped=due.is_helped)
            copy.run(lambda: self._before_commit(due, held), self._superseded(due))
        except CheckpointCorruptError as error:
            if not held.still_there:
                raise CheckpointNotFoundError(str(error)) from error
            raise
        return CopyEnded(due.save, copy.nbytes, time.monotonic() - begin)

    def _help(self, due: Due) -> CopyEnded | None:
        """Copy the share of this rank in each copy that the process of rank 0 has begun, until `due` is among them.

        With node-local pack files it is what this node has, and also of copies that an earlier job has begun: the
        process of rank 0 cannot complete them alone. Do nothing if it does not begin with this one. None if a newer one
        is wanted, with which it will begin then.
        """
        begin, pause_s = time.monotonic(), _LOOK_S
        left_at: float | None = None
        save = due.save
        nbytes = 0
        while save.name not in self._helped and self._mirror.pending_save(save).outcome() is None:
            if self._root.save_of(save.step) != save.name:
                raise CheckpointNotFoundError(f"the save {save.name} is not in {self._root.path} any more")
            for each in self._mirror.pending():
                is_ours = self._packs is not None or self.wanted.has(each)
                if is_ours and each.name not in self._helped and self._root.save_of(each.step) == each.name:
                    nbytes += self._help_with(each)
            now = time.monotonic()
            left_at = (now if left_at is None else left_at) if self._is_left() else None
            if (left_at is not None and now - left_at >= _GONE_S) or now - begin > _BEGIN_S:
                break
            if save.name not in self._helped:
                if self.wanted.has_newer(due):
                    return None
                self._throttle.pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        return CopyEnded(save, nbytes, time.monotonic() - begin)

    def _help_with(self, save: SaveId) -> int:
        """Copy what this process has to copy of a step, if its copy has begun; return how many bytes."""
        begin = time.monotonic()
        try:
            with self._root.hold_step(save.step, lease=False) as held:
                source = held.source if self._packs is None else self._packs.source(save.step, held.source)
                copy = StepCopy(source, self._mirror, save.owner, self._throttle)
                if not copy.has_begun:
                    return 0
                self._report(Notice(MIRROR, {"begun": save.name}))
                copy.copy_share(self._rank)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            self._report(CopyEnded(save, 0, time.monotonic() - begin, str(error)))
            self._helped.add(save.name)
            return 0
        self._helped.add(save.name)
        return copy.nbytes

    def _is_left(self) -> bool:
        """Return whether no process is there that could begin a copy, and the trainer of this rank wants no more."""
        if not self.wanted.is_closed:
            return False
        return self._mirror.ownership.state(self._mirror.ownership.newest()) is OwnerState.GONE

    def _before_commit(self, due: Due, held: HeldStep) -> None:
        """Check that the step is still the one that was copied, and move steps of another branch aside."""
        held.check()
        for step in self._superseded(due):
            self._mirror.move_aside(step, self._token, "superseded")

    def _superseded(self, due: Due) -> list[int]:
        """Return the steps of the mirror that the job has left: newer ones than it continues, saved by earlier owners.

        The step to copy may be among them, as another save.
        """
        continued = due.branch.step
        if continued is None:
            return []
        mirror = self._mirror
        return [step for step in mirror.steps() if step > continued and mirror.owner_of(step) < due.token]

    def _remove(self) -> None:
        """Remove what the policy of the mirror does not keep, and what is left of abandoned copies."""
        mirror = self._mirror
        retained = retain(mirror, Retention(self._keep), self._token, mirror.steps()[-1], "", self._facts)
        retained.warn(self._kept, mirror.path)
        mirror.clean()


def run(trainer: socket.socket) -> None:
    """Copy until the trainer closes its end, and for `Mirror.close_timeout` after that."""
    os.chdir("/")  # not to keep the trainer's directory in use

    def report(what: Report) -> None:
        if isinstance(what, CopyEnded):
            what = replace(what, error=what.error[:_CAUSE_CHARACTERS])
        with contextlib.suppress(OSError):  # the trainer has ended
            send(trainer, CODEC, what)

    with _last_words(report):
        try:
            (fd,) = receive(trainer, CODEC).fds
        except EOFError:
            return  # the trainer could not send it
        worker = _MirrorWorker(report, **unpickled(fd, {}))
        os.close(fd)

        def listen() -> None:
            with _last_words(report):
                while (due := _next_due(trainer)) is not None:
                    worker.take(due)
                let_go_of_terminal()
                worker.wanted.close()
                worker.stopping.wait(worker.close_s)
                worker.stopping.set()
                time.sleep(_END_S)
                os._exit(1)

        threading.Thread(target=listen, name="ckpt-mirror-input", daemon=True).start()
        worker.run()
        worker.close()


@contextlib.contextmanager
def _last_words(report: Callable[[Report], None]) -> Iterator[None]:
    """Report an exception of the block, in whichever thread, and end the process."""
    began_ns = time.monotonic_ns()
    try:
        yield
    except Exception as error:
        report(failed(MIRROR, began_ns, error))
        os._exit(1)


def _next_due(trainer: socket.socket) -> Due | None:
    """Wait for a message; None when the trainer has closed its end, or has died."""
    while True:
        try:
            message = receive(trainer, CODEC).message
        except ConnectionResetError:
            continue  # reported once if the trainer has died with unread messages, before those that it has sent
        except (EOFError, OSError):
            return None
        assert isinstance(message, Due)
        return message
