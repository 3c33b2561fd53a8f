"""The options of a `Checkpointer` by concern: snapshots in memory, the way of a save to its files, and failed saves.

Beside them stand `Keep` (`ckpt.saving.retention`), `Mirror` (`ckpt.mirroring.options`) and `ExportOptions`
(`ckpt.exporting.options`). All are frozen, and checked when they are made.
"""

from __future__ import annotations

import ipaddress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, Literal

from ckpt.arguments import check_choice, check_flag, check_number, duration, in_seconds, whole_number
from ckpt.pace import Pace, pace_of
from ckpt.planning.chunk_grid import GridOptions
from ckpt.replication.connection import MIN_BANDWIDTH
from ckpt.storage.compression import MAX_FRAME_BYTES, Compression
from ckpt.storage.names import DATABASE_CHUNKS

__all__ = ["FailedSaves", "Snapshots", "Staging"]

_GRID = GridOptions()


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Steps that are held in memory, so that a restart restores them: ``Checkpointer(root, snapshots=Snapshots(1))``.

    every: `Checkpointer.step` keeps the steps that are multiples of this, or those that a policy says, such as
        ``ckpt.Budget(0.005)``; None: only `Checkpointer.snapshot` makes snapshots. What is saved is held in memory, too
    replicas: 1 has each rank's share of snapshots sent to a rank on another node, beside training, so that `restore`
        finds them when a node is lost
    bandwidth: of replicas: each rank sends at most so many bytes per second; None: no limit
    host: of replicas: the address of this node at which it receives; None: the one that reaches MASTER_ADDR
    place: of replicas: the name of the unit that fails as a whole, such as a rack; None: the node
    linger: for so long (a timedelta, or seconds) after the death of a trainer a process of its rank keeps its
        snapshots, so that the next processes of the same job on the same node can restore them; `Checkpointer.close`
        gives them up
    linger_id: a text that is the same for all processes of a job that use one root; None: the run id of ckpt_launcher
        or torchrun

    See docs/snapshots.md. TypeError or ValueError for an option of another type or out of range.
    """

    every: Pace | int | None = None
    _: KW_ONLY
    replicas: Literal[0, 1] = 0
    bandwidth: float | None = None
    host: str | None = None
    place: str | None = None
    linger: timedelta | float | None = None
    linger_id: str | None = None

    def __post_init__(self) -> None:
        pace_of("Snapshots: every", self.every)
        check_choice("Snapshots: replicas", self.replicas, (0, 1))
        of_replicas = {"bandwidth": self.bandwidth, "host": self.host, "place": self.place}
        if not self.replicas and (given := [name for name, value in of_replicas.items() if value is not None]):
            raise ValueError(f"Snapshots: {', '.join(given)} is about replicas, and there are none: add replicas=1")
        if self.bandwidth is not None:
            check_number("Snapshots: bandwidth", self.bandwidth, "bytes per second")
            if self.bandwidth < MIN_BANDWIDTH:
                raise ValueError(
                    f"Snapshots: bandwidth must be at least {MIN_BANDWIDTH} bytes per second, not {self.bandwidth!r}"
                )
        if self.host is not None:
            _check_address(self.host)
        for name, text in (("place", self.place), ("linger_id", self.linger_id)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"Snapshots: {name} must be a text, not {text!r:.80} ({type(text).__name__})")
        if self.linger is not None:
            object.__setattr__(self, "linger", duration("Snapshots: linger", self.linger))
        elif self.linger_id is not None:
            raise ValueError("Snapshots: linger_id has a meaning only with linger, which says how long memory is kept")

    @property
    def pace(self) -> Pace | None:
        """`every` as a policy."""
        return pace_of("Snapshots: every", self.every)

    @classmethod
    def of(cls, given: Any) -> Snapshots | None:
        """Return the argument `snapshots` of a `Checkpointer`: a whole number, or a policy, stands for `every`."""
        if given is None or isinstance(given, cls):
            return given
        if type(given) is int or isinstance(given, Pace):
            pace_of("snapshots", given)
            return cls(given)
        raise TypeError(
            "snapshots must be a number of steps, such as 10, or ckpt.Snapshots(every=10, ...), not "
            f"{given!r:.80} ({type(given).__name__})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The way of a save through shared memory to its files: ``Checkpointer(root, staging=Staging(slots=3))``.

    slots: at most so many staging slots have memory, one less while each save finds one free; None: 2, with
        `snapshots` 3, with replicas 5
    max_host_bytes: the slots of a rank together have at most so many bytes; a state of which a rank would need more is
        refused on all ranks: `StateError`
    overlap: on CUDA, training goes on while the copies run; the optimizers in the state wait for them before their
        next step
    on_divergence: what is done when parameters or optimizer state that several ranks have differ, as far as the
        samples that each save takes show: "error" abandons the save on all ranks, "warn" publishes a mixture and logs
        it, "ignore" takes no samples
    compression: "zstd", "lz4", or a `Compression` with its level; None: chunks are not compressed (see docs/guide.md)
    threads: so many write at once in the writer
    file_bytes: a rank begins a new file when one has so many bytes
    inner_bytes: what is read and verified at once has at most so many bytes
    reuse_files: a save writes over the files of the step that was removed last, if it has the same structure, instead
        of making new ones; until then, or `Checkpointer.close`, they stay on the disk. None: where steps are removed,
        in a directory, without `compression` and `node_local`. `Checkpointer.restore` and inspect_ckpt keep a step
        that they read from being removed; another program that copies or maps the files of a step while it is removed
        can see bytes of a later one (see docs/guide.md)
    link_unchanged: a save links the files that hold the same as in the step before, instead of writing them: frozen
        weights are on the disk once. Several steps then share one copy of these bytes (see docs/guide.md)
    database_chunks: a step of at most so many chunks is a database of tensorstore, too (see docs/format.md); of a
        larger one, `inspect_ckpt index` makes it; 0: none is made

    TypeError or ValueError for an option of another type or out of range.
    """

    slots: int | None = None
    max_host_bytes: int | None = None
    overlap: bool = False
    on_divergence: Literal["error", "warn", "ignore"] = "error"
    compression: Compression | str | None = None
    threads: int = 6
    file_bytes: int = _GRID.file_bytes
    inner_bytes: int = _GRID.inner_bytes
    reuse_files: bool | None = None
    link_unchanged: bool = False
    database_chunks: int = DATABASE_CHUNKS

    def __post_init__(self) -> None:
        if self.slots is not None:
            whole_number("Staging: slots", self.slots)
        if self.max_host_bytes is not None:
            whole_number("Staging: max_host_bytes", self.max_host_bytes, unit="bytes")
        check_flag("Staging: overlap", self.overlap)
        check_choice("Staging: on_divergence", self.on_divergence, ("error", "warn", "ignore"))
        object.__setattr__(self, "compression", Compression.of(self.compression))
        whole_number("Staging: threads", self.threads)
        whole_number("Staging: file_bytes", self.file_bytes, unit="bytes")
        whole_number("Staging: inner_bytes", self.inner_bytes, unit="bytes")
        if self.compression is not None and self.inner_bytes > MAX_FRAME_BYTES:
            raise ValueError(f"Staging: with compression inner_bytes must be at most {MAX_FRAME_BYTES}")
        if self.reuse_files is not None:
            check_flag("Staging: reuse_files", self.reuse_files)
        check_flag("Staging: link_unchanged", self.link_unchanged)
        whole_number("Staging: database_chunks", self.database_chunks, least=0, unit="chunks")

    @classmethod
    def of(cls, given: Any) -> Staging:
        """Return the argument `staging` of a `Checkpointer`."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        raise TypeError(f"staging must be ckpt.Staging(slots=3, ...), not {given!r:.80} ({type(given).__name__})")

    def slots_for(self, snapshots: Snapshots | None) -> int:
        """Return the number of slots. ValueError if there are too few for `snapshots`."""
        replicas = snapshots is not None and snapshots.replicas
        if self.slots is None:
            return 5 if replicas else 3 if snapshots is not None else 2
        if replicas and self.slots < 4:
            raise ValueError(
                f"replicas need at least four slots, two of them to hold what is replicated, not {self.slots}"
            )
        if snapshots is not None and self.slots < 2:
            raise ValueError(
                f"snapshots need at least two slots, one to hold one while the next is made, not {self.slots}"
            )
        return self.slots


@dataclass(frozen=True, slots=True)
class FailedSaves:
    """The failed saves after which training goes on: ``Checkpointer(root, on_failed_save=FailedSaves(in_a_row=5))``.

    in_a_row: the save that makes it so many without a published step between them is raised; None: however many
    longest: the save that fails when saves have failed for so long (a timedelta, or seconds), without a published step
        between them, is raised; None: however long

    A failure that no later save makes good is always raised: a state that cannot be stored, a step that is published
    already, a root that another job owns. TypeError or ValueError for an option of another type or out of range.
    """

    in_a_row: int | None = None
    longest: timedelta | float | None = timedelta(hours=6)

    def __post_init__(self) -> None:
        if self.in_a_row is not None:
            whole_number("FailedSaves: in_a_row", self.in_a_row, unit="saves")
        if self.longest is not None:
            object.__setattr__(self, "longest", duration("FailedSaves: longest", self.longest))

    @classmethod
    def of(cls, given: Any) -> FailedSaves | None:
        """Return the argument `on_failed_save` of a `Checkpointer`; None for "raise"."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str) and given in ("raise", "warn"):
            return None if given == "raise" else cls()
        raise (ValueError if isinstance(given, str) else TypeError)(
            "on_failed_save must be 'raise', 'warn' or ckpt.FailedSaves(in_a_row=5, ...), not "
            f"{given!r:.80} ({type(given).__name__})"
        )

    def is_over(self, in_a_row: int, seconds: float) -> bool:
        """Return whether so many failed saves in a row, of which the first was so long ago, are too many."""
        too_many = self.in_a_row is not None and in_a_row >= self.in_a_row
        return too_many or (self.longest is not None and seconds >= in_seconds(self.longest))

    def __str__(self) -> str:
        limits = [f"{self.in_a_row} in a row"] if self.in_a_row is not None else []
        return " or ".join(limits + ([f"failures for {self.longest}"] if self.longest is not None else []))


def _check_address(host: Any) -> None:
    if not isinstance(host, str):
        raise TypeError(f"Snapshots: host must be an IP address, not {host!r:.80} ({type(host).__name__})")
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(f"Snapshots: host must be the IP address of a network interface: {error}") from None
