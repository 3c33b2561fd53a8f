"""Attribution of faults: the records that ranks write into the store, and the text made of them."""

from __future__ import annotations

import enum
import json
import os
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from types import CodeType, TracebackType
from typing import Any

from inprocess.fault_classes import ADVICE, LOST_CONNECTION, FaultClass, Symptoms, class_of
from inprocess.process_end import KernelEvidence

__all__ = [
    "DETAIL_CHARS",
    "Cause",
    "Interruption",
    "InterruptionRecord",
    "cause_of",
    "compact_ranks",
    "distinct_faults",
    "format_interruptions",
    "is_bystander",
    "logged_by",
    "parse_ranks",
    "rank_ranges",
    "short_path",
    "without_consequences",
]

_VERBOSE_ENV = "INPROCESS_VERBOSE_RANKS"
_LISTED_RANKS = 8
_SUMMARY_CHARS = 500
_MOST_DISTINCT = 16
_MOST_CAUSES = 5
_MATCHED_CHARS = 16 << 10  # of each message, for its class
_OF_DEVICES = ("CUDA", "NCCL", "GPU", "Accelerator")
_COMPARED_CHARS = 200  # of a message; the summary is cut off elsewhere when its numbers are longer
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)*", re.IGNORECASE)
_STANDARD_LIBRARY = f"{os.path.dirname(os.__file__)}/"

DETAIL_CHARS = 24 << 10
"""The largest part of a traceback or of stacks that a record holds."""


class Interruption(enum.Enum):
    """Kinds of faults that restart the job; and NEWCOMER: a process that is ready to join."""

    EXCEPTION = enum.auto()
    BASE_EXCEPTION = enum.auto()
    SOFT_TIMEOUT = enum.auto()
    HARD_TIMEOUT = enum.auto()
    TERMINATED = enum.auto()
    UNRESPONSIVE = enum.auto()
    MONITOR_PROCESS_EXCEPTION = enum.auto()
    NEWCOMER = enum.auto()


_SURVIVED = (Interruption.EXCEPTION, Interruption.SOFT_TIMEOUT, Interruption.NEWCOMER)


