"""The systems the suite compares, by name. One is imported only when it is measured."""

import importlib
import importlib.metadata
from dataclasses import dataclass

from tools.bench.systems.base import Place, System

__all__ = ["SYSTEMS", "Entry", "Place", "System", "make_system", "version_of"]

_HERE = "tools.bench.systems"


@dataclass(frozen=True)
class Entry:
    """Where a system is and what it is called. `package` is the distribution it needs; what it `cannot` do is left out.

    `added` says which part of "durable" the system does not do by itself and the harness does for it. One that differs
    from another in saves alone is measured in these alone.
    """

    title: str
    module: str
    factory: str
    package: str
    added: str
    one_rank_only: bool = False
    reshards: bool = False
    from_memory: bool = False
    slots: int = 1
    only_saves: bool = False


_TORCH_DIR = "fsync of the directory"
_ALL = "fsync of every file and directory"

SYSTEMS = {
    "ckpt": Entry("ckpt", "ours", "Ours", "torch", "nothing", reshards=True, from_memory=True, slots=2),
    "ckpt_reuse": Entry(
        "ckpt, files reused", "ours", "Reused", "torch", "nothing", from_memory=True, slots=2, only_saves=True
    ),
    "ckpt_packed": Entry(
        "ckpt, packed", "ours", "Packed", "torch", "nothing", reshards=True, from_memory=True, slots=2
    ),
    "ckpt_packed_reuse": Entry(
        "ckpt, packed, reused", "ours", "PackedReused", "torch", "nothing", from_memory=True, slots=2, only_saves=True
    ),
    "torch_save": Entry("torch.save", "torch_save", "TorchSave", "torch", "fsync, rename of the directory", slots=0),
    "safetensors": Entry("safetensors", "safetensors", "Safetensors", "safetensors", "fsync, rename", slots=0),
    "dcp": Entry("DCP, sync", "dcp", "Dcp", "torch", _TORCH_DIR, reshards=True, slots=0),
    "dcp_thread": Entry("DCP, thread", "dcp", "DcpThread", "torch", _TORCH_DIR, reshards=True),
    "dcp_process": Entry("DCP, process", "dcp", "DcpProcess", "torch", _TORCH_DIR, reshards=True),
    "torchsnapshot": Entry("torchsnapshot", "torchsnapshot", "Torchsnapshot", "torchsnapshot", _ALL),
    "torch_checkpointing": Entry(
        "torch_checkpointing", "torch_checkpointing", "TorchCheckpointing", "torch_checkpointing", _ALL
    ),
    "orbax": Entry("orbax", "orbax", "Orbax", "orbax-checkpoint", _ALL, one_rank_only=True),
}


def version_of(name: str) -> str | None:
    """The version of the package a system needs; None if it is not installed."""
    try:
        return importlib.metadata.version(SYSTEMS[name].package)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_system(name: str, place: Place) -> System:
    """A new one, that has started nothing."""
    entry = SYSTEMS[name]
    system: System = getattr(importlib.import_module(f"{_HERE}.{entry.module}"), entry.factory)(place)
    return system
