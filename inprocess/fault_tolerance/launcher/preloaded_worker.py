"""A Python process that imports modules, and waits for the program that it is to run.

Run as a file, not as a module, so that it begins without this package: `python -u FILE DESCRIPTOR DELAY [MODULE ...]`.
The descriptor is a socket. Its peer sends one byte with descriptors: a file with an order as JSON, and the files for
standard output and error, if they are not the ones that this process has. A closed connection means that there is
nothing to do. The program then runs as if it had been started by itself: `__main__`, `sys.argv`, `sys.path` and the
environment are as it expects.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import runpy
import select
import socket
import sys
import types
from typing import Any


def main(descriptor: int, delay_s: float, modules: list[str]) -> None:
    """Wait `delay_s`, import the modules, and run the program of the order when it has come."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of this file, whose modules are not meant
    with socket.socket(fileno=descriptor) as peer:
        select.select([peer], [], [], delay_s)  # an order that comes now ends the delay
        for name in modules:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:  # the program imports it, too, and shows where
                print(f"--ft-preload: {name} cannot be imported: {error!r}", file=sys.stderr)
        message, fds, _, _ = socket.recv_fds(peer, 1, 3)
    if not message:
        return
    with open(fds[0]) as file:
        file.seek(0)
        order: dict[str, Any] = json.load(file)
    for fd, target in zip(fds[1:], order["outputs"], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    _run(order["arguments"])


def _run(arguments: list[str]) -> None:
    """Run what follows `python` on a command line: `-m MODULE` or a path, and its arguments."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # also while threads and exit handlers run after the program
    if arguments[0] == "-m":
        _begin_path(os.getcwd())
        sys.argv = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # as the interpreter does
        return
    path = arguments[0]
    sys.argv = arguments
    if pkgutil.get_importer(path) is not None:  # a directory or an archive
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _begin_path(os.path.dirname(os.path.realpath(path)))
    module.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _begin_path(folder: str) -> None:
    if not sys.flags.safe_path:  # PYTHONSAFEPATH
        sys.path.insert(0, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
