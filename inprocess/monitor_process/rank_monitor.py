"""The monitor that a rank's wrapper starts: it ends the rank when it hangs, and reports its death to the others.

    one thread      RankMonitor.run: messages of the rank, its death, its time limits; requests to the store
    per iteration   SiblingMonitor: heartbeats

The rank, and with it the whole job, goes on when its monitor dies: the wrapper starts a new one (`supervised`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from inprocess.absent import silent_note
from inprocess.agreement import Agreement, depart
from inprocess.attribution import DETAIL_CHARS, Interruption, InterruptionRecord
from inprocess.coordination.namespace import PrefixView
from inprocess.exception import RestartError, StaleViewError
from inprocess.fault_classes import Symptoms, class_of
from inprocess.ipc.suspension import Suspension
from inprocess.monitor_process import messages
from inprocess.monitor_process.job_store import iteration_store, open_store
from inprocess.monitor_process.limits import Limit, ProgressLimits
from inprocess.monitor_process.messages import Message, MonitorChannel, WatchRank
from inprocess.monitor_process.sibling import SiblingMonitor
from inprocess.monitor_process.watched import WatchedProcess, WatchedSections
from inprocess.process_end import KernelEvidence, describe_status, exit_status
from inprocess.progress_watchdog import Timestamp
from inprocess.sections.deadlines import AlarmAction
from inprocess.sections.report import Standing

_log = logging.getLogger(__name__)
_STACKS_TIMEOUT_S = 2.0  # for a busy machine; a process that cannot answer at all is not waited for
_REMEDY = "; code that may take longer needs a longer limit, or call.disable_hang_protection()"


@dataclass(frozen=True)
class _Position:
    """The rank's present iteration, as far as its monitor knows."""

    rank: int
    world_size: int | None
    iteration: int


