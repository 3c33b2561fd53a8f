"""The settings as command line options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from inprocess.fault_tolerance.config import FaultToleranceConfig, convert, parse_section_timeouts

__all__ = ["NO_RESTART_EXIT_CODE", "add_arguments"]

NO_RESTART_EXIT_CODE = 93


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option per setting, and those of the launcher that begin with "--ft-".

    Values land in attributes `ft_<key>`, None where an option was not given: `FaultToleranceConfig.from_args` reads
    them. Dashes and underscores are the same. The spellings of older releases are accepted, not shown.
    """
    group = parser.add_argument_group("fault tolerance")
    _add(
        group, "cfg_path", ["--fault-tol-cfg-path", "--fault_tol_cfg_path"], "YAML file with a fault_tolerance section"
    )
    for item in fields(FaultToleranceConfig):
        old = [f"--ft-param-{item.name}", f"--ft-param-{item.name.replace('_', '-')}"]
        _add(group, item.name, old, f"default: {_shown(item.name)}", type=_reader(item.name, str(item.type)))
    for spelling in _spellings("ignore_missing_cfg"):
        shown = spelling == "--ft-ignore-missing-cfg"
        group.add_argument(
            spelling,
            dest="ft_ignore_missing_cfg",
            action="store_true",
            default=False,
            help="run without settings" if shown else argparse.SUPPRESS,
        )
    _add(
        group,
        "no_restart_exit_code",
        [],
        "exit code that asks not to be restarted",
        type=int,
        default=NO_RESTART_EXIT_CODE,
    )
    _add(
        group, "restart_policy", [], "when workers restart", choices=["any-failed", "min-healthy"], default="any-failed"
    )


def _add(group: Any, key: str, older: list[str], text: str, **options: Any) -> None:
    shown, *hidden = _spellings(key)
    options.setdefault("default", None)
    group.add_argument(shown, dest=f"ft_{key}", help=text, **options)
    hidden = list(dict.fromkeys([*hidden, *older]))
    if hidden:
        options["default"] = argparse.SUPPRESS
        group.add_argument(*hidden, dest=f"ft_{key}", help=argparse.SUPPRESS, **options)


def _spellings(key: str) -> list[str]:
    return list(dict.fromkeys([f"--ft-{key.replace('_', '-')}", f"--ft_{key}", f"--ft-{key}"]))


def _reader(name: str, kind: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text.strip().lower() in ("", "null", "none"):
            return None
        try:
            return parse_section_timeouts(text) if kind.startswith("dict") else convert(name, kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    read.__name__ = name
    return read


def _shown(name: str) -> str:
    value = FaultToleranceConfig().to_dict()[name]
    return "none" if value is None else str(value).replace("%", "%%")
