"""The monitor process of one rank: it watches the rank from outside, ends it when it hangs, and speaks for it when it
is dead.

    one thread      Daemon.run: messages of the rank, its death, its time limits; talks to the store
    per iteration   SiblingMonitor: heartbeats

It is a process of its own, started from scratch: no torch, no CUDA context, no lock and no socket of the rank is in it.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from inprocess.agreement import Agreement, IterationStore, depart
from inprocess.attribution import DETAIL_CHARS, Interruption, InterruptionRecord
from inprocess.exception import RestartError, StaleViewError
from inprocess.main_thread.stacks import read_stacks
from inprocess.monitor_process import messages
from inprocess.monitor_process.limits import Limit, ProgressLimits
from inprocess.monitor_process.messages import Message, MonitorChannel
from inprocess.monitor_process.sibling import SiblingMonitor
from inprocess.monitor_process.stores import iteration_store, open_store
from inprocess.monitor_process.target import Target
from inprocess.progress_watchdog import Timestamp
from inprocess.sections.embedded import AlarmAction, EmbeddedSections

__all__ = ["Daemon"]

_log = logging.getLogger(__name__)
_STACKS_TIMEOUT_S = 2.0  # of a machine that is busy; a process that cannot answer at all costs no time


@dataclass
class _Position:
    """Where the rank is, as far as its monitor knows."""

    rank: int
    world_size: int | None
    iteration: int


@dataclass
class Daemon:
    """The loop of a monitor process."""

    config: messages.Configure
    channel: MonitorChannel
    target: Target
    stacks_fd: int | None = None
    _store: Any = None
    _position: _Position | None = None
    _sibling: SiblingMonitor | None = None
    _leaving: bool = False
    _done: bool = False
    _heard_at: float = 0.0
    _left_behind: bool = False
    _cut_off_since: float | None = None
    _limits: ProgressLimits = field(init=False)
    _sections: EmbeddedSections = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self._limits = ProgressLimits(config.soft_timeout_s, config.hard_timeout_s)
        grace_s = config.hard_timeout_s - config.soft_timeout_s
        self._sections = EmbeddedSections(config.sections_fd, grace_s, config.soft_timeout_s / 2, self._limits.silent_s)

    def run(self) -> None:
        """Watch until the rank says that the call is over, or is dead and spoken for."""
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.target, select.POLLIN)
        with ExitStack() as stack:
            stack.callback(self._close)
            channel_open = True
            while not self._done:
                ready = dict(poll.poll(self._pause_s() * 1000))
                if channel_open and self.channel.fileno() in ready and not self._read_messages():
                    poll.unregister(self.channel)  # the death of the rank will follow, if it is not only its channel
                    channel_open = False
                if self.target.fileno() in ready and not self._done:
                    self._target_died()
                elif self._belongs_to_the_job():
                    self._check_sections()
                    self._check_limits()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _read_messages(self) -> bool:
        """Handle all messages there are. False if there will be no more."""
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
                self._heard_at = time.monotonic()
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
            case messages.Leaving():
                self._leaving = True
            case messages.Terminate():
                self._done = True
            case _:
                _log.error("a %s is not for a monitor process", type(message).__name__)

    def _connect(self, description: dict[str, Any], iteration: int) -> None:
        if self._store is not None:
            self._store.close()
        self._store = open_store(description, self.config.heartbeat_timeout_s)
        if self._position is None:  # from here on the others count on this rank
            self._position = _Position(self.config.initial_rank, None, iteration)
            self._limits.start(time.monotonic())

    def _begin(self, position: _Position) -> None:
        self._stop_sibling()
        self._position = position
        assert position.world_size is not None
        self._limits.start(time.monotonic())
        self._sibling = SiblingMonitor(
            self._store_of(position.iteration),
            position.rank,
            position.world_size,
            interval_s=self.config.heartbeat_interval_s,
            timeout_s=self.config.heartbeat_timeout_s,
            report=lambda ranks: self._report_unresponsive(position, ranks),
            note=lambda: self._sections.note(position.rank),
            stale=lambda: self._look_if_left_behind(position.iteration),
        )
        self._sibling.start()

    # -- the store -----------------------------------------------------------------------------------------------------

    def _store_of(self, iteration: int) -> IterationStore:
        return iteration_store(self._store, iteration)

    def _agreement(self, iteration: int) -> Agreement:
        known = self._position is not None and self._position.iteration == iteration
        world_size = self._position.world_size if known and self._position is not None else None
        return Agreement(self._store_of(iteration), iteration, world_size)

    def _record(self, record: InterruptionRecord) -> None:
        """Report a fault of this rank, or of another one."""
        if self._position is None or self._store is None:
            _log.error("a fault before the first iteration cannot be reported: %s", record)
            return
        _log.error("reporting %s of rank %d: %s", record.interruption.name, record.rank, record.summary)
        agreement = self._agreement(self._position.iteration)
        self._attempt(lambda: agreement.interrupt(record), "the fault is not reported")

    def _report_unresponsive(self, position: _Position, ranks: list[int]) -> None:
        """Sibling thread: other ranks are silent; leave the iteration on their behalf."""
        agreement = Agreement(self._store_of(position.iteration), position.iteration, position.world_size)
        for rank in ranks:
            summary = f"no heartbeat for {self.config.heartbeat_timeout_s:g} s"
            if not agreement.interrupt(InterruptionRecord(rank, Interruption.UNRESPONSIVE, summary)):
                return
        identities = [agreement.identity_of(rank) for rank in ranks]
        for identity in identities:  # all of them, before one of them could complete the barrier
            agreement.mark_gone(identity)
        for identity in identities:
            agreement.arrive_at_end(identity)

    def _look_if_left_behind(self, iteration: int) -> None:
        """Any thread: the others are in a later iteration than this one. Did they go on without this rank?"""
        with contextlib.suppress(RestartError):
            self._left_behind |= self._agreement(iteration).was_left_behind(self.config.initial_rank)

    def _stop_sibling(self) -> None:
        if self._sibling is not None:
            self._sibling.stop(self.config.barrier_timeout_s)
            self._sibling = None

    def _belongs_to_the_job(self) -> bool:
        """Whether this rank still has the store, and is up with the others. If not, it is ended.

        A rank that is cut off ends itself; one that is stuck is ended here, some time later.
        """
        failure = getattr(self._store, "failure", None)
        if failure is None and not self._left_behind:
            self._cut_off_since = None
            return True
        now = time.monotonic()
        if self._cut_off_since is None:
            _log.error("%s", failure or "the others went on without this rank")
            self._cut_off_since = now
        if self._left_behind or now - self._cut_off_since > self.config.heartbeat_timeout_s / 2:
            self.target.kill(0.0 if self._left_behind else self.config.termination_grace_s)
            self._done = True
        return False

    # -- time limits ---------------------------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        deadlines = [at for at in (self._limits.next_deadline(), self._sections.next_look_s) if at is not None]
        return max(0.0, min([self.config.interval_s, *(at - time.monotonic() for at in deadlines)]))

    def _check_limits(self) -> None:
        limit = self._limits.overrun(time.monotonic())
        position = self._position
        if limit is None or position is None or self._done:
            return
        silent = f"no progress for {self._limits.silent_s(time.monotonic()):.1f} s"
        if limit is Limit.SOFT:
            # A rank that can still say something reports its stacks itself: to be asked can be its end.
            stacks = self._stacks() if self._is_mute() else ""
            self._record(InterruptionRecord(position.rank, Interruption.SOFT_TIMEOUT, silent, stacks))
            return
        agreement, initial_rank = self._agreement(position.iteration), self.config.initial_rank
        waits_for_others = self._attempt(lambda: agreement.is_at_end(initial_rank), "where the rank is, is not known")
        if waits_for_others and self._limits.stretch(self.config.barrier_timeout_s):
            _log.info("the rank stands at the iteration barrier; its hard limit is %g s", self.config.barrier_timeout_s)
            return
        self._kill(position, silent, self._stacks())

    def _check_sections(self) -> None:
        """The ladder of a section that is late: restart all ranks, then end this one."""
        alarm, position = self._sections.look(), self._position
        if alarm is None or position is None:
            return
        notes = self._sibling.notes_of_others() if self._sibling is not None else []
        report = self._sections.report(alarm, self.target.pid, position.rank, self._stacks, notes)[:DETAIL_CHARS]
        if alarm.action is AlarmAction.RESTART:
            self._record(InterruptionRecord(position.rank, Interruption.SOFT_TIMEOUT, alarm.summary, report))
        else:
            self._kill(position, alarm.summary, report)

    def _kill(self, position: _Position, summary: str, detail: str) -> None:
        agreement, initial_rank = self._agreement(position.iteration), self.config.initial_rank
        self._attempt(lambda: agreement.mark_gone(initial_rank), "the rank is killed without a word")
        self._record(InterruptionRecord(position.rank, Interruption.HARD_TIMEOUT, summary, detail))
        _log.error("killing process %d of rank %d", self.target.pid, position.rank)
        if not self.target.kill(self.config.termination_grace_s):
            _log.critical("process %d cannot be killed; the others go on without it", self.target.pid)
        self._target_died()

    def _is_mute(self) -> bool:
        """Whether not even the watchdog thread of the rank says something: its GIL is held, or it is stopped."""
        return time.monotonic() - self._heard_at > self.config.soft_timeout_s / 2

    def _stacks(self) -> str:
        """Return the stacks of all threads of the rank; empty if it does not answer."""
        if self.config.stack_signal is None or self.stacks_fd is None:
            return ""
        text = read_stacks(self.target.pid, self.config.stack_signal, self.stacks_fd, _STACKS_TIMEOUT_S)
        if text:
            _log.error("stacks of process %d:\n%s", self.target.pid, text)
        return text[:DETAIL_CHARS]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _target_died(self) -> None:
        """Speak for the dead rank, unless the call was over, or the rank left by itself."""
        self._read_messages()  # what it said last
        position = self._position
        if self._done or self._leaving or position is None or self._store is None:
            self._done = True
            return
        _log.error("process %d of rank %d has died", self.target.pid, position.rank)
        summary = f"process {self.target.pid} (initial rank {self.config.initial_rank}) died"
        record = InterruptionRecord(position.rank, Interruption.TERMINATED, summary)
        self._attempt(
            lambda: depart(
                self._agreement,
                position.iteration,
                self.config.initial_rank,
                [record],
                self.config.barrier_timeout_s,
            ),
            "the rank could not be spoken for to the end",
        )
        self._stop_sibling()
        self._done = True

    def _attempt(self, act: Callable[[], object], otherwise: str) -> object:
        """Do something at the store; without a store the rank must be watched all the same."""
        try:
            return act()
        except StaleViewError as error:
            _log.error("%s: %s", otherwise, error)
            if self._position is not None:
                self._look_if_left_behind(self._position.iteration)
            return None
        except RestartError as error:
            _log.error("%s: %s", otherwise, error)
            return None

    def _close(self) -> None:
        self._stop_sibling()
        if self._store is not None:
            self._store.close()
        self.channel.close()
        self.target.close()
