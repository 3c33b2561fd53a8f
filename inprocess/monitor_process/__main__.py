"""Start of a monitor process: `python -m inprocess.monitor_process CHANNEL_FD [STACKS_FD]`."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys

from inprocess.monitor_process.daemon import Daemon
from inprocess.monitor_process.messages import CODEC, Configure, Failed, MonitorChannel, Started
from inprocess.monitor_process.target import Target

_log = logging.getLogger("inprocess.monitor_process")


def main(arguments: list[str]) -> int:
    """Watch one rank until it is done, or dead and spoken for."""
    os.chdir("/")
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # of the rank's terminal or launcher; a monitor ends after its rank
    end = socket.socket(fileno=int(arguments[0]))
    stacks_fd = int(arguments[1]) if len(arguments) > 1 else None
    channel = MonitorChannel(end, CODEC)
    config = _first_message(channel)
    if config is None:
        return 0
    _log_to(config)
    try:
        target = Target(config.target_pid)
    except ProcessLookupError:
        return 0
    try:
        _write_pidfile(config)
    except OSError as error:
        channel.send(Failed(f"cannot write its pid file: {error}"))
        return 1
    channel.send(Started(os.getpid()))
    try:
        Daemon(config, channel, target, stacks_fd).run()
    except BaseException:
        _log.exception("the monitor process of initial rank %d fails", config.initial_rank)
        return 1
    finally:
        if config.pidfile is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.pidfile)
    return 0


def _first_message(channel: MonitorChannel) -> Configure | None:
    select.select([channel], [], [])
    try:
        packet = channel.receive()
    except EOFError:
        return None
    message = packet and packet.message
    if not isinstance(message, Configure):
        raise TypeError(f"the first message must be Configure, not {type(message).__name__}")
    return message


def _log_to(config: Configure) -> None:
    """Log to a file of our own; without one, nowhere: the standard streams belong to the rank."""
    root = logging.getLogger("inprocess")
    root.propagate = False
    root.setLevel(config.log_level)
    handler: logging.Handler = logging.NullHandler()
    if config.logfile is not None:
        os.makedirs(os.path.dirname(config.logfile), exist_ok=True)
        handler = logging.FileHandler(config.logfile)
        handler.setFormatter(
            logging.Formatter(
                f"%(asctime)s | %(levelname)s | monitor_process | %(name)s | target_pid {config.target_pid} | "
                f"rank {config.initial_rank} | %(message)s"
            )
        )
    root.addHandler(handler)


def _write_pidfile(config: Configure) -> None:
    if config.pidfile is not None:
        os.makedirs(os.path.dirname(config.pidfile), exist_ok=True)
        with open(config.pidfile, "w") as file:
            file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
