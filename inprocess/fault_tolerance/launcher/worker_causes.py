"""The cause for which workers have ended, or a node takes no part any more.

Of workers it is known from their exit codes, their error files, and the kernel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from inprocess.attribution import Cause
from inprocess.fault_classes import ADVICE, Symptoms, class_of
from inprocess.process_end import KernelEvidence, describe_code

_MESSAGE_CHARS = 300
_ASKED_TO_END = ("SIGTERM", "SIGINT")  # also by the launcher, when another worker has failed


def cause_of_failures(failures: Mapping[int, ProcessFailure], kernel: KernelEvidence) -> Cause:
    """Return the cause of failures, which are by rank and at least one, since the last look at the `kernel`.

    A worker that ended by a signal comes first: the others have often only lost their connections to it. Those that
    were asked to end come last.
    """
    rank = min(failures, key=lambda each: _order(failures[each]))
    failure = failures[rank]
    end = describe_code(failure.exitcode)
    evidence, oom = kernel.gather(failure.pid)
    message, files = _raised(failure.error_file_data) if os.path.isfile(failure.error_file) else ("", "")
    kind = f"exception {message.partition(':')[0]}" if message else "death"
    text = "\n".join([message, *evidence])
    fault_class = class_of(Symptoms(kind, text, files, "" if message else end, oom))
    how = f"{end}: {' '.join(message.split())[:_MESSAGE_CHARS]}" if message else end
    return Cause(rank, fault_class, how, ADVICE[fault_class], (f"host {os.uname().nodename}", *evidence))


def cause_of_node(node: str, kind: str, reason: str) -> str:
    """Return the cause for which a node is out of the job, on one line: "hardware: node 1 is lost: ...; what to do".

    `kind` is "lost" or "unfit". The reason of an unfit node begins with the name of the check that has failed.
    """
    fault_class = class_of(Symptoms(f"{kind} node", reason))
    return f"{fault_class.value}: node {node} is {kind}: {reason}; {ADVICE[fault_class]}"


def _order(failure: ProcessFailure) -> int:
    if failure.exitcode < 0:
        return 2 if describe_code(failure.exitcode) in _ASKED_TO_END else 0
    return 1


def _raised(error_file: Mapping[str, Any]) -> tuple[str, str]:
    """Return the message of the exception that a worker has recorded (`torch.distributed.elastic`), and its files."""
    message = error_file.get("message", "")
    if not isinstance(message, Mapping):
        return str(message), ""
    stack = str(message.get("extraInfo", {}).get("py_callstack", ""))
    files = re.findall(r'^  File "([^"]+)", line', stack, re.MULTILINE)
    return str(message.get("message", "")), " ".join(reversed(files))
