"""The interpreter of a child process, and the import path of this one for it.

Every process that is started by exec runs one of our modules by `command_of`: with this interpreter, and with the
import path that this process has now, wherever that comes from (entries added at run time, a zip application, the
current directory). What can be imported here can be imported there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Our packages are imported from where they are here, whatever else of their names the path has. -P keeps the current
# directory from shadowing the standard library until then.
_BOOTSTRAP = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path.insert(0, given["ours"])
import ckpt, inprocess
sys.path[:] = given["path"]
del sys.argv[1]
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def interpreter() -> str:
    """Return the path of a Python interpreter with the packages of this one. RuntimeError if none is known.

    `sys.executable` may be empty where Python is embedded, or was started by a name that cannot be found.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not getattr(sys, "frozen", False):
        beside = (os.path.join(prefix, "bin", version) for prefix in (sys.exec_prefix, sys.base_exec_prefix))
        for path in (sys.executable, getattr(sys, "_base_executable", None), *beside):
            if path and os.access(path, os.X_OK):
                return str(path)
    raise RuntimeError(
        "no Python interpreter is known that could be started as a background process: sys.executable is "
        f"{sys.executable!r}, and there is no {version} in {sys.exec_prefix}/bin. Set sys.executable to the path of an "
        "interpreter with the same packages, before a Checkpointer, a queue or a Wrapper is made"
    )


def import_path() -> list[str]:
    """Return `sys.path` for another process: absolute, without what the import system ignores, as `Path` objects."""
    return [_absolute(entry) for entry in sys.path if isinstance(entry, str)]


def _absolute(entry: str) -> str:
    try:
        return os.path.abspath(entry)
    except OSError:  # the current directory was removed
        return entry


def command_of(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs one of our modules as `python -m module arguments...` would.

    The name of the module is a word of the command line, to be found by.
    """
    given = json.dumps({"ours": str(Path(__file__).parents[2]), "path": import_path()})
    return [interpreter(), *_flags(), "-P", "-c", _BOOTSTRAP, given, module, *arguments]


def _flags() -> list[str]:
    """Return the options of this interpreter that decide how it starts, and how it decodes names of files."""
    flags = ["-X", f"utf8={sys.flags.utf8_mode}"]
    if sys.flags.isolated:
        return [*flags, "-I"]
    return [*flags, *(["-E"] if sys.flags.ignore_environment else []), *(["-s"] if sys.flags.no_user_site else [])]
