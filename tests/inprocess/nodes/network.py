"""A network of nodes: a network namespace per node, and one with a bridge that joins them.

    namespace of node i        namespace of the switch
    ┌──────────────────┐      ┌────────────────────────────────────────────────────┐
    │ eth0 10.77.0.i+1 ├─veth─┤ p<i> ──▶ bridge, rules of nftables on what it      │
    └──────────────────┘      │          forwards: loss, one direction, everything │
                              │ p<i> ──▶ delay process ──▶ q<i>, veth, r<i> ──▶    │
                              │          bridge: while packets of node i are late  │
                              └────────────────────────────────────────────────────┘

Nothing is in the namespace of the tests, so all laboratories use the same addresses and device names. What is lost is
lost silently, as by a switch without power: no process sees its connection closed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.inprocess.nodes.names import namespace_path

_COMMAND_TIMEOUT_S = 20.0
_READY_S = 10.0
_DELAY = Path(__file__).with_name("delay.py")
_BURST = "16kb"  # more than one packet, less than what a TCP connection begins with
_QUEUE = "400ms"


@dataclass(frozen=True)
class _Link:
    """What happens to the packets of a node at the switch."""

    drops_to: bool = False
    drops_from: bool = False
    only_port: int | None = None
    loss_percent: float = 0.0


class Network:
    """`nodes` nodes named ``<prefix>-n<i>``. A context manager. One thread at a time.

    `addresses[i]` is that of node i, on its device `device`. RuntimeError, with the words of the tool, if a command
    fails.
    """

    device = "eth0"

    def __init__(self, prefix: str, nodes: int) -> None:
        self.addresses = [f"10.77.0.{node + 1}" for node in range(nodes)]
        self._switch = f"{prefix}-sw"
        self._nodes = [f"{prefix}-n{node}" for node in range(nodes)]
        self._links = [_Link() for _ in range(nodes)]
        self._apart: set[tuple[int, int]] = set()
        self._delays: dict[int, subprocess.Popen[bytes]] = {}
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def namespace(self, node: int) -> Path:
        """Return the file by which the namespace of a node is entered."""
        return namespace_path(self._nodes[node])

    # -- faults --------------------------------------------------------------------------------------------------------

    def cut(self, node: int) -> None:
        """Lose all packets from and to a node."""
        self._set(node, replace(self._links[node], drops_to=True, drops_from=True))

    def cut_but(self, node: int, port: int) -> None:
        """Lose all packets of TCP from and to a node, but for connections to this port of any node."""
        self._set(node, replace(self._links[node], only_port=port))

    def lose_to(self, node: int) -> None:
        """Lose all packets to a node; those from it arrive."""
        self._set(node, replace(self._links[node], drops_to=True))

    def lose_from(self, node: int) -> None:
        """Lose all packets from a node; those to it arrive."""
        self._set(node, replace(self._links[node], drops_from=True))

    def lose(self, node: int, percent: float) -> None:
        """Lose each packet from or to a node with this probability."""
        self._set(node, replace(self._links[node], loss_percent=percent))

    def cut_between(self, one: int, other: int) -> None:
        """Lose all packets between two nodes; others still reach both."""
        self._apart |= {(one, other), (other, one)}
        self._apply_rules()

    def slow(self, node: int, kilobits: int) -> None:
        """Limit what a node sends and what it receives, in kilobits per second each."""
        limit = ["root", "tbf", "rate", f"{kilobits}kbit", "burst", _BURST, "latency", _QUEUE]
        for namespace, device in self._ends(node):
            run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, *limit])

    def delay(self, node: int, seconds: float) -> None:
        """Deliver packets from and to a node later by this time, none lost, none overtaken."""
        self._undelay(node)
        self._commands(
            self._switch,
            [
                f"link set p{node} nomaster",
                f"link add q{node} type veth peer name r{node}",
                f"link set r{node} master br0 up",
                f"link set q{node} up",
            ],
        )
        command = ["ip", "netns", "exec", self._switch, sys.executable, "-I", "-S", str(_DELAY)]
        process = subprocess.Popen(
            [*command, f"p{node}", f"q{node}", str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._delays[node] = process
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the delay process of node {node} did not start: exit code {process.wait(_READY_S)}")

    def heal(self, node: int) -> None:
        """End all faults of a node's link."""
        self._apart = {pair for pair in self._apart if node not in pair}
        self._set(node, _Link())
        for namespace, device in self._ends(node):
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
        self._undelay(node)

    def replace_node(self, node: int) -> None:
        """Give a node whose processes have ended a new namespace, in which the kernel has no connections."""
        self._undelay(node)
        self._commands(self._switch, [f"link del p{node}"])
        run(["ip", "netns", "del", self._nodes[node]])
        self._make_node(node)

    # -- making and removing -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove everything. Idempotent."""
        for node in list(self._delays):
            self._undelay(node)
        for name in [*self._nodes, self._switch]:
            if namespace_path(name).exists():
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        run(["ip", "netns", "add", self._switch])
        self._commands(self._switch, ["link add br0 type bridge", "link set br0 up", "link set lo up"])
        for node in range(len(self._nodes)):
            self._make_node(node)
        self._apply_rules()

    def _make_node(self, node: int) -> None:
        name = self._nodes[node]
        run(["ip", "netns", "add", name])
        peer = f"name {self.device} address 02:00:00:00:00:{node + 1:02x} netns {name}"
        commands = [f"link add p{node} type veth peer {peer}", f"link set p{node} master br0 up"]
        self._commands(self._switch, commands)
        address = f"addr add {self.addresses[node]}/24 dev {self.device}"
        self._commands(name, ["link set lo up", address, f"link set {self.device} up"])

    def _set(self, node: int, link: _Link) -> None:
        self._links[node] = link
        self._apply_rules()

    def _apply_rules(self) -> None:
        """Replace all rules at once."""
        text = (
            "add table bridge lab\n"
            "add chain bridge lab forward { type filter hook forward priority 0; policy accept; }\n"
            "flush table bridge lab\n" + "".join(f"add rule bridge lab forward {rule}\n" for rule in self._rules())
        )
        run(["ip", "netns", "exec", self._switch, "nft", "-f", "-"], text)

    def _rules(self) -> Iterable[str]:
        for node, link in enumerate(self._links):
            if link.drops_from:
                yield f"iifname {_ports(node)} drop"
            if link.drops_to:
                yield f"oifname {_ports(node)} drop"
            if link.only_port is not None:
                for way in ("iifname", "oifname"):
                    # Not as one rule: nft makes `!=` of both ports one comparison, which is true if either differs.
                    yield f"{way} {_ports(node)} tcp dport {link.only_port} accept"
                    yield f"{way} {_ports(node)} tcp sport {link.only_port} accept"
                    yield f"{way} {_ports(node)} meta l4proto tcp drop"
            if link.loss_percent:
                lost = f"numgen random mod 10000 < {round(100 * link.loss_percent)} drop"
                yield from (f"iifname {_ports(node)} {lost}", f"oifname {_ports(node)} {lost}")
        for one, other in sorted(self._apart):
            yield f"iifname {_ports(one)} oifname {_ports(other)} drop"

    def _ends(self, node: int) -> list[tuple[str, str]]:
        return [(self._switch, f"p{node}"), (self._nodes[node], self.device)]

    def _undelay(self, node: int) -> None:
        process = self._delays.pop(node, None)
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        with contextlib.suppress(RuntimeError):  # the namespace may be going
            self._commands(self._switch, [f"link del q{node}", f"link set p{node} master br0"])

    def _commands(self, namespace: str, commands: Sequence[str]) -> None:
        run(["ip", "-n", namespace, "-batch", "-"], "".join(f"{command}\n" for command in commands))


def _ports(node: int) -> str:
    """The ports of the bridge by which a node is reached, with and without delay."""
    return f'{{ "p{node}", "r{node}" }}'


def run(command: Sequence[str], text: str = "") -> None:
    """Run a command with `text` as input. RuntimeError, with what it wrote, if it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr}\n{text}")
