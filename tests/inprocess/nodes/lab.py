"""A laboratory of nodes on one machine: each has its own network, processes and names; the file system is shared.

    with Lab(nursery, folder, nodes=3) as lab:
        job = lab.start("tests.inprocess.nodes.program:train", [options], ranks_per_node=2)
        lab.cut(2)
        ...
        lab.heal(2)

A node is a network namespace, a control group, a host name, and a boot id, which programs compare to learn whether a
process id of another host is meaningful. Needs root. What a killed test process has left is removed by the next
laboratory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.inprocess.faults.nursery import Nursery
from tests.inprocess.nodes import cgroups
from tests.inprocess.nodes.cgroups import Group
from tests.inprocess.nodes.job import Job, RankStart
from tests.inprocess.nodes.names import fresh_prefix, remove_stale
from tests.inprocess.nodes.network import Network
from tests.inprocess.nodes.place import Place
from tests.inprocess.nodes.rank import PLACE

_MASTER_PORT = 29500
_TOOLS = ("ip", "nft", "tc")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def why_not() -> str | None:
    """Return why no laboratory can be made here; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (packages iproute2 and nftables)"
    try:
        with Network(fresh_prefix(), 1) as network:
            network.lose(0, 1.0)
            network.slow(0, 1000)
        Group(cgroups.mount_point() / fresh_prefix()).make().remove()
    except (OSError, RuntimeError) as error:
        return f"no network namespaces, nftables, tbf or control groups here: {error}"
    return None


class Lab:
    """`nodes` nodes with what their jobs write below `folder`. A context manager: nothing survives. One thread."""

    def __init__(self, nursery: Nursery, folder: Path, nodes: int) -> None:
        remove_stale()
        self.folder = folder
        self.disks: dict[int, tuple[Path, int]] = {}  # by node: a disk at this path, with so many bytes, empty
        self.nodes = range(nodes)
        self.jobs: list[Job] = []
        self._etcd: list[subprocess.Popen[bytes]] = []
        self._nursery = nursery
        self._prefix = fresh_prefix()
        self._group = Group(cgroups.mount_point() / self._prefix).make()
        try:
            self.network = Network(self._prefix, nodes)
        except BaseException:
            self._group.remove()
            raise
        for node in self.nodes:
            self._write_files(node)

    def start(
        self,
        program: str,
        arguments: Sequence[object] = (),
        *,
        ranks_per_node: int = 1,
        nodes: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Start `program` ("module:function", see `rank.live`), with the environment that srun would set.

        On these nodes, or on all. Ranks are numbered node by node; the first rank is on the first of them.
        """
        folder = self.folder / f"job{len(self.jobs)}"
        folder.mkdir()
        where = self.nodes if nodes is None else nodes
        world_size = len(where) * ranks_per_node
        common = {
            "MASTER_ADDR": self.network.addresses[where[0]],
            "MASTER_PORT": str(_MASTER_PORT),
            "WORLD_SIZE": str(world_size),
            "GLOO_SOCKET_IFNAME": self.network.device,
            **(env or {}),
        }
        starts = {}
        for rank in range(world_size):
            index, local_rank = divmod(rank, ranks_per_node)
            node = where[index]
            group = self._node_group(node).child(f"job{len(self.jobs)}-rank{rank}")
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "TMPDIR": str(self._node_folder(node)),
                PLACE: json.dumps(asdict(self._place(node, group))),
            }
            starts[rank] = RankStart(node, {**common, **own}, group)
        job = Job(self._nursery, folder, program, list(arguments), starts)
        self.jobs.append(job)
        return job

    def start_etcd(self) -> list[str]:
        """Start an etcd cluster with a member on each node; return the client URLs. It may not be ready yet."""
        peers = [f"http://{address}:2380" for address in self.network.addresses]
        clients = [f"http://{address}:2379" for address in self.network.addresses]
        for node in self.nodes:
            group = self._node_group(node).child("etcd")
            arguments = {
                "name": f"node{node}",
                "data-dir": self._node_folder(node) / "etcd",
                "listen-client-urls": clients[node],
                "advertise-client-urls": clients[node],
                "listen-peer-urls": peers[node],
                "initial-advertise-peer-urls": peers[node],
                "initial-cluster": ",".join(f"node{index}={url}" for index, url in enumerate(peers)),
                "heartbeat-interval": 50,
                "election-timeout": 500,
            }
            enter = f'echo 0 > {group.path}/cgroup.procs; exec nsenter --net={self.network.namespace(node)} etcd "$@"'
            options = [f"--{name}={value}" for name, value in arguments.items()]
            with open(self._node_folder(node) / "etcd.log", "wb") as log:
                self._etcd.append(subprocess.Popen(["sh", "-c", enter, "sh", *options], stdout=log, stderr=log))
        return clients

    # -- faults of links; see `Network` --------------------------------------------------------------------------------

    def cut(self, node: int) -> None:
        """Lose all packets from and to a node."""
        self.network.cut(node)

    def heal(self, node: int) -> None:
        """End all faults of a node's link."""
        self.network.heal(node)

    # -- faults of nodes -----------------------------------------------------------------------------------------------

    def freeze(self, node: int) -> None:
        """Stop all processes of a node."""
        self._node_group(node).freeze()

    def thaw(self, node: int) -> None:
        """Let them go on."""
        self._node_group(node).thaw()

    def kill_node(self, node: int) -> None:
        """Kill all processes of a node; its kernel closes their connections."""
        self._node_group(node).kill()

    def power_off(self, node: int) -> None:
        """Kill all processes of a node without a sign to others: no connection is closed."""
        self.network.cut(node)
        self._node_group(node).kill()

    def reboot(self, node: int) -> None:
        """As `power_off`, and the node comes back without processes and connections."""
        self.power_off(node)
        self.network.replace_node(node)
        self._write_files(node)
        self.network.heal(node)

    # -- making and removing -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill and remove everything but the files. Idempotent."""
        try:
            while self.jobs:
                self.jobs.pop().close()
        finally:
            self._group.remove()
            for member in self._etcd:
                member.wait()
            self.network.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _node_group(self, node: int) -> Group:
        return self._group.child(f"n{node}")

    def _node_folder(self, node: int) -> Path:
        return self.folder / f"node{node}"

    def _place(self, node: int, group: Group) -> Place:
        folder = self._node_folder(node)
        binds = {"/etc/hosts": str(folder / "hosts"), _BOOT_ID: str(folder / "boot_id")}
        disks = {str(path): size for path, size in [self.disks[node]]} if node in self.disks else {}
        return Place(f"node{node}", str(self.network.namespace(node)), str(group.path), binds, disks)

    def _write_files(self, node: int) -> None:
        """What programs of a node see instead of the machine's: the names of all nodes, and a boot id of its own."""
        folder = self._node_folder(node)
        folder.mkdir(exist_ok=True)
        hosts = [f"{address} node{other}\n" for other, address in enumerate(self.network.addresses)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
