"""Classes of faults: a table of rules over what is known of a fault at the place where it has happened."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ADVICE", "LOST_CONNECTION", "FaultClass", "Symptoms", "class_of"]


class FaultClass(enum.Enum):
    """The kind of cause that a fault has, which says who can do something about it."""

    USER_CODE = "user code"
    DATA = "data"
    OUT_OF_MEMORY = "out of memory"
    HARDWARE = "hardware"
    NETWORK = "network"
    STORAGE = "storage"
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"


ADVICE: Mapping[FaultClass, str] = MappingProxyType(
    {
        FaultClass.USER_CODE: "correct the program at the named place; a restart comes to the same line again",
        FaultClass.DATA: "look at the record, file or worker process that the message names, and repair or skip it",
        FaultClass.OUT_OF_MEMORY: "reduce what the process holds (batch size, data workers, caches), or raise the "
        "limit of its control group, of /dev/shm or of the device",
        FaultClass.HARDWARE: "take the node out of the job and test it; a spare node can take its place",
        FaultClass.NETWORK: "check the links and the name service of the nodes; if they work, compare the collectives "
        "of the ranks, for example by the flight recorder",
        FaultClass.STORAGE: "check the path in the message: space, quota, mount, permissions",
        FaultClass.PREEMPTED: "nothing to correct: the scheduler or a person has ended the process; "
        "ckpt.PreemptionWatcher saves before that",
        FaultClass.UNKNOWN: "read the traceback or the stacks of this rank, and the log of the kernel of its node",
    }
)
"""What to do about a fault of each class: one sentence."""


@dataclass(frozen=True, slots=True)
class Symptoms:
    """What is known of a fault.

    `kind` is "exception" and the dotted names of its classes and of those of its causes; "hang", or "hang in a
    collective"; "death"; "lost node"; or "unfit node", whose message begins with the name of the check. `message` is
    its text, `files` are those of the frames, the innermost first. Of a death there is the `end`, "SIGKILL" or "exit
    code 1", empty if it is unknown. `oom` tells whether the kernel has killed a process of the control group meanwhile,
    because memory was short.
    """

    kind: str
    message: str = ""
    files: str = ""
    end: str = ""
    oom: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    """A class, and regular expressions that must all be found; an empty one is found everywhere."""

    fault_class: FaultClass
    kind: str = ""
    message: str = ""
    files: str = ""
    end: str = ""
    oom: bool = False

    def fits(self, symptoms: Symptoms) -> bool:
        """Return whether all conditions hold."""
        if self.oom and not symptoms.oom:
            return False
        fields = ("kind", "message", "files", "end")
        return all(re.search(getattr(self, name), getattr(symptoms, name)) for name in fields)


LOST_CONNECTION = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "timed out waiting",
    "remote process exited",
    "remote error",
    "failed to recv",
    "application timeout caused pair closure",
)
"""Parts of messages, in lower case, of collectives and stores whose peer has closed the connection."""

_DATA_FILES = r"torch/utils/data/|-packages/(torchdata|webdataset|datasets|litdata|streaming)/"
_STORAGE_FILES = r"/ckpt/(storage|saving|loading)/|-packages/(fsspec|s3fs|gcsfs|obstore|botocore)/"
_APPLICATION_XIDS = "13|31|43|45|66|69|109"  # of the program that used the GPU, not of the GPU

# The first rule that fits decides. Special causes stand before the general ones that they look like.
_RULES = (
    _Rule(FaultClass.STORAGE, kind="^unfit node", message="^(storage |shared mounts:)"),
    _Rule(FaultClass.NETWORK, kind="^unfit node", message="^network:"),
    _Rule(FaultClass.HARDWARE, kind="^(lost|unfit) node"),
    _Rule(FaultClass.OUT_OF_MEMORY, kind="^death", end="^(SIGKILL|)$", oom=True),
    _Rule(FaultClass.OUT_OF_MEMORY, message="killed by signal: Killed", oom=True),
    _Rule(FaultClass.OUT_OF_MEMORY, kind=r"\b(MemoryError|OutOfMemoryError)\b"),
    _Rule(FaultClass.OUT_OF_MEMORY, message=r"(?i)out of (shared )?memory|cannot allocate memory|_ALLOC_FAILED"),
    _Rule(FaultClass.OUT_OF_MEMORY, end="^SIGBUS$"),  # mostly a full /dev/shm
    _Rule(FaultClass.HARDWARE, kind=r"\bHealthCheckError\b"),
    _Rule(FaultClass.HARDWARE, message=rf"NVRM: Xid \([^)]*\): (?!({_APPLICATION_XIDS})\b)\d+"),
    _Rule(FaultClass.HARDWARE, message=r"(?i)uncorrectable|\bECC error|fallen off the bus|GPU is lost|NVLink error"),
    _Rule(FaultClass.PREEMPTED, kind=r"\b(SignalException|KeyboardInterrupt)\b"),
    _Rule(FaultClass.PREEMPTED, message=r"\bSIGTERM\b|(?i:\bpreempted\b)"),
    _Rule(FaultClass.PREEMPTED, end="^SIG(TERM|INT|HUP|XCPU)$"),
    _Rule(FaultClass.STORAGE, kind=r"\bckpt\.errors\.(Storage|CheckpointCorrupt|CheckpointUnreachable)Error\b"),
    _Rule(
        FaultClass.STORAGE,
        message="(?i)no space left on device|input/output error|stale file handle|read-only file system|quota exceeded",
    ),
    _Rule(FaultClass.STORAGE, kind=r"\b(botocore|s3fs|gcsfs|obstore|google\.cloud\.storage|azure)\."),
    _Rule(FaultClass.STORAGE, kind="^hang$", files=_STORAGE_FILES),
    _Rule(FaultClass.NETWORK, kind="^hang in a collective"),
    _Rule(FaultClass.NETWORK, kind=r"\b(Dist(Network|Store|Backend)|Connection\w*|BrokenPipe)Error\b|\bgaierror\b"),
    _Rule(FaultClass.NETWORK, kind=r"\bRuntimeError\b", message=f"(?i){'|'.join(LOST_CONNECTION)}"),
    _Rule(FaultClass.NETWORK, message=r"(?i)no route to host|network is unreachable|nccl(System|Remote)Error"),
    _Rule(FaultClass.NETWORK, message="collective operation timeout"),
    _Rule(FaultClass.DATA, message="DataLoader worker"),
    _Rule(FaultClass.DATA, files=_DATA_FILES),
    _Rule(FaultClass.USER_CODE, end="^(SIGSEGV|SIGABRT|SIGILL|SIGFPE|SIGTRAP|SIGSYS)$|^exit code"),
    _Rule(FaultClass.UNKNOWN, kind=r"^exception (inprocess|ckpt)\.(?!errors\.State)"),  # its text says what to do
    _Rule(FaultClass.USER_CODE, kind="^exception"),
    _Rule(FaultClass.USER_CODE, kind="^hang$", files="."),
)


def class_of(symptoms: Symptoms) -> FaultClass:
    """Return the class of a fault: that of the first rule of the table that fits, UNKNOWN if none does."""
    return next((rule.fault_class for rule in _RULES if rule.fits(symptoms)), FaultClass.UNKNOWN)
