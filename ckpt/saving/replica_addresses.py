"""Where replicas are received: at which address of this node, and whether every rank can reach its buddy."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from ckpt.replication.replica import Address, buddies


def addresses_of_buddies(
    addresses: Sequence[Address | None], places: Sequence[str], nodes: Sequence[str]
) -> list[Address]:
    """Return where each rank sends its replicas, from address, place and node of each. The same on all ranks.

    ValueError, which says why, if any rank has no buddy that it can reach.
    """
    found: list[Address] = []
    for rank, buddy in enumerate(buddies(places)):
        if buddy is None:
            raise ValueError("all ranks are in one place")
        address = addresses[buddy]
        if address is None:
            raise ValueError(f"rank {buddy}, the buddy of rank {rank}, can receive none, as it has logged")
        if nodes[buddy] != nodes[rank] and ipaddress.ip_address(address.host).is_loopback:
            raise ValueError(
                f"rank {buddy}, the buddy of rank {rank}, is on another node and listens at {address.host}: set "
                "Snapshots(host=...), or CKPT_REPLICA_HOST, to an address of each node"
            )
        found.append(address)
    return found


def own_address() -> str:
    """Return the address of this node that its process group is likely to use, or that CKPT_REPLICA_HOST names."""
    if host := os.environ.get("CKPT_REPLICA_HOST"):
        return host
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting it sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])
