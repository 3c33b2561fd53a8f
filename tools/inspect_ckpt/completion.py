"""Tab completion: scripts for shells, which shtab makes of the command line."""

from __future__ import annotations

import argparse

from .output import CannotReadError

SHELLS = ("bash", "zsh", "fish", "tcsh")

_PLACES = {"ROOT", "PATH", "PATH_OR_ROOT", "A", "B", "FROM", "TO", "TARGET", "DIR"}
_FILES = {"FILE", "FILE.png"}


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell: commands, options and paths. CannotReadError without shtab."""
    try:
        import shtab
    except ImportError:
        raise CannotReadError("tab completion needs shtab: pip install 'ckpt-inprocess[tools]'") from None
    for each in _parsers(parser):
        for action in each._actions:
            if action.metavar in _PLACES | _FILES:
                action.complete = shtab.DIRECTORY if action.metavar in _PLACES else shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parser of the program, and those of its commands."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found
