"""A process that has imported the launcher once and forks one per command: `launcher_server.py MODULE ...`.

Its standard input is a socket. Packets are JSON: {"argv", "env", "log", "cwd"} is answered with {"pid"}, each end with
{"pid", "code"}. One thread, so that its children can use torch.
"""

import json
import os
import selectors
import signal
import socket
import sys
import traceback
from importlib import import_module
from typing import Any, NoReturn

from tests.inprocess.nodes.place import Place


def main() -> None:
    end = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # what launchers have
    os.close(null)
    from inprocess.fault_tolerance.launcher import command  # noqa: F401  # torch

    for module in sys.argv[1:]:
        import_module(module)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(theirs.fileno())
    with selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ)
        selector.register(ours, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is ours:
                    ours.recv(64)
                    reap(end)
                elif packet := end.recv(1 << 16):
                    say(end, pid=fork(json.loads(packet)))
                else:
                    return


def reap(end: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        say(end, pid=pid, code=os.waitstatus_to_exitcode(status))


def say(end: socket.socket, **values: int) -> None:
    end.send(json.dumps(values).encode())


def fork(job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        launch(job)
    return pid


def launch(job: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        os.closerange(3, 1024)
        os.environ.update(job["env"])
        if place := job["env"].get("TEST_PLACE"):
            Place(**json.loads(place)).enter()
        sys.path[:0] = [place for place in job["env"].get("PYTHONPATH", "").split(":") if place not in sys.path]
        from inprocess.fault_tolerance.launcher import main as run

        code = run(job["argv"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
