"""What the launchers of one cycle tell each other, in the store of its rendezvous.

    cycle/<node>   which cycle the node takes it for: 0 if it is new, else one more than its last; the largest counts
    words          how many of these two were said:
      restart        workers of a node have failed: all end theirs and meet again
      stop           the job is over, with this exit code
    done           how many nodes' workers have ended well
    lost           how many workers have failed and were left behind, less those replaced (policy "in-process")
    replacements   how many processes were started in the place of workers that were lost (policy "in-process")
    alive/<node>   counts up for as long as the node's launcher lives (policy "in-process")
    over/<node>    not 0: the node is among those that are done, by itself or because it does not answer
    left           how many nodes know that it is over

Of several nodes that say the same word, the first counts, so all read the same. Values are JSON.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

from inprocess.fault_tolerance.launcher.outcome import Outcome

__all__ = ["Meeting", "MeetingError", "StoreLost"]

_POLL_S = 0.05
_AGREE_TIMEOUT_S = 60.0


class StoreLost(Exception):
    """The store of the rendezvous does not answer: its host has ended."""


class MeetingError(Exception):
    """A node that has joined the rendezvous is not in it any more; the others have to meet again."""


@dataclass(frozen=True)
class Meeting:
    """One cycle's, as the node with number `node` of `nodes` sees it. Any thread; `StoreLost` from all but `leave`."""

    store: Any
    node: int
    nodes: int

    def agree_on_cycle(self, mine: int) -> int:
        """Return the number of this cycle, the same on all nodes.

        Waits for them, a minute at most, and not if a node wants to meet again: MeetingError.
        """
        if self.nodes == 1:
            return mine
        keys = [f"cycle/{node}" for node in range(self.nodes)]
        self._ask("set", f"cycle/{self.node}", json.dumps(mine))
        deadline = time.monotonic() + _AGREE_TIMEOUT_S
        while not self._ask("check", keys):
            if self.has_words() or time.monotonic() > deadline:
                raise MeetingError("a node that has joined the rendezvous does not come")
            time.sleep(_POLL_S)
        return max(int(json.loads(self._ask("get", key))) for key in keys)

    def ask_restart(self, reason: str) -> None:
        """Have all nodes end their workers and meet again."""
        self._say("restart", {"reason": reason})

    def stop(self, outcome: Outcome) -> Outcome:
        """End the job. Returns what counts: this outcome, or that of the node that was first."""
        self._say("stop", {"code": outcome.code, "reason": outcome.reason})
        return self.stopped() or replace(outcome, ends_job=True)

    def has_words(self) -> bool:
        """Whether anybody has asked for a restart or the end. One round trip."""
        return self.nodes > 1 and int(self._ask("add", "words", 0)) > 0

    def restart_reason(self) -> str | None:
        """Return why all meet again; None if nobody has asked."""
        said = self._said("restart")
        return None if said is None else str(said["reason"])

    def stopped(self) -> Outcome | None:
        """Return how the job ends; None if it goes on."""
        said = self._said("stop")
        return None if said is None else Outcome(int(said["code"]), str(said["reason"]), ends_job=True)

    def report_done(self) -> None:
        """The workers of this node have ended well. Once per node."""
        if self.nodes > 1:
            self._count_done(self.node)

    def all_done(self) -> bool:
        """Whether the workers of all nodes have ended well."""
        return self.nodes == 1 or int(self._ask("add", "done", 0)) >= self.nodes

    def report_lost(self, count: int) -> int:
        """So many workers more have failed and are left behind. Returns how many that are, of all nodes."""
        return int(self._ask("add", "lost", count))

    def number_replacement(self) -> int:
        """Return a number for a process that replaces a worker: 0 for the first of all nodes, then 1, ..."""
        return int(self._ask("add", "replacements", 1)) - 1

    def say_alive(self) -> None:
        """Count up for `alive`."""
        self._ask("add", f"alive/{self.node}", 1)

    def alive(self) -> dict[int, int]:
        """Return the counts of the other nodes that are not done. One round trip for each node."""
        others = [node for node in range(self.nodes) if node != self.node]
        waiting = [node for node in others if int(self._ask("add", f"over/{node}", 0)) == 0]
        return {node: int(self._ask("add", f"alive/{node}", 0)) for node in waiting}

    def give_up(self, node: int) -> bool:
        """Take a node for done that does not answer. False if another node was first, or it has ended well."""
        return self._count_done(node)

    def _count_done(self, node: int) -> bool:
        if int(self._ask("add", f"over/{node}", 1)) > 1:
            return False
        self._ask("add", "done", 1)
        return True

    def leave(self, timeout_s: float) -> None:
        """Wait until all nodes have come to the end, or for `timeout_s`: this one may be the host of the store."""
        if self.nodes == 1:
            return
        deadline = time.monotonic() + timeout_s
        try:
            count = int(self._ask("add", "left", 1))
            while count < self.nodes and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                count = int(self._ask("add", "left", 0))
        except StoreLost:
            return  # others were faster

    def _say(self, word: str, value: dict[str, Any]) -> None:
        self._ask("compare_set", word, "", json.dumps(value))
        self._ask("add", "words", 1)  # after the word: whoever sees the count finds it

    def _said(self, word: str) -> dict[str, Any] | None:
        if not self._ask("check", [word]):
            return None
        value: dict[str, Any] = json.loads(self._ask("get", word))
        return value

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.store, method)(*args)
        except RuntimeError as error:  # torch's errors of stores and of the network
            raise StoreLost(str(error)) from error
