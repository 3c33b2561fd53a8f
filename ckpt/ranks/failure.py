"""`Failure`: the failure of one rank, in the form in which it reaches the others.

rank that fails     Failure.of(error, rank) ── bytes: a collective, a store of torch ──▶ error() on the other ranks
                                            └─ document: the record of an abandoned save ──▶ also later processes
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from typing import Any

from ckpt import errors
from ckpt.errors import CheckpointError, RemoteTraceback

_MESSAGE_BYTES, _TRACEBACK_BYTES = 4 << 10, 8 << 10  # thousands of ranks may fail at once, and all read all of it


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank: the class of its error, the message and the traceback. `rank` is None if it is not known.

    `action` is what the rank could not do, for messages. Without `is_known` the cause may be another failure: a rank
    fails, too, when its save was abandoned by another one.
    """

    rank: int | None
    kind: str
    message: str
    traceback: str = ""
    is_known: bool = True
    action: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int | None, action: str = "") -> Failure:
        """Return the failure with this error, at most some KB. The traceback is that of the process that raised it."""
        kind = type(error).__name__
        if isinstance(error, CheckpointError):  # a class of `ckpt.errors`, which other ranks can raise
            kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
        elif kind in errors.__all__:  # another class with the same name
            kind = f"{type(error).__module__}.{kind}"
        cause = error.__cause__
        lines = [cause.text] if isinstance(cause, RemoteTraceback) else traceback.format_exception(error)
        message, trace = clip(str(error), _MESSAGE_BYTES), clip("".join(lines), _TRACEBACK_BYTES)
        return cls(rank, kind, message, trace, action=action)

    @property
    def text(self) -> str:
        """The class of the error and its message."""
        return f"{self.kind}: {self.message}"

    @property
    def report(self) -> str:
        """The whole failure without the traceback, as one sentence."""
        return f"rank {self.rank} could not {self.action}: {self.text}"

    @property
    def error_class(self) -> type[CheckpointError]:
        """The class of the error on other ranks: the same if `ckpt.errors` has it, else CheckpointError."""
        found = getattr(errors, self.kind, None) if self.kind in errors.__all__ else None
        return found if isinstance(found, type) and issubclass(found, CheckpointError) else CheckpointError

    def error(
        self, message: str, kind: type[CheckpointError] | None = None, *, step: int | None = None
    ) -> CheckpointError:
        """Return the error for another rank, of `error_class` or `kind`; the cause is the traceback of this failure."""
        error = (kind or self.error_class)(message, rank=self.rank, step=step)
        if self.traceback:
            error.__cause__ = RemoteTraceback(self.traceback)
        return error

    def to_document(self) -> dict[str, Any]:
        """Return the form in the record of an abandoned save; see docs/format.md."""
        more: dict[str, Any] = {} if self.is_known else {"known": False}
        more |= {"action": self.action} if self.action else {}
        return {
            "rank": self.rank,
            "kind": self.kind,
            "message": _printable(self.message),
            "traceback": _printable(self.traceback),
            **more,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Failure:
        """Return the failure that a document describes. One of `ILL_FORMED` if it describes none."""
        rank = document.get("rank")
        if rank is not None and type(rank) is not int:
            raise ValueError(f"{rank!r:.80} is not a rank")
        kind, message, trace = (str(document[name]) for name in ("kind", "message", "traceback"))
        is_known, action = document.get("known", True) is True, str(document.get("action", ""))
        return cls(rank, kind, message, trace, is_known, action)

    def to_bytes(self) -> bytes:
        """Return the form in which it is sent to other ranks."""
        return json.dumps(self.to_document()).encode()

    @classmethod
    def from_bytes(cls, data: bytes | str) -> Failure:
        """Return the failure that another rank has sent."""
        return cls.from_document(json.loads(data))


def clip(text: str, limit_bytes: int) -> str:
    """Return `text`, without its middle if its JSON form is longer than `limit_bytes`."""
    while (length := len(json.dumps(text))) > limit_bytes:
        keep = len(text) * (limit_bytes - 32) // length // 2
        text = text[:keep] + "\n[... cut ...]\n" + text[-keep:]
    return text


def _printable(text: str) -> str:
    """Return a text that can be encoded: a path in it may not be, where names of files are in ASCII."""
    return text.encode(errors="backslashreplace").decode()
