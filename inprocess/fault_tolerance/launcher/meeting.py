"""What the launchers of one cycle tell each other, in the store of its rendezvous.

    cycle/<node>   the number of this cycle on the node: 0 if it is new, else one more than its last; the largest
                   counts; and the state of its links
    links/...      the times of transfers between nodes: see `network_check`
    begun          how many nodes have passed the checks: all, before others join
    words          how many of these two were announced:
      restart        workers of a node have failed: all nodes end theirs and meet again
      stop           the job is over, with this exit code
    replacements   how many processes were started in place of lost workers (policy "in-process")
    alive/<node>   incremented while the node's launcher runs (policy "in-process")
    left           how many nodes know that the job is over
    joined         the nodes that have joined since: see `node_table`
    ...            the workers of each node: see `node_table`

If several nodes announce the same word the first one counts, so all nodes read the same. Values are JSON.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inprocess.fault_tolerance.launcher.node_table import NodeTable

_POLL_S = 0.05
_AGREE_TIMEOUT_S = 60.0


class StoreLost(Exception):
    """The store of the rendezvous does not answer: the process that hosts it has ended."""


class MeetingError(Exception):
    """A node that has joined the rendezvous has left it; the others must meet again."""


@dataclass(frozen=True)
class LauncherExit:
    """How a launcher ends: exit code, a reason for the log, and its workers' failures (torch's, by rank) if they count.

    `ends_job`: no node goes on, so no node may join the rendezvous any more. `is_excluded`: the others go on without
    this node.
    """

    code: int
    reason: str
    failures: Mapping[int, Any] = field(default_factory=dict)
    ends_job: bool = False
    is_excluded: bool = False


@dataclass(frozen=True)
class Meeting:
    """The shared state of one cycle, seen by node `node` of `nodes`. Any thread. All methods but `leave`: StoreLost.

    With `grows`, nodes may join after the cycle has begun, as spares: they have larger numbers.
    """

    store: Any
    node: int
    nodes: int
    grows: bool = False

    @functools.cached_property
    def table(self) -> NodeTable:
        """The workers of all nodes."""
        return NodeTable(self._ask, self.node, self.nodes)

    @property
    def is_late(self) -> bool:
        """Whether this node has joined after the cycle had begun."""
        return self.node >= self.nodes

    @property
    def is_alone(self) -> bool:
        """Whether there is no other node, and never will be."""
        return self.nodes == 1 and not self.grows

    def agree_on_cycle(self, mine: int, workers: int, said: str = "") -> tuple[int, list[str]]:
        """Return the number of this cycle, the same on all nodes, and what each of the first nodes has `said`.

        Enters this node's `workers` in the table. Waits for the others, a minute at most. MeetingError if a node does
        not come, or has asked for a restart.
        """
        if not self.is_late:
            self.table.enter(workers)
        values = [json.loads(value) for value in self.gather("cycle", json.dumps([mine, said]))]
        if self.is_late:
            self.table.join(workers)
        return max(int(number) for number, _ in values), [str(text) for _, text in values]

    def gather(self, name: str, value: str, timeout_s: float = _AGREE_TIMEOUT_S) -> list[str]:
        """Return the values of all nodes under this name, by node, once each has called this. Each name once.

        Those of nodes that are late do not count. MeetingError if a node has not called this after `timeout_s`, or has
        asked for a restart.
        """
        if self.is_alone:
            return [value]
        if not self.is_late:
            self._ask("set", f"{name}/{self.node}", value)
        # After the value: a node that sees the count finds it.
        count = int(self._ask("add", f"{name}/count", 0 if self.is_late else 1))
        deadline = time.monotonic() + timeout_s
        while count < self.nodes:
            if self.has_words() or time.monotonic() > deadline:
                raise MeetingError("a node that has joined the rendezvous does not come")
            time.sleep(_POLL_S)
            count = int(self._ask("add", f"{name}/count", 0))
        return [found.decode() for found in self._ask("multi_get", [f"{name}/{node}" for node in range(self.nodes)])]

    def begin(self) -> None:
        """Let others join this cycle, once all first nodes have called this."""
        if self.grows and not self.is_late:
            self._ask("add", "begun", 1)

    def has_begun(self) -> bool:
        """Whether others may join this cycle. They would miss answers of nodes that check their links."""
        return int(self._ask("add", "begun", 0)) >= self.nodes

    def ask_restart(self, reason: str) -> None:
        """Ask all nodes to end their workers and meet again."""
        self._say("restart", {"reason": reason})

    def stop(self, outcome: LauncherExit) -> LauncherExit:
        """End the job. Returns the exit that counts: this one, or that of the first node that ended the job."""
        self._say("stop", {"code": outcome.code, "reason": outcome.reason})
        return self.stopped() or replace(outcome, ends_job=True)

    def has_words(self) -> bool:
        """Whether a node has announced a restart or the end. One round trip."""
        return not self.is_alone and int(self._ask("add", "words", 0)) > 0

    def restart_reason(self) -> str | None:
        """Return the reason of the restart; None if no node has asked for one."""
        said = self._said("restart")
        return None if said is None else str(said["reason"])

    def stopped(self) -> LauncherExit | None:
        """Return how the job ends; None if it goes on."""
        said = self._said("stop")
        return None if said is None else LauncherExit(int(said["code"]), str(said["reason"]), ends_job=True)

    def report_done(self) -> None:
        """Report that the workers of this node have ended with 0, all that are not lost."""
        if not self.is_alone:
            self.table.report(replace(self.table.own, is_done=True))

    def all_done(self) -> bool:
        """Whether the workers of all nodes have ended with 0."""
        return self.is_alone or self.table.all_over()

    def number_replacement(self) -> int:
        """Return the number of a replacement worker: 0 for the first of all nodes, then 1, ..."""
        return int(self._ask("add", "replacements", 1)) - 1

    def say_alive(self) -> None:
        """Increment this node's count for `alive`."""
        self._ask("add", f"alive/{self.node}", 1)

    def alive(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return the counts of these nodes. A round trip per node."""
        return {node: int(self._ask("add", f"alive/{node}", 0)) for node in nodes}

    def leave(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until all nodes know of the end: this process may host the store."""
        if self.is_alone:
            return
        deadline = time.monotonic() + timeout_s
        try:
            count = int(self._ask("add", "left", 1))
            while count < self.table.answering() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                count = int(self._ask("add", "left", 0))
        except StoreLost:
            return  # its host has left first

    def _say(self, word: str, value: dict[str, Any]) -> None:
        self._ask("compare_set", word, "", json.dumps(value))
        self._ask("add", "words", 1)  # after the word: a node that sees the count finds the word

    def _said(self, word: str) -> dict[str, Any] | None:
        if not self._ask("check", [word]):
            return None
        value: dict[str, Any] = json.loads(self._ask("get", word))
        return value

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.store, method)(*args)
        except RuntimeError as error:  # torch's errors of stores and the network
            raise StoreLost(str(error)) from error
