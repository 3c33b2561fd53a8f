"""The command line: parses it, runs one command, turns an error into one line on stderr and an exit code."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from ckpt.errors import CheckpointCorruptError, CheckpointError
from ckpt.storage.roots import local_path
from ckpt.version import __version__

from . import (
    clean,
    convert,
    diff,
    export,
    index,
    ls,
    memory,
    pin,
    report,
    restore_branch,
    rm,
    show,
    stats,
    timeline,
    unpin,
    validate,
    watch,
)
from .completion import SHELLS, completion_script
from .output import CannotReadError, Exit, NotPublishedError, Output, one_line


class Command(Protocol):
    """The interface of a command: a module that is named like it."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace, output: Output) -> Exit: ...


_COMMANDS: dict[str, Command] = {
    "ls": ls,
    "watch": watch,
    "memory": memory,
    "show": show,
    "validate": validate,
    "diff": diff,
    "stats": stats,
    "timeline": timeline,
    "report": report,
    "export": export,
    "convert": convert,
    "index": index,
    "clean": clean,
    "restore-branch": restore_branch,
    "rm": rm,
    "pin": pin,
    "unpin": unpin,
}

_EXIT_CODES = "exit codes: 0 whole (diff: equal), 1 damaged (diff: different), 2 usage or cannot read, 3 not published"


class _UsageError(Exception):
    pass


class _PrintCompletion(argparse.Action):
    """Print the script that completes this command line in a shell, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, option: str | None = None) -> NoReturn:
        try:
            print(completion_script(parser, shell))
        except CannotReadError as error:
            raise _UsageError(str(error)) from None
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Invalid arguments and damaged files never raise."""
    try:
        arguments = _parser().parse_args(argv)
    except _UsageError as error:
        return _fail(str(error), Exit.CANNOT_READ)
    except SystemExit as end:  # --help, --version, --print-completion
        return int(end.code or 0)
    except BrokenPipeError:  # `inspect_ckpt --print-completion bash | head`
        return _end_of_pipe()
    try:
        for name, value in vars(arguments).items():
            setattr(arguments, name, [_path(each) for each in value] if isinstance(value, list) else _path(value))
        with _rare_collections():
            code = _COMMANDS[arguments.command].run(arguments, Output(as_json=arguments.json))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `inspect_ckpt show ... | head`
        return _end_of_pipe()
    except KeyboardInterrupt:
        return _fail("interrupted", Exit.INTERRUPTED)
    except NotPublishedError as error:
        return _fail(str(error), Exit.NOT_PUBLISHED)
    except CheckpointCorruptError as error:
        return _fail(str(error), Exit.CANNOT_READ if arguments.command == "diff" else Exit.DAMAGED)
    except (CannotReadError, CheckpointError) as error:
        return _fail(str(error), Exit.CANNOT_READ)
    except MemoryError:
        return _fail("out of memory: the metadata describe more than fits into memory", Exit.CANNOT_READ)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", Exit.CANNOT_READ)


def _path(value: Any) -> Any:
    """Return an argument, or the path that it names if it is a URL or begins with the home directory of the user."""
    is_other = isinstance(value, str) and (value.startswith(("file://", "~/")) or value == "~")
    return local_path(value) if is_other else value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="inspect_ckpt",
        description="Inspect, validate, compare, export and convert checkpoints. PATH is the directory of a step, or a "
        "checkpoint root, which stands for its newest published step; either may be a URL (s3://, gs://, az://).",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"inspect_ckpt {__version__}")
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=SHELLS, help="print the tab completion for a shell"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        own = commands.add_parser(name, help=command.HELP, description=command.HELP, epilog=_EXIT_CODES)
        own.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        command.add_arguments(own)
    return parser


def _end_of_pipe() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.WHOLE


def _fail(message: str, code: Exit) -> int:
    print(f"inspect_ckpt: {one_line(message)}", file=sys.stderr)
    return code


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely: metadata are millions of objects without cycles; looking for cycles doubles the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


if __name__ == "__main__":
    sys.exit(main())
