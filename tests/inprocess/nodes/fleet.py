"""A fleet on one machine: nodes of a laboratory with a `ckpt_launcher` each; so many train, the others are spares.

    fleet = Fleet(lab, 3, "--ft-preload=torch")
    fleet.hold(12, node=1)
    fleet.start_all()
    fleet.wait("reaches 12", fleet.training)
    lab.power_off(1)
    assert fleet.wait_exits([0, 2, 3, 4]) == [0, 0, 0, 0]

Workers run `fleet_training`. Node 0 hosts the store of the rendezvous.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.inprocess.nodes.job import Job
from tests.inprocess.nodes.lab import Lab
from tests.support.template import quick_python

LIMIT_S = 150.0
_LAUNCH = "tests.inprocess.nodes.fleet_launcher:launch"
_PROGRAM = Path(__file__).with_name("fleet_training.py")
REPOSITORY = Path(__file__).resolve().parents[3]
_PORT = 29400
_POLL_S = 0.05


@dataclass(frozen=True)
class Said:
    """A line of a rank: in which cycle of the launcher, on which node, and what it says."""

    cycle: int
    rank: int
    node: str
    what: str


class Fleet:
    """The launchers of a laboratory's nodes, of which so many train. One thread.

    `options` are more of the launcher, `env` variables of all nodes, `env_of` those of single ones. A node that is
    silent for `silence_s` is lost.
    """

    def __init__(
        self,
        lab: Lab,
        training: int,
        *options: str,
        env: Mapping[str, str] | None = None,
        env_of: Mapping[int, Mapping[str, str]] | None = None,
        silence_s: int = 8,
    ) -> None:
        self.lab = lab
        self._env = env or {}
        self._env_of = env_of or {}
        self.folder = lab.folder
        self.published = self.folder / "health"
        self.training, self.spares = list(lab.nodes)[:training], list(lab.nodes)[training:]
        self._launchers: dict[int, Job] = {}
        self._options = [
            f"--nnodes={training}:{len(lab.nodes)}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={lab.network.addresses[0]}:{_PORT}",
            "--rdzv-id=fleet",
            "--max-restarts=3",
            "--monitor-interval=0.1",
            f"--ft-node-health-publish-dir={self.published}",
            f"--log-dir={self.folder / 'logs'}",
            *options,
        ]
        self._conf = f"keep_alive_interval=1,keep_alive_max_attempt={silence_s}"

    def start(self, node: int) -> None:
        """Start the launcher of a node."""
        own = [
            f"--rdzv-conf=is_host={'true' if node == 0 else 'false'},{self._conf}",
            f"--local-addr={self.lab.network.addresses[node]}",
        ]
        program = [str(_PROGRAM), str(self.folder), str(LIMIT_S)]
        env = {"PYTHON_EXEC": quick_python(), "PYTHONPATH": str(REPOSITORY), **self._env, **self._env_of.get(node, {})}
        self._launchers[node] = self.lab.start(_LAUNCH, [[*self._options, *own, *program]], nodes=[node], env=env)

    def start_all(self) -> None:
        """Start the nodes that are to train, and when they do the others: they wait as spares then."""
        for node in self.training:
            self.start(node)
        self.wait("from", self.training)
        for node in self.spares:
            self.start(node)
        for node in self.spares:
            self.wait_log(node, "this node waits as a spare")

    # -- what happens --------------------------------------------------------------------------------------------------

    def hold(self, step: int, node: int) -> None:
        """Let the rank of this node wait before a step, until `release`; its saves are published by then."""
        (self.folder / f"hold.{step}").write_text(f"node{node}")

    def release(self, step: int) -> None:
        """Let it go on."""
        (self.folder / f"hold.{step}").unlink()

    def disk(self, node: int, path: Path) -> Path:
        """Return the path by which this process finds the disk of a node."""
        return Path(f"/proc/{self._launchers[node].pids[0]}/root{path}")

    # -- what is seen --------------------------------------------------------------------------------------------------

    def said(self) -> list[Said]:
        """Return all that ranks have said so far."""
        file = self.folder / "events"
        lines = file.read_text().splitlines() if file.exists() else []
        found = (re.fullmatch(r"cycle (\d+) rank (\d+) (\w+) (.*)", line) for line in lines)
        return [Said(int(match[1]), int(match[2]), match[3], match[4]) for match in found if match]

    def wait(self, what: str, nodes: Iterable[int], cycle: int = 0) -> None:
        """Wait until the ranks of these nodes have said something that begins so, in this cycle."""
        wanted = {f"node{node}" for node in nodes}
        deadline = time.monotonic() + LIMIT_S
        while wanted - {each.node for each in self.said() if each.cycle == cycle and each.what.startswith(what)}:
            assert time.monotonic() < deadline, f"no {what!r} on all of {wanted}\n{self.describe()}"
            time.sleep(_POLL_S)

    def log(self, node: int) -> str:
        """Return the log of a launcher."""
        file = self._launchers[node].folder / "0.output"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_log(self, node: int, pattern: str) -> None:
        """Wait until this is in the log of a launcher."""
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.log(node)):
            assert time.monotonic() < deadline, f"{pattern!r} is not in the log of node {node}\n{self.describe()}"
            time.sleep(_POLL_S)

    def wait_exits(self, nodes: Sequence[int]) -> list[int]:
        """Return the exit codes of these launchers."""
        for node in nodes:
            assert self._launchers[node].wait_exits([0], LIMIT_S), f"node {node} goes on\n{self.describe()}"
        return [self._launchers[node].exits[0].code for node in nodes]

    def seats(self, cycle: int) -> list[str]:
        """Return the nodes that have trained in a cycle, by rank."""
        return [node for _, node in sorted({(each.rank, each.node) for each in self.said() if each.cycle == cycle})]

    def left(self) -> dict[int, list[int]]:
        """Return processes of launchers that have ended, by node."""
        return {node: pids for node, job in self._launchers.items() if 0 in job.exits and (pids := job.processes_of(0))}

    def describe(self) -> str:
        """Return all that is known."""
        said = "\n".join(map(str, self.said()))
        return "\n".join([*(f"==== node {node}\n{job.describe()}" for node, job in self._launchers.items()), said])


def losses(fleet: Fleet) -> dict[int, str]:
    """Return the loss of each step, to the bit; AssertionError if ranks or repetitions of a step differ."""
    found: dict[int, set[str]] = {}
    for each in fleet.said():
        if match := re.fullmatch(r"step (\d+) loss (\S+)", each.what):
            found.setdefault(int(match[1]), set()).add(match[2])
    assert all(len(values) == 1 for values in found.values()), found
    return {step: values.pop() for step, values in sorted(found.items())}


def weights(fleet: Fleet) -> list[str]:
    """Return the digest of the weights of each rank at the end, and of what only it has, by rank."""
    last = {each.rank: each.what for each in fleet.said() if each.what.startswith("weights")}
    return [last[rank] for rank in sorted(last)]
