"""Entry of a process that transfers with those of another node: `python -m inprocess.node_health.transfer_process FD`.

It runs one all-reduce after another for each `MeasureTransfer`, and ends with the launcher. State of
`torch.distributed`, and a collective that hangs, are in this process only: the launcher kills it at the limit.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from inprocess.ipc.packets import PacketError
from inprocess.ipc.threads import JoinableThread
from inprocess.node_health.messages import TRANSFERS, MeasureTransfer, TransferChannel, TransferReport


def main(arguments: list[str]) -> int:
    """Serve requests until the launcher closes the connection, or has died. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # meant for the launcher, whose end this process sees
    channel = TransferChannel(socket.socket(fileno=int(arguments[0])), TRANSFERS)
    JoinableThread(_end_with_launcher, "end-with-launcher", (channel.fileno(),)).start()
    import torch.distributed  # takes seconds: the thread runs

    channel.send(TransferReport(0))
    while True:
        request = _receive(channel)
        if not isinstance(request, MeasureTransfer):
            return 1
        why = ""
        try:
            _measure(torch, channel, request)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        channel.send(TransferReport(request.number, is_over=True, why=why[:500]))


def _measure(torch: Any, channel: TransferChannel, request: MeasureTransfer) -> None:
    """Report the time of each transfer."""
    dist = torch.distributed
    limit = timedelta(seconds=request.limit_s)
    device = torch.device("cuda", request.device) if request.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(request.host, request.port, is_master=False, timeout=limit, wait_for_workers=False)
    dist.init_process_group(
        request.backend,
        store=dist.PrefixStore(request.prefix, store),
        rank=request.rank,
        world_size=request.world_size,
        timeout=limit,
    )
    try:
        values = torch.ones(max(1, request.size_bytes // 4), dtype=torch.float32, device=device)
        for number in range(request.repeats + 1):  # the first makes the connections
            began = time.monotonic()
            dist.all_reduce(values if number else values[:1])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:
                channel.send(TransferReport(request.number, seconds=time.monotonic() - began))
            values.fill_(1)
    finally:
        dist.destroy_process_group()


def _end_with_launcher(fd: int) -> None:
    """End this process when the other end is closed, also in a collective that hangs."""
    poll = select.poll()
    poll.register(fd, 0)
    poll.poll()
    os._exit(0)


def _receive(channel: TransferChannel) -> object:
    """Return the next message; None if it is not one. EOFError when the connection is closed."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        poll.poll()
        try:
            packet = channel.receive()
        except PacketError:
            return None
        if packet is not None:
            return packet.message


if __name__ == "__main__":
    try:
        os._exit(main(sys.argv[1:]))
    except EOFError:
        os._exit(0)
