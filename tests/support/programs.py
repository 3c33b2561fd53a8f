"""A script, a module or a piece of code in a forked process, as a fresh interpreter would run it."""

import atexit
import contextlib
import os
import random
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn


def use_environment(environment: Mapping[str, str]) -> None:
    """Begin a process of its own, in a session of its own, with exactly these variables."""
    os.setsid()
    own = set(_search_path())
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:] = [*_search_path(), *(path for path in sys.path[1:] if path not in own)]
    random.seed()


def _search_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run_program(arguments: Sequence[str]) -> None:
    """Run what follows `python` on a command line: `-c CODE`, `-m MODULE` or a script, and its arguments."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *arguments[2:]]
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):
            sys.modules.pop(arguments[1], None)  # `runpy` warns of a module that is there already
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # as the interpreter does
        return
    if arguments[0] == "-c":
        sys.path[0], name, code = "", "<string>", arguments[1]
        sys.argv = ["-c", *arguments[2:]]
    else:
        name, code = arguments[0], Path(arguments[0]).read_text()
        sys.path[0] = str(Path(name).resolve().parent)
        sys.argv = list(arguments)
        main.__file__ = name
    exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)


def end_after(function: Callable[[], object]) -> NoReturn:
    """Call the function, and end as a program does, but for modules: taking them apart would take most of a second."""
    code = 1
    try:
        function()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a pipe that is closed at its other end
        sys.stdout.flush()
        sys.stderr.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)