@dataclass(frozen=True, slots=True)
class InterruptionRecord:
    """One fault. `rank` is the dense rank in the iteration it happened in.

    `summary` is one line ("ValueError: ..."), `detail` a traceback or the stacks of all threads, `place` where in the
    code it happened, the same on all ranks. `fault_class` is its class as far as its rank or its monitor could tell,
    `evidence` are further lines about it, the host first. Comparisons ignore these: two reports of the same fault are
    equal.
    """

    rank: int
    interruption: Interruption
    summary: str = field(default="", compare=False)
    detail: str = field(default="", compare=False)
    place: str = field(default="", compare=False)
    fault_class: FaultClass = field(default=FaultClass.UNKNOWN, compare=False)
    evidence: tuple[str, ...] = field(default=(), compare=False)

    @property
    def fault(self) -> tuple[str, ...]:
        """The fault, the same on all ranks that have it: the kind; of an exception also type, place and message.

        The message counts without its numbers, which differ between ranks. It is needed because all errors of a
        backward pass come from one line of PyTorch.
        """
        if self.interruption is not Interruption.EXCEPTION:
            return (self.interruption.name,)
        return (self.interruption.name, self.place, _NUMBERS.sub("#", self.summary)[:_COMPARED_CHARS])

    def __str__(self) -> str:
        """Return the text form: one line of JSON without empty values, which `from_str` reads."""
        document = {name: value for name, value in self.document().items() if value or name == "rank"}
        return json.dumps(document, separators=(",", ":"))

    def document(self) -> dict[str, Any]:
        """Return the values as JSON knows them."""
        return {**asdict(self), "interruption": self.interruption.name, "fault_class": self.fault_class.value}

    @classmethod
    def from_str(cls, string: str) -> InterruptionRecord:
        """Read the text form. ValueError if it is not one."""
        try:
            fields = json.loads(string)
            return cls(
                rank=int(fields["rank"]),
                interruption=Interruption[fields["interruption"]],
                summary=str(fields.get("summary", "")),
                detail=str(fields.get("detail", "")),
                place=str(fields.get("place", "")),
                fault_class=FaultClass(fields.get("fault_class", FaultClass.UNKNOWN.value)),
                evidence=tuple(map(str, fields.get("evidence", ()))),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the text of an interruption record: {string[:200]!r}") from error

    @classmethod
    def of_exception(
        cls,
        error: BaseException,
        rank: int | None,
        kind: Interruption,
        kernel: KernelEvidence | None = None,
    ) -> InterruptionRecord:
        """Describe an exception on `rank` (None: it has none); by its type alone if it cannot be printed.

        Characters that UTF-8 does not have, as in names of files that are not text, are escaped. Of the
        evidence of the `kernel` only that about devices takes time, and only errors of those need it.
        """
        try:
            summary = _encodable(f"{type(error).__name__}: {error}")
            detail = _encodable("".join(traceback.format_exception(error)))
        except Exception:
            summary, detail = _encodable(type(error).__name__), ""
        of_device = any(word in summary for word in _OF_DEVICES)
        evidence, oom = ((), False) if kernel is None else kernel.gather(reads_log=of_device)
        return cls(
            -1 if rank is None else rank,
            kind,
            _shortened(summary, _SUMMARY_CHARS),
            detail[-DETAIL_CHARS:],
            _place(error.__traceback__),
            class_of(_symptoms(error, evidence, oom)),
            (f"host {os.uname().nodename}", *evidence),
        )


def _shortened(text: str, most: int) -> str:
    """Return the begin and the end of a text: the last line of a traceback in a message says what has happened."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 5]} ... {text[-half:]}"


def _symptoms(error: BaseException, evidence: tuple[str, ...], oom: bool) -> Symptoms:
    """Return what is known of an exception and of those that it was raised from."""
    files = [code.co_filename for code, _ in reversed(_frames(error.__traceback__))]
    kinds: list[str] = ["exception"]
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < _MOST_CAUSES:
        kinds += [f"{each.__module__}.{each.__qualname__}" for each in type(cause).__mro__ if each is not object]
        try:
            texts.append(_shortened(str(cause), _MATCHED_CHARS))
        except Exception:
            texts.append("")
        inner = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else None
        cause = cause.__cause__ or inner
    return Symptoms(" ".join(kinds), "\n".join([*texts, *evidence]), " ".join(files), oom=oom)


def _frames(tb: TracebackType | None) -> list[tuple[CodeType, int]]:
    """Return code and line of each frame of a traceback, the innermost last."""
    frames = []
    while tb is not None:
        frames.append((tb.tb_frame.f_code, tb.tb_lineno))
        tb = tb.tb_next
    return frames


def _place(tb: TracebackType | None) -> str:
    """Return the file, line and function of the innermost frame, and if it is of a library, of the caller of that.

    Empty without a frame.
    """
    frames = _frames(tb)
    own = [(code, line) for code, line in frames if not _is_of_library(code.co_filename)]
    shown = list(dict.fromkeys([*frames[-1:], *own[-1:]]))
    places = [f"{short_path(code.co_filename)}:{line} in {code.co_qualname}" for code, line in shown]
    return _encodable(", called at ".join(places))


def _is_of_library(path: str) -> bool:
    return "-packages/" in path or path.startswith((_STANDARD_LIBRARY, "<frozen "))


def short_path(path: str) -> str:
    """Return the last two parts of a path, which are the same on all nodes."""
    return "/".join(path.split("/")[-2:])


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def is_bystander(rank: int | None, error: BaseException, records: Iterable[InterruptionRecord]) -> bool:
    """Return whether `error`, on this rank, is only a consequence of the fault of another rank: a lost connection.

    To be called when the records of all ranks are complete.
    """
    if not _is_lost_connection(InterruptionRecord.of_exception(error, rank, Interruption.EXCEPTION).summary):
        return False
    return any(
        record.rank != rank
        and (
            record.interruption is not Interruption.EXCEPTION
            or (bool(record.summary) and not _is_lost_connection(record.summary))
        )
        for record in records
    )


def without_consequences(records: Iterable[InterruptionRecord]) -> list[InterruptionRecord]:
    """Return the records without exceptions that report a lost connection, if there are others."""
    records = list(records)
    causes = [
        record
        for record in records
        if record.interruption is not Interruption.EXCEPTION or not _is_lost_connection(record.summary)
    ]
    return causes or records


def distinct_faults(records: Iterable[InterruptionRecord]) -> list[InterruptionRecord]:
    """Return one record of each distinct fault, the first: those whose tracebacks or stacks are worth reading.

    Exceptions of the same type at the same place, with messages that differ only in numbers, are one fault, on however
    many ranks; so are faults of each other kind. Consequences of other faults are left out.
    """
    first: dict[tuple[str, ...], InterruptionRecord] = {}
    for record in without_consequences(records):
        first.setdefault(record.fault, record)
    return list(first.values())[:_MOST_DISTINCT]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an iteration was interrupted: the fault that was first, on `rank`, with its class and what to do about it.

    `text` is one line: its summary and place; `evidence` as in `InterruptionRecord`. `followed` are the ranks whose
    faults are consequences of it: lost connections.
    """

    rank: int
    fault_class: FaultClass
    text: str
    advice: str
    evidence: tuple[str, ...] = ()
    followed: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return it on one line."""
        evidence = "".join(f"; {each}" for each in self.evidence)
        lost = f"; then rank {compact_ranks(self.followed)} lost the connection" if self.followed else ""
        what = f"{self.fault_class.value}: rank {self.rank} was first: {self.text}"
        return f"{what}{evidence}{lost}; {self.advice}"

    def document(self) -> dict[str, Any]:
        """Return the values as JSON knows them."""
        lists = {"evidence": list(self.evidence), "followed": list(self.followed)}
        return {**asdict(self), "fault_class": self.fault_class.value, **lists}


def cause_of(records: Iterable[InterruptionRecord]) -> Cause | None:
    """Return the cause, by the records in the order in which they were reported; None if there is no fault in them.

    The first fault that is no lost connection is the cause. One of the network is only the cause of itself: if a rank
    has another fault, that counts.
    """
    faults = [each for each in records if each.interruption is not Interruption.NEWCOMER]
    causes = without_consequences(faults)
    if not causes:
        return None
    first = next((each for each in causes if each.fault_class is not FaultClass.NETWORK), causes[0])
    at = f" ({first.place})" if first.place else ""
    lines = first.summary.strip().splitlines() or [first.interruption.name]
    followed = {each.rank for each in faults if each not in causes} - {first.rank}
    return Cause(
        first.rank,
        first.fault_class,
        " ... ".join(dict.fromkeys([lines[0], lines[-1]])) + at,
        ADVICE[first.fault_class],
        first.evidence,
        tuple(sorted(followed)),
    )


def logged_by(fault: InterruptionRecord | Cause, records: Iterable[InterruptionRecord]) -> int:
    """Return the rank that logs the details of a fault: its own, or the lowest that is left if that rank is gone."""
    gone = {each.rank for each in records if each.interruption not in _SURVIVED}
    return fault.rank if fault.rank not in gone else next(rank for rank in count() if rank not in gone)


def _is_lost_connection(summary: str) -> bool:
    """Return whether a summary ("RuntimeError: ...") is that of a collective or store whose peer closed the connection.

    PyTorch has no special error for this: gloo raises RuntimeError, NCCL DistBackendError, stores DistNetworkError.
    """
    kind, _, text = summary.partition(": ")
    if kind not in ("RuntimeError", "ConnectionError") and not kind.startswith(("Dist", "Connection", "BrokenPipe")):
        return False
    return any(phrase in text.lower() for phrase in LOST_CONNECTION)


def compact_ranks(ranks: Iterable[int], *, verbose: bool | None = None) -> str:
    """Return ranks as text: all of them up to eight, "0-3,7" if verbose, else the first eight and how many more.

    `verbose` is by default true if the environment variable INPROCESS_VERBOSE_RANKS is set to anything but "0".
    """
    ordered = sorted(set(ranks))
    if verbose is None:
        verbose = os.environ.get(_VERBOSE_ENV, "0") not in ("", "0")
    if verbose:
        return rank_ranges(ordered)
    listed = ",".join(map(str, ordered[:_LISTED_RANKS]))
    more = len(ordered) - _LISTED_RANKS
    return f"{listed} and {more} more" if more > 0 else listed


def format_interruptions(records: Sequence[InterruptionRecord]) -> str:
    """Return the ranks of each kind of fault as text, in the order of the first report of each kind."""
    by_kind: dict[Interruption, list[InterruptionRecord]] = {}
    for record in records:
        by_kind.setdefault(record.interruption, []).append(record)
    parts = []
    for kind, same in by_kind.items():
        summary = next((record.summary for record in same if record.summary), "")
        text = f"{kind.name} on rank {compact_ranks(record.rank for record in same)}"
        parts.append(f"{text} ({summary})" if summary else text)
    return "; ".join(parts) or "unknown reason"


def parse_ranks(text: str) -> list[int]:
    """Return the ranks in a text made by `rank_ranges`."""
    bounds = [part.split("-") for part in text.split(",") if part]
    return [rank for first, *last in bounds for rank in range(int(first), int(last[0] if last else first) + 1)]


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks (not negative) as text, "0-3,7"."""
    texts: list[str] = []
    first = last = None
    for rank in [*sorted(set(ranks)), None]:
        if first is not None and rank != last + 1:  # type: ignore[operator]
            texts.append(str(first) if first == last else f"{first}-{last}")
            first = None
        if first is None:
            first = rank
        last = rank
    return ",".join(texts)
