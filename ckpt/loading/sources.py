"""Where the bytes of a restore come from, who restores together, and what is said about it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt.paths import Path
from ckpt.planning.state_dict import TensorLeaf

__all__ = ["Alone", "Filled", "Gather", "MemorySource", "RestoreReport"]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore put where it belongs: bytes of tensors on this rank, by where they came from, and the time.

    `save` is the save that was published as this step. `damaged` are the newer steps that it went back from, because
    bytes of them are missing or wrong.
    """

    step: int
    save: str = ""
    own_memory_bytes: int = 0
    neighbour_memory_bytes: int = 0
    storage_bytes: int = 0
    seconds: float = 0.0
    damaged: tuple[int, ...] = ()

    def __str__(self) -> str:
        sources = {
            "own staging memory": self.own_memory_bytes,
            "staging memory of neighbours": self.neighbour_memory_bytes,
            "storage": self.storage_bytes,
        }
        text = ", ".join(f"{nbytes} bytes from {source}" for source, nbytes in sources.items() if nbytes)
        return f"step {self.step}: {text or 'no tensors'}, {1000 * self.seconds:.0f} ms"


class Filled(Protocol):
    """What a memory source has put into tensors."""

    @property
    def paths(self) -> frozenset[Path]: ...
    @property
    def own_bytes(self) -> int: ...
    @property
    def neighbour_bytes(self) -> int: ...


class MemorySource(Protocol):
    """Where tensors of a published step may be, besides storage."""

    def fill(
        self, step_path: str, summary: Mapping[str, Any], leaves: Mapping[Path, TensorLeaf], rank: int
    ) -> Filled: ...


class Gather(Protocol):
    """The ranks that restore together; see `ckpt.ranks.Ranks`."""

    @property
    def rank(self) -> int: ...
    def __call__(self, payload: bytes) -> list[bytes]: ...


class Alone:
    """One rank that restores what is its own without a word to the others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, payload: bytes) -> list[bytes]:
        return [payload]
