"""`memory`: which processes of this user hold checkpoint memory on this node, as the kernel and the memory itself say.

Reads /proc and nothing else: no process is asked, and none is stopped. Whatever a process has put into its memory is
data here, decoded with checks and limits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.saving.share import HEADER_BYTES, ShareDocuments, ShareHeader
from ckpt.storage.documents import MAX_DOCUMENT_BYTES
from ckpt.storage.names import parse_save_name

from .output import Exit, Output, duration, plural, size

HELP = "show which processes of this user hold checkpoint memory on this node, and which steps"

_KINDS = MappingProxyType(
    {"ckpt-writer": "writer", "ckpt-replicas": "replica process", "ckpt-keeper": "keeper", "ckpt-mirror": "mirror"}
)
_SLOT, _REPLICA, _STATUS = "/memfd:ckpt-slot", "/memfd:ckpt-replica", "/memfd:ckpt-keeper"
_SEARCHED = 64 << 20  # bytes before the end of a region in which its header is looked for
_READ_AT_ONCE = 1 << 20
_MAX_STATUS = 64 << 10
_SHOWN_STEPS = 4


@dataclass(frozen=True)
class HeldShare:
    """What a region holds: the share of a rank of a save, whole or not."""

    step: int
    save: str
    whole: bool
    rank: int | None = None
    world_size: int | None = None


@dataclass
class Holder:
    """A process with checkpoint memory. `bytes` are those of the pages that its regions have, `age_s` its own age.

    Of a process that keeps the memory of a dead trainer, `expires_in_s` is the time left.
    """

    pid: int
    kind: str
    job: str | None = None
    root: str | None = None
    rank: int | None = None
    trainer: int | None = None
    age_s: float | None = None
    expires_in_s: float | None = None
    bytes: int = 0
    regions: int = 0
    shares: list[HeldShare] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    found: list[Holder] = []
    sizes: dict[tuple[int, int], int] = {}
    shares: dict[tuple[int, int], HeldShare | None] = {}
    for pid in _own_processes():
        with contextlib.suppress(OSError):  # it has ended, or may not be looked at
            holder = _look(pid, sizes, shares)
            if holder is not None:
                found.append(holder)
    total = sum(sizes.values())
    columns = (">pid", "process", "job", ">rank", "steps", ">memory", ">age", "ends")
    if found:
        output.table(columns, [_cells(holder) for holder in found])
        output.line(f"{size(total)} in {plural(len(sizes), 'region')}; what several processes hold counts once")
    else:
        output.line("no process of this user holds checkpoint memory on this node")
    output.json({"bytes": total, "regions": len(sizes), "processes": [asdict(holder) for holder in found]})
    return Exit.WHOLE


def _cells(holder: Holder) -> tuple[str, ...]:
    steps = sorted({share.step for share in holder.shares if share.whole}, reverse=True)
    shown = ", ".join(map(str, steps[:_SHOWN_STEPS])) + (", ..." if len(steps) > _SHOWN_STEPS else "")
    if holder.expires_in_s is not None:
        ends = f"in {duration(max(0.0, holder.expires_in_s))}"
    else:
        ends = "with its trainer" if holder.kind == "keeper" else ""
    return (
        str(holder.pid),
        holder.kind,
        holder.job or "",
        "" if holder.rank is None else str(holder.rank),
        shown,
        size(holder.bytes),
        "" if holder.age_s is None else duration(holder.age_s),
        ends,
    )


# -- processes ---------------------------------------------------------------------------------------------------------


def _own_processes() -> Iterator[int]:
    for name in sorted(filter(str.isdecimal, os.listdir("/proc")), key=int):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                yield int(name)


def _look(
    pid: int, sizes: dict[tuple[int, int], int], shares: dict[tuple[int, int], HeldShare | None]
) -> Holder | None:
    """Return what a process holds; None if it holds nothing. `sizes` and `shares` are those of all regions so far."""
    holder: Holder | None = None
    seen: set[tuple[int, int]] = set()
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{fd}")
            if not target.startswith((_SLOT, _REPLICA, _STATUS)):
                continue
            with _opened(f"{folder}/{fd}") as region:
                found = os.fstat(region)
                key = found.st_dev, found.st_ino
                if key in seen:
                    continue
                seen.add(key)
                holder = holder or _described(pid)
                if target.startswith(_STATUS):
                    _read_status(region, holder)
                    continue
                sizes[key] = found.st_blocks * 512
                if key not in shares:
                    shares[key] = _share(region, found.st_size)
                holder.bytes += sizes[key]
                holder.regions += 1
                share = shares[key]
                if share is not None:
                    holder.shares.append(share)
    if holder is not None:
        holder.shares.sort(key=lambda share: (share.step, share.save, share.rank or 0))
    return holder


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Yield a descriptor of memory, to be read. OSError if it is something else."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no memory")
        yield fd
    finally:
        os.close(fd)


def _described(pid: int) -> Holder:
    """Return what /proc says about a process."""
    name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    holder = Holder(pid, _KINDS.get(name, "trainer"))
    environment = dict(
        entry.split("=", 1)
        for entry in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        if "=" in entry
    )
    holder.job = environment.get("TORCHELASTIC_RUN_ID")
    rank = environment.get("RANK", "")
    holder.rank = int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 10 else None
    with contextlib.suppress(ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        holder.age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return holder


def _read_status(fd: int, holder: Holder) -> None:
    """Take over what a holder says about itself, as far as it is what it should be."""
    try:
        status = json.loads(os.pread(fd, _MAX_STATUS, 0))
    except (ValueError, RecursionError):
        return
    if not isinstance(status, dict):
        return

    def valid(name: str, *kinds: type) -> Any:
        value = status.get(name)
        return value if type(value) in kinds and not (isinstance(value, str) and len(value) > 4096) else None

    holder.job, holder.root = valid("job", str), valid("root", str)
    holder.rank, holder.trainer = valid("rank", int), valid("trainer", int)
    until = valid("until", int, float)
    if until is not None:
        holder.expires_in_s = float(until) - time.monotonic()


# -- memory ------------------------------------------------------------------------------------------------------------


def _share(fd: int, nbytes: int) -> HeldShare | None:
    """Return what a region holds; None if it is empty, or nothing can be recognized.

    Its header is the last page of the slot, before the documents, and in a replica not at the end of the file.
    """
    end = nbytes // HEADER_BYTES * HEADER_BYTES
    least = max(0, end - _SEARCHED)
    while end > least:
        begin = max(least, end - _READ_AT_ONCE)
        data = os.pread(fd, end - begin, begin)
        for at in range(len(data) // HEADER_BYTES * HEADER_BYTES - HEADER_BYTES, -1, -HEADER_BYTES):
            header = ShareHeader.decode(data[at : at + HEADER_BYTES])
            save = None if header.save_name is None else parse_save_name(header.save_name)
            if save is not None:
                found = HeldShare(save.step, save.name, header.is_whole)
                return _with_owner(fd, begin + at + HEADER_BYTES, header, found)
        end = begin
    return None


def _with_owner(fd: int, behind: int, header: ShareHeader, found: HeldShare) -> HeldShare:
    """Add whose share it is. One whose documents are damaged is not whole."""
    if not header.is_whole:
        return found
    damaged = HeldShare(found.step, found.save, False)
    if max(header.about, header.index, header.part) > MAX_DOCUMENT_BYTES:
        return damaged
    try:
        about = os.pread(fd, header.about, behind)
        part = os.pread(fd, header.part, behind + header.about + header.index)
        of = ShareDocuments.decode(about, b"", part).of
    except (CheckpointError, OSError):
        return damaged
    return HeldShare(found.step, found.save, of.save.name == found.save, of.rank, of.world_size)
