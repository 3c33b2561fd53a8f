"""Entry of the process that checks a node: `python -m inprocess.node_health FD`; it ends with the launcher."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

from inprocess.ipc.packets import PacketError
from inprocess.ipc.threads import JoinableThread
from inprocess.node_health.check_chain import CheckChain, checks_of
from inprocess.node_health.interface import CheckResult
from inprocess.node_health.messages import CODEC, CheckReport, HealthChannel, NodeCheckSettings, RunChecks

_FIRST_MESSAGE_S = 60.0


def main(arguments: list[str]) -> int:
    """Run checks until the launcher closes the connection, or has died. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # meant for the launcher, whose end this process sees
    channel = HealthChannel(socket.socket(fileno=int(arguments[0])), CODEC)
    settings = _receive(channel, _FIRST_MESSAGE_S)
    if not isinstance(settings, NodeCheckSettings):
        return 1
    chain = CheckChain(checks_of(settings), settings.limit_s)
    JoinableThread(_end_with_launcher, "end-with-launcher", (channel.fileno(), chain)).start()
    _serve(channel, chain, settings.interval_s)
    return 0


def _end_with_launcher(fd: int, chain: CheckChain) -> None:
    """End this process when the other end is closed, also while checks run."""
    poll = select.poll()
    poll.register(fd, 0)
    poll.poll()
    chain.stop()
    os._exit(0)  # a check that hangs in its thread must not keep the process


def _serve(channel: HealthChannel, chain: CheckChain, interval_s: float) -> None:
    """Answer requests, and report new failures of cheap checks, until the connection is closed."""
    reported: set[str] = set()
    is_watching = False  # from the first request on: it has set what later runs are compared with
    next_s = 0.0
    while True:
        is_due = is_watching and chain.has_cheap
        request = _receive(channel, max(0.0, next_s - time.monotonic()) if is_due else None)
        if isinstance(request, RunChecks):
            is_watching = True
            results = chain.run()
            reported = _failures(results)
            channel.send(CheckReport(request.number, results))
        elif is_due:
            results = chain.run(only_cheap=True)
            found = _failures(results)
            if found - reported:
                channel.send(CheckReport(0, results))
            reported = found
        next_s = time.monotonic() + interval_s


def _failures(results: tuple[CheckResult, ...]) -> set[str]:
    return {result.name for result in results if result.is_failure}


def _receive(channel: HealthChannel, timeout_s: float | None) -> object:
    """Return the next message; None if there is none in time. EOFError when the connection is closed."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    if not poll.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))):
        return None
    try:
        packet = channel.receive()
    except PacketError:
        return None
    return packet and packet.message


if __name__ == "__main__":
    try:
        os._exit(main(sys.argv[1:]))
    except EOFError:
        signal.pause()  # until the thread has stopped the checks and ended this process
