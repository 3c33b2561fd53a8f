"""A program that the template runs, as `template_main` says: signals are passed on, and the exit code is its own."""

import json
import os
import signal
import socket
import sys

_MODULES = {
    "torchrun": "torch.distributed.run",
    "ckpt_launcher": "tools.ckpt_launcher",
    "inspect_ckpt": "tools.inspect_ckpt",
}
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGABRT", "SIGUSR1", "SIGUSR2", "SIGCONT")
_NOT_CAUGHT = (signal.SIGKILL, signal.SIGSTOP)


def main() -> None:
    folder, name = os.path.split(sys.argv[0])
    arguments = sys.argv[1:]
    if name in _MODULES:
        arguments = ["-m", _MODULES[name], *arguments]
    elif arguments[:1] == ["-u"]:
        arguments = arguments[1:]  # the template has it, too
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    code = _run(os.path.join(folder, "socket"), arguments)
    if code < 0:
        if -code not in _NOT_CAUGHT:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _run(path: str, arguments: list[str]) -> int:
    """Return the exit code of the program, negative if a signal ended it."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.connect(path)
    order = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(end, [json.dumps(order).encode()], [0, 1, 2])
    for signum in (getattr(signal, name) for name in _PASSED_ON):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda number, _frame: end.send(str(number).encode()))
    answer = end.recv(64)
    if not answer:
        sys.exit("the process that runs this program has ended")
    return int(answer)


main()
