"""Messages between a launcher and the processes that check its node and its links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from inprocess.ipc.packets import Channel, Codec
from inprocess.node_health.interface import CheckResult


@dataclass(frozen=True)
class NodeCheckSettings:
    """The checks that the process makes: the first message.

    Cheap checks are made each `interval_s`. A run takes `limit_s` at most. Texts that are empty, and a
    `max_clock_error_s` of None, ask for no check.
    """

    interval_s: float
    limit_s: float
    checks_gpus: bool = False
    checks_network_cards: bool = False
    checks_shared_mounts: bool = False
    storage_paths: tuple[str, ...] = ()
    min_free_bytes: int = 0
    max_clock_error_s: float | None = None
    endpoint: str = ""
    command: str = ""
    segment_folder: str = ""


@dataclass(frozen=True)
class RunChecks:
    """Ask for a run of all checks. `number` is that of its report."""

    number: int


@dataclass(frozen=True)
class CheckReport:
    """The results of a run, in the order of the checks; `number` 0: of cheap checks, because a failure is new."""

    number: int
    results: tuple[CheckResult, ...]


Message = NodeCheckSettings | RunChecks | CheckReport
HealthChannel = Channel[Message]
CODEC: Codec[Message] = Codec(*get_args(Message))


@dataclass(frozen=True)
class MeasureTransfer:
    """Ask for all-reduces with the processes of another node. `number` is that of its reports.

    The processes meet in the store at `host` and `port`, below `prefix`. `device` is the GPU for nccl. `limit_s` is
    that of each operation.
    """

    number: int
    host: str
    port: int
    prefix: str
    rank: int
    world_size: int
    backend: str
    device: int
    size_bytes: int
    repeats: int
    limit_s: float


@dataclass(frozen=True)
class TransferReport:
    """The time of a transfer, or, `is_over`, the end of a request, with the error if there was one.

    `number` 0: the process is ready.
    """

    number: int
    seconds: float | None = None
    is_over: bool = False
    why: str = ""


TransferMessage = MeasureTransfer | TransferReport
TransferChannel = Channel[TransferMessage]
TRANSFERS: Codec[TransferMessage] = Codec(*get_args(TransferMessage))
