"""Entry of a monitor process: `python -m inprocess.monitor_process FD`; the first message on FD says what to watch."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator

from inprocess.monitor_process.messages import CODEC, MonitorChannel, RequestFailed, ServeRanks, Started, WatchRank

_log = logging.getLogger("inprocess.monitor_process")


def main(arguments: list[str]) -> int:
    """Run the monitor to its end. Returns the exit code."""
    os.chdir("/")
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank or its launcher; a monitor ends after its ranks
    channel = MonitorChannel(socket.socket(fileno=int(arguments[0])), CODEC)
    try:
        task = _first_message(channel)
        if isinstance(task, WatchRank):
            _watch_rank(task, channel)
        elif task is not None:
            _serve_ranks(task, channel)
    except BaseException as error:
        _log.exception("the monitor process failed")
        channel.send(RequestFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _first_message(channel: MonitorChannel) -> WatchRank | ServeRanks | None:
    """Return what to watch; None if the caller has ended."""
    select.select([channel], [], [])
    try:
        packet = channel.receive()
    except EOFError:
        return None
    message = packet and packet.message
    if not isinstance(message, WatchRank | ServeRanks):
        raise TypeError(f"the first message must be WatchRank or ServeRanks, not {type(message).__name__}")
    return message


def _watch_rank(task: WatchRank, channel: MonitorChannel) -> None:
    from inprocess.monitor_process.rank_monitor import RankMonitor  # each loop imports what the other does not need
    from inprocess.monitor_process.watched import WatchedProcess

    _log_to_file(task)
    stacks = None
    if task.stack_signal is not None and task.stacks_fd is not None:
        stacks = task.stack_signal, task.stacks_fd
    try:
        process = WatchedProcess(task.target_pid, stacks)
    except ProcessLookupError:
        return
    with _pidfile(task.pidfile):
        channel.send(Started())
        RankMonitor(task, channel, process).run()


def _serve_ranks(task: ServeRanks, channel: MonitorChannel) -> None:
    from inprocess.monitor_process.node_monitor import NodeMonitor

    logging.basicConfig(
        level=task.log_level,
        format=f"%(asctime)s | %(levelname)s | rank monitor {os.getpid()} | %(name)s | %(message)s",
    )
    NodeMonitor(task, channel).run()


def _log_to_file(task: WatchRank) -> None:
    """Log to the file in the settings; without one not at all: the standard streams belong to the rank."""
    root = logging.getLogger("inprocess")
    root.propagate = False
    root.setLevel(task.log_level)
    handler: logging.Handler = logging.NullHandler()
    if task.logfile is not None:
        os.makedirs(os.path.dirname(task.logfile), exist_ok=True)
        handler = logging.FileHandler(task.logfile)
        handler.setFormatter(
            logging.Formatter(
                f"%(asctime)s | %(levelname)s | monitor_process | %(name)s | target_pid {task.target_pid} | "
                f"rank {task.initial_rank} | %(message)s"
            )
        )
    root.addHandler(handler)


@contextlib.contextmanager
def _pidfile(path: str | None) -> Iterator[None]:
    """Have this process's id in a file."""
    if path is None:
        yield
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(f"{os.getpid()}\n")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
