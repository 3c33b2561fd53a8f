"""Containers of a state that were made for the call of a restore, so that what is restored into them is lost.

``restore({"model": model, "epoch": epoch})`` fills the module, and puts the number into a dict that ends with the call.
Such a dict has one reference, that of the call, and so has each container that only such a one holds. A container that
any other part of the program holds has more, so there is no false alarm; some are not found, as those in tuples.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections.abc import Collection, Iterable
from typing import Any

from ckpt.paths import Path, display

_log = logging.getLogger("ckpt")
_SHOWN = 8

# From 3.14 on the interpreter borrows references, which are not counted.
_IS_EXACT = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 14)
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)

# The name in the function that is called, and the argument of `getrefcount`.
_ONLY_THE_CALL = 2 if _IS_EXACT else -1


def unkept_containers(references: int, state: Any) -> frozenset[Path]:
    """Return the paths of the plain dicts and lists that only `state` holds, which is itself one of them: the path ().

    `references` is the result of `sys.getrefcount` for the state in the function to which the program gave it.
    """
    if references != _ONLY_THE_CALL or type(state) not in (dict, list):
        return frozenset()
    found: set[Path] = {()}
    left: list[tuple[Path, Any]] = [((), state)]
    while left:
        path, node = left.pop()
        for key in node if type(node) is dict else range(len(node)):
            # Each is looked up where it is counted: a name for it here would be one more reference.
            if type(node[key]) in (dict, list) and sys.getrefcount(node[key]) == _ONLY_THE_CALL:
                found.add((*path, key))
                left.append(((*path, key), node[key]))
    return frozenset(found)


def lost_names(unkept: Collection[Path], changed: Iterable[Path]) -> list[str]:
    """Return the names of what a restore changes in `unkept` containers."""
    return sorted(display(path) for path in changed if path[:-1] in unkept)


def warn_of_lost(names: list[str], step: int) -> None:
    """Log the names of what a restore of `step` has put into containers that end with the call, if there are any."""
    if not names:
        return
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    _log.warning(
        "restored from step %d, and lost: %s%s. The dict or list that has it was made for the call, and nothing else "
        "refers to it. Keep the state in a variable, and read these from there after the restore: state = {...}; "
        "restore(state); epoch = state['epoch']. Of an object with load_state_dict, put the object into the state, "
        "not its state_dict()",
        step,
        ", ".join(names[:_SHOWN]),
        more,
    )
