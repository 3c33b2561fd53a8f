"""Hangs: which rank the others wait for.

A rank that hangs makes the others wait for it in a collective, and any of them may reach its time limit first. When a
hang is reported, each rank writes down where its main thread is, unless it only waits in a collective; what is
then reported to all ranks is the hang of those that are in none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass
from types import FrameType

from inprocess.attribution import Interruption, InterruptionRecord, compact_ranks, short_path
from inprocess.fault_classes import FaultClass, Symptoms, class_of

__all__ = ["Position", "blamed", "position_of"]

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WAITING = (f"{_OWN}protocol.py", f"{_OWN}wrap.py", f"{_OWN}coordination{os.sep}")  # for other ranks
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_OPERATIONS = f"{_COLLECTIVES}distributed_c10d.py"
_BACKWARD = f"{os.sep}torch{os.sep}autograd{os.sep}graph.py"  # DDP and FSDP wait in there, invisibly for Python


@dataclass(frozen=True, slots=True)
class Position:
    """Where the main thread of a rank is: the `function`, and its `line`. It `waits` if it is in a collective.

    `fault_class` is that of a hang there.
    """

    rank: int
    waits: bool
    function: str
    line: str
    fault_class: FaultClass = FaultClass.UNKNOWN

    def __str__(self) -> str:
        """Return the text form: one line of JSON, which `from_str` reads."""
        return json.dumps({**asdict(self), "fault_class": self.fault_class.value})

    @classmethod
    def from_str(cls, text: str) -> Position:
        """Read the text form. ValueError if it is not one."""
        try:
            values = json.loads(text)
            where = str(values["function"]), str(values["line"])
            return cls(int(values["rank"]), bool(values["waits"]), *where, FaultClass(values["fault_class"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the text of a position: {text[:200]!r}") from error


def position_of(rank: int, thread: int) -> Position | None:
    """Return where a thread of this process is; None where this package waits for the other ranks.

    Another call of this package by the function, to report progress or a section, is where the function has called it.
    """
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and _is_called(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    if innermost is None or frame is None or frame.f_code.co_filename.startswith(_OWN):
        return None
    file, name = short_path(frame.f_code.co_filename), frame.f_code.co_qualname
    waits = _waits(frame)
    symptoms = Symptoms("hang in a collective" if waits else "hang", files=_files(frame))
    return Position(rank, waits, f"{file} in {name}", f"{file}:{frame.f_lineno} in {name}", class_of(symptoms))


def _files(frame: FrameType | None) -> str:
    """Return the files of a frame and those that it was called from."""
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return " ".join(files)


def _is_called(path: str) -> bool:
    """Return whether the code is of a library that functions call: the standard one, or this where it does not wait."""
    return _is_standard(path) or (path.startswith(_OWN) and not path.startswith(_WAITING))


def _is_standard(path: str) -> bool:
    is_module = path.startswith(_STANDARD_LIBRARY) and not any(folder in path for folder in _PACKAGES)
    return is_module or path.startswith("<frozen ")


def _waits(frame: FrameType) -> bool:
    """Return whether the innermost frame that is not of the standard library is in a collective of torch."""
    path = frame.f_code.co_filename
    if _COLLECTIVES in path or path.endswith(_BACKWARD):
        return True
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_filename.endswith(_OPERATIONS):
            return True
        outer = outer.f_back
    return False


def blamed(
    records: Sequence[InterruptionRecord], positions: Iterable[Position], looked: Set[int] = frozenset()
) -> list[InterruptionRecord]:
    """Return the records with the hangs of ranks that are in no collective, in place of those that wait in one.

    `looked` are ranks that would have reported a position outside of collectives.
    """
    hung = [record for record in records if record.interruption is Interruption.SOFT_TIMEOUT]
    where = {position.rank: position for position in positions}
    # A rank without a position that has looked was not late yet when it looked where it was: it waited. One that has
    # not looked may be anywhere: no hang was reported before it answered the last call, or it has not answered yet.
    waiting = [r for r in hung if (where[r.rank].waits if r.rank in where else r.rank in looked)]
    outside = [position for position in where.values() if not position.waits]
    if not waiting or not outside:
        return list(records)
    left = [record for record in records if record not in waiting]
    if len(waiting) < len(hung):  # some of those that were late are in no collective themselves
        return left
    ranks = compact_ranks(record.rank for record in waiting)
    causes = [
        InterruptionRecord(
            position.rank,
            Interruption.SOFT_TIMEOUT,
            f"at {position.line}, in no collective, while rank {ranks} waited in one: {waiting[0].summary}",
            place=position.function,
            fault_class=position.fault_class,
        )
        for position in outside
    ]
    return causes + left