class RankMonitor:
    """The loop of the process. `channel` is the connection to the rank, `process` the rank's."""

    def __init__(self, config: WatchRank, channel: MonitorChannel, process: WatchedProcess) -> None:
        self.config = config
        self.channel = channel
        self.process = process
        self._store: Any = None
        self._position: _Position | None = None
        self._sibling: SiblingMonitor | None = None
        self._leaving = False  # the rank leaves the job by itself
        self._reported = False  # and the others know it
        self._done = False
        self._last_progress_at = 0.0  # when the rank last sent its timestamps
        self._left_behind = False  # the others are in a later iteration, and go on without this rank
        self._cut_off_since: float | None = None  # when the store was lost
        self._suspension = Suspension()
        self._kernel = KernelEvidence(process.pid)
        self._limits = ProgressLimits(config.soft_timeout_s, config.hard_timeout_s)
        self._sections: WatchedSections | None = None
        if config.sections_fd is not None:
            grace_s = config.hard_timeout_s - config.soft_timeout_s  # from the restart of all ranks to the end of this
            self._sections = WatchedSections(
                config.sections_fd,
                grace_s=grace_s,
                repeat_s=grace_s,
                is_alive=lambda now: self._limits.silent_s(now) < config.soft_timeout_s / 2,
            )
            os.close(config.sections_fd)

    def run(self) -> None:
        """Watch until the call is over, or the rank is dead and its death is reported."""
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.process, select.POLLIN)
        with ExitStack() as stack:
            stack.callback(self._close)
            channel_open = True
            while not self._done:
                pause_s = self._pause_s()
                self._suspension.expect(pause_s)
                ready = dict(poll.poll(pause_s * 1000))
                self._note_suspension()
                if channel_open and self.channel.fileno() in ready and not self._read_messages():
                    poll.unregister(self.channel)  # the death of the rank usually follows
                    channel_open = False
                if self.process.fileno() in ready and not self._done:
                    self._handle_death()
                elif self._belongs_to_the_job():
                    self._note_suspension()
                    self._check_sections()
                    self._check_limits()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _read_messages(self) -> bool:
        """Handle all messages that have arrived. False if the channel is closed."""
        try:
            while not self._done and (packet := self.channel.receive()) is not None:
                self._handle(packet.message)
        except EOFError:
            return False
        return True

    def _handle(self, message: Message) -> None:
        if not isinstance(message, messages.Progress):
            _log.debug("%s", message)
        match message:
            case messages.Progress(auto, manual):
                self._last_progress_at = time.monotonic()
                self._limits.update(Timestamp(auto, manual))
            case messages.Connect(description, iteration):
                self._connect(description, iteration)
            case messages.IterationStart(rank, world_size, iteration):
                self._begin(_Position(rank, world_size, iteration))
            case messages.DisableSiblingMonitor():
                self._stop_sibling()
            case messages.DisableTimeouts():
                self._limits.enabled = False
            case messages.EnableTimeouts():
                self._limits.enabled = True
            case messages.Leaving(reported):
                self._leaving, self._reported = True, reported
            case messages.Shutdown():
                self._done = True
            case _:
                _log.error("unexpected message %s", type(message).__name__)

    def _connect(self, description: dict[str, Any], iteration: int) -> None:
        if self._store is not None:
            self._store.close()
        self._store = open_store(description, self.config.heartbeat_timeout_s)
        if self._position is None:  # from now on the others count on this rank
            self._position = _Position(self.config.initial_rank, None, iteration)
            self._limits.start(time.monotonic())

    def _begin(self, position: _Position) -> None:
        self._stop_sibling()
        self._position = position
        assert position.world_size is not None
        self._limits.start(time.monotonic())
        self._kernel.begin()
        self._sibling = SiblingMonitor(
            self._store_of(position.iteration),
            position.rank,
            position.world_size,
            interval_s=self.config.heartbeat_interval_s,
            timeout_s=self.config.heartbeat_timeout_s,
            report=lambda ranks: self._report_unresponsive(position, ranks),
            note=lambda: self._note(position.rank),
            stale=lambda: self._check_left_behind(position.iteration),
        )
        self._sibling.start()

    def _note(self, rank: int) -> str:
        """Return on one line how long the rank is silent and where it is, for other ranks. Sibling thread."""
        silent_s = self._limits.silent_s(time.monotonic()) if self._limits.enabled else 0.0
        standing = None if self._sections is None else self._sections.standing(rank)
        return f"{silent_note(silent_s)} {'' if standing is None else json.dumps(standing.to_json())}"

    # -- the store -----------------------------------------------------------------------------------------------------

    def _store_of(self, iteration: int) -> PrefixView:
        return iteration_store(self._store, iteration)

    def _agreement(self, iteration: int) -> Agreement:
        known = self._position is not None and self._position.iteration == iteration
        world_size = self._position.world_size if known and self._position is not None else None
        return Agreement(self._store_of(iteration), iteration, world_size)

    def _record(self, record: InterruptionRecord) -> None:
        """Report a fault of this rank."""
        if self._position is None or self._store is None:
            _log.error("a fault before the first iteration cannot be reported: %s", record)
            return
        _log.error("reporting %s of rank %d: %s", record.interruption.name, record.rank, record.summary)
        agreement = self._agreement(self._position.iteration)
        self._attempt(lambda: agreement.interrupt(record), "the fault is not reported")

    def _report_unresponsive(self, position: _Position, ranks: list[int]) -> None:
        """Sibling thread: other ranks have no heartbeat; report that, and leave the iteration on their behalf."""
        agreement = Agreement(self._store_of(position.iteration), position.iteration, position.world_size)
        summary = f"no heartbeat for {self.config.heartbeat_timeout_s:g} s"
        lost = partial(InterruptionRecord, fault_class=class_of(Symptoms("lost node", summary)))
        agreement.give_up([lost(rank, Interruption.UNRESPONSIVE, summary) for rank in ranks])

    def _check_left_behind(self, iteration: int) -> None:
        """Any thread: the others are in a later iteration than this; find out whether they go on without this rank."""
        with contextlib.suppress(RestartError):
            self._left_behind |= self._agreement(iteration).was_left_behind(self.config.initial_rank)

    def _stop_sibling(self) -> None:
        if self._sibling is not None:
            self._sibling.stop(self.config.barrier_timeout_s)
            self._sibling = None

    def _belongs_to_the_job(self) -> bool:
        """Whether this rank still has the store, and takes part in the present iteration. If not, it is ended.

        A rank that has lost the store ends itself; one that is stuck is ended here, some time later.
        """
        failure = getattr(self._store, "failure", None)
        if self._left_behind:
            self._read_messages()  # it announces that it leaves before the others can go on
            if self._leaving and failure is None:
                _log.info("the others went on without this rank, which leaves")
                self._left_behind = False
                self._stop_sibling()
        if failure is None and not self._left_behind:
            self._cut_off_since = None
            return True
        now = time.monotonic()
        if self._cut_off_since is None:
            _log.error("%s", failure or "the others went on without this rank")
            self._cut_off_since = now
        if self._left_behind or now - self._cut_off_since > self.config.heartbeat_timeout_s / 2:
            self.process.end(0.0 if self._left_behind else self.config.termination_grace_s)
            self._done = True
        return False

    # -- time limits ---------------------------------------------------------------------------------------------------

    def _note_suspension(self) -> None:
        """Let no limit pass because this process was suspended: the rank may go on some seconds later."""
        if missed_s := self._suspension.missed_s():
            self._limits.note_suspension(missed_s, time.monotonic())
            if self._sections is not None:
                self._sections.note_suspension(missed_s)
            if self._cut_off_since is not None:
                self._cut_off_since += missed_s

    def _pause_s(self) -> float:
        next_look_s = None if self._sections is None else self._sections.next_look_s
        deadlines = [at for at in (self._limits.next_deadline(), next_look_s) if at is not None]
        return max(0.0, min([self.config.interval_s, *(at - time.monotonic() for at in deadlines)]))

    def _check_limits(self) -> None:
        limit = self._limits.overrun(self._suspension.checked_s)
        position = self._position
        if limit is None or position is None or self._done:
            return
        silent = f"no progress for {self._limits.silent_s(time.monotonic()):.1f} s"
        if limit is Limit.SOFT:
            # A rank that still responds reports its stacks itself: it may not survive being asked for them.
            stacks = self._stacks() if self._is_unresponsive() else ""
            summary = f"{silent}, longer than soft_timeout={self.config.soft_timeout_s:g} s{_REMEDY}"
            self._record(InterruptionRecord(position.rank, Interruption.SOFT_TIMEOUT, summary, stacks))
            return
        agreement, initial_rank = self._agreement(position.iteration), self.config.initial_rank
        waits_for_others = self._attempt(lambda: agreement.is_at_end(initial_rank), "the rank's position is unknown")
        if waits_for_others and self._limits.stretch(self.config.barrier_timeout_s):
            _log.info("the rank waits at the iteration barrier; its hard limit is %g s", self.config.barrier_timeout_s)
            return
        summary = f"{silent}, longer than hard_timeout={self.config.hard_timeout_s:g} s{_REMEDY}"
        self._kill(position, summary, self._stacks())

    def _check_sections(self) -> None:
        """For a section that is late: restart all ranks; if it is still late after that, end this one."""
        sections, position = self._sections, self._position
        if sections is None or position is None or position.world_size is None:
            return  # no iteration has begun, as far as is known: an alarm would be lost
        alarm = sections.look(self._suspension.checked_s)
        if alarm is None:
            return
        others = _standings(self._sibling.notes_of_others() if self._sibling is not None else [])
        report = sections.report(alarm, self.process.pid, position.rank, self._stacks, others)[:DETAIL_CHARS]
        if alarm.action is AlarmAction.RESTART:
            self._record(InterruptionRecord(position.rank, Interruption.SOFT_TIMEOUT, alarm.summary, report))
        else:
            self._kill(position, alarm.summary, report)

    def _kill(self, position: _Position, summary: str, detail: str) -> None:
        agreement, initial_rank = self._agreement(position.iteration), self.config.initial_rank
        self._attempt(lambda: agreement.mark_departed(initial_rank), "the others do not know that the rank is killed")
        self._record(InterruptionRecord(position.rank, Interruption.HARD_TIMEOUT, summary, detail))
        _log.error("killing process %d of rank %d", self.process.pid, position.rank)
        if not self.process.end(self.config.termination_grace_s):
            _log.critical("process %d cannot be killed; the others go on without it", self.process.pid)
        self._handle_death()

    def _is_unresponsive(self) -> bool:
        """Whether not even the rank's watchdog thread sends messages: its GIL is held, or it is stopped."""
        return time.monotonic() - self._last_progress_at > self.config.soft_timeout_s / 2

    def _stacks(self) -> str:
        """Return the stacks of all threads of the rank; empty if it does not answer."""
        text = self.process.read_stacks(_STACKS_TIMEOUT_S)
        self._suspension.blocked()
        if text:
            _log.error("stacks of process %d:\n%s", self.process.pid, text)
        return text[:DETAIL_CHARS]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _handle_death(self) -> None:
        """Report the death and leave the iteration for the rank, unless the call was over or it has left itself."""
        end = describe_status(exit_status(self.process.pid, self.process.fileno()))  # first: its parent may reap it
        self._read_messages()  # its last ones
        position = self._position
        if self._done or self._reported or position is None or self._store is None:
            self._done = True
            return
        _log.error("process %d of rank %d has died", self.process.pid, position.rank)
        record = self._death(position.rank, end)
        self._attempt(
            lambda: depart(
                self._agreement,
                position.iteration,
                self.config.initial_rank,
                [record],
                self.config.barrier_timeout_s,
            ),
            "the death of the rank is not reported completely",
        )
        self._stop_sibling()
        self._done = True

    def _death(self, rank: int, end: str) -> InterruptionRecord:
        summary = f"process {self.process.pid} (initial rank {self.config.initial_rank}) died"
        evidence, oom = self._kernel.gather()
        fault_class = class_of(Symptoms("death", "\n".join(evidence), end=end, oom=oom))
        return InterruptionRecord(
            rank,
            Interruption.TERMINATED,
            f"{summary}: {end}" if end else summary,
            fault_class=fault_class,
            evidence=(f"host {os.uname().nodename}", *evidence),
        )

    def _attempt(self, act: Callable[[], object], otherwise: str) -> object:
        """Do something that needs the store; log if it fails, because the rank must be watched without a store, too."""
        try:
            return act()
        except StaleViewError as error:
            _log.error("%s: %s", otherwise, error)
            if self._position is not None:
                self._check_left_behind(self._position.iteration)
            return None
        except RestartError as error:
            _log.error("%s: %s", otherwise, error)
            return None
        finally:
            self._suspension.blocked()

    def _close(self) -> None:
        self._stop_sibling()
        if self._store is not None:
            self._store.close()
        self.channel.close()
        self.process.close()


def _standings(notes: Iterable[str]) -> list[Standing]:
    """Return the standings in the notes of other ranks, without those that are empty or invalid."""
    found = []
    for note in notes:
        with contextlib.suppress(ValueError):
            found.append(Standing.from_json(json.loads(note.partition(" ")[2])))
    return found
