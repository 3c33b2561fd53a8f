"""The settings as command line options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from inprocess.fault_tolerance.config import (
    WITHOUT_EFFECT,
    FaultToleranceConfig,
    convert,
    instead_of,
    is_off,
    parse_section_timeouts,
)

__all__ = ["ANY_FAILED", "IN_PROCESS", "NO_RESTART_EXIT_CODE", "add_arguments", "unrecognized"]

NO_RESTART_EXIT_CODE = 93
ANY_FAILED = "any-failed"
IN_PROCESS = "in-process"


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
        dashes = item.name.replace("_", "-")
        old = [f"--ft-param-{item.name}", f"--ft-param-{dashes}", f"--ft_param_{item.name}"]
        instead = WITHOUT_EFFECT.get(item.name)
        text = f"default: {_shown(item.name)}" if instead is None else f"not available: {instead}"
        if item.name == "storage_healthcheck_path":
            old += _spellings("storage_health_check_path")  # the other launchers' option; this is its name in files
        _add(group, item.name, old, text, type=_reader(item.name, str(item.type)))
    for spelling in [*_spellings("ignore_missing_cfg"), "--ignore-missing-fault-tol-cfg"]:
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
        group,
        "restart_policy",
        ["--restart-policy", "--restart_policy"],
        "when a worker fails: any-failed (default): end all and start them again; in-process: leave the others alone",
        type=_restart_policy,
        default=ANY_FAILED,
    )


def unrecognized(arguments: Sequence[str]) -> str:
    """Return the message about arguments that are no options, with what to do instead of those of other launchers."""
    texts, others = {}, []
    for each in arguments:
        option = each.partition("=")[0]
        begin, _, setting = option.lstrip("-").replace("-", "_").partition("_")
        if begin == "ft" and (instead := instead_of(setting)) is not None:
            texts[option] = f"{option} is not available: {instead}"
        else:
            others.append(each)
    return "; ".join([*texts.values(), *([f"unrecognized arguments: {' '.join(others)}"] if others else [])])


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
            value = parse_section_timeouts(text) if kind.startswith("dict") else convert(name, kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if name in WITHOUT_EFFECT and not is_off(value):
            raise argparse.ArgumentTypeError(f"not available: {WITHOUT_EFFECT[name]}")
        return value

    read.__name__ = name
    return read


def _restart_policy(text: str) -> str:
    if text in (ANY_FAILED, IN_PROCESS):
        return text
    if text == "min-healthy":
        raise argparse.ArgumentTypeError(
            f"min-healthy is not available: use {IN_PROCESS}, --ft-min-workers, and inprocess.Wrapper in the workers"
        )
    raise argparse.ArgumentTypeError(f"{text!r} is not a restart policy; use {ANY_FAILED} or {IN_PROCESS}")


def _shown(name: str) -> str:
    value = FaultToleranceConfig().to_dict()[name]
    return "none" if value is None else str(value).replace("%", "%%")
