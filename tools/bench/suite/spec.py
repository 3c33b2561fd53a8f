"""What a job is told, and what it answers."""

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["JobSpec", "Turn"]

Turn = dict[str, float]
"""What one turn of one system gave: ``*_s`` are seconds, ``*_bytes`` bytes, the rest counts."""


@dataclass(frozen=True)
class JobSpec:
    """`kind` is the name of a function of `rank`. `rounds` count, after one that does not; 0: that one counts.

    `folder` is on the disk to be measured, and the job's alone; `earlier` one of another job whose checkpoints are to
    be read. A window of training has at most `most_steps`, each of about `step_s`. `count` is how many
    small tensors there are. The state and the training are on `device`, "cpu" or "cuda".
    """

    kind: str
    world_size: int
    systems: tuple[str, ...]
    folder: str
    rounds: int
    total_bytes: float
    sharded: bool = False
    step_s: float = 0.05
    most_steps: int = 100
    count: int = 10_000
    earlier: str = ""
    device: str = "cpu"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        document: dict[str, Any] = json.loads(text)
        return cls(**{**document, "systems": tuple(document["systems"])})
