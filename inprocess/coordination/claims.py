"""Claims of processes to be ranks of one job, where they meet at an address that other jobs may use, too.

Two jobs that are started with the same MASTER_PORT meet at one server, and either of their ranks 1 may come first. No
number tells which of them belongs to the rank 0 that serves. What they have in common does: the processes of a job have
one program, arguments, environment and folder, mostly one step of the scheduler, and on one host mostly one parent. So
rank 0 takes for each rank the claim that is most like its own, and none that is more like another rank 0 that was seen.
If all that it takes are just like its own, it does so at once; else it waits a moment for better ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from inprocess.attribution import compact_ranks
from inprocess.exception import StoreError
from inprocess.ipc.process import Process
from inprocess.ipc.proofs import fresh_nonce
from inprocess.rank_environment import scheduled_ranks

# Variables that may differ between ranks of one job, or that are secrets.
_OF_ONE_RANK = re.compile(
    r".*RANK.*|.*(SECRET|TOKEN|PASSW|CREDENTIAL|KEY).*|(SLURM|OMPI_|PMI|PRTE|MPI_|MPIR|I_MPI|HYD|MV2_|PALS_|SSH_|XDG_).*"
    r"|.*VISIBLE_DEVICES|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|HOST(NAME)?|PWD|OLDPWD|SHLVL|_|TMPDIR|WINDOWID|TTY"
)
_ENTERED = " entered"
_RANK_ARGUMENT = re.compile(r"--?([a-z]+[-_])?rank(=.*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankClaim:
    """The claim of a process to be `rank` of `world_size`.

    `marks` are hashes of what the processes of a job have in common, `parent` is that on its `host`.
    """

    id: str
    rank: int
    world_size: int
    host: str
    parent: str
    name: str
    marks: frozenset[str]

    @classmethod
    def of_this_process(cls, rank: int, world_size: int) -> RankClaim:
        """Return a new claim of the calling process."""
        process, parent = Process.here(), os.getppid()
        name = f"process {process.pid} on {os.uname().nodename}"
        return cls(fresh_nonce().hex(), rank, world_size, process.host, str(parent), name, _marks())

    def encode(self) -> str:
        """Return it as JSON."""
        about = [self.id, self.rank, self.world_size, self.host, self.parent, self.name]
        return json.dumps([*about, sorted(self.marks)], separators=(",", ":"))

    @classmethod
    def decode(cls, data: bytes) -> RankClaim:
        """Return the claim that `encode` has encoded. ValueError for anything else."""
        try:
            id_, rank, world_size, host, parent, name, marks = json.loads(data)
            return cls(str(id_), int(rank), int(world_size), str(host), str(parent), str(name), frozenset(marks))
        except (TypeError, ValueError) as error:
            raise ValueError(f"this is not the claim of a rank: {data[:100]!r}") from error

    def difference(self, other: RankClaim) -> int:
        """Return in how many marks the two processes differ; of one job it is mostly 0."""
        return len(self.marks ^ other.marks) + (self.host == other.host and self.parent != other.parent)


class RankClaims:
    """The claims for the ranks of the job of `own`, which is rank 0; of each rank, one is taken.

    `certain`: no other job can meet here, so all claims of a rank are as good.
    """

    def __init__(self, own: RankClaim, *, certain: bool = False) -> None:
        self._own = own
        self._certain = certain
        self._rivals: list[RankClaim] = []  # other ranks 0
        self._by_rank: dict[int, list[RankClaim]] = {rank: [] for rank in range(1, own.world_size)}

    def add(self, claim: RankClaim) -> str | None:
        """Add a claim; return why it is none of this job, if that is clear."""
        if claim.world_size != self._own.world_size:
            return f"it is one of {claim.world_size} ranks, and this job has {self._own.world_size}"
        if claim.rank == 0:
            self._rivals.append(claim)
            return "this job has a rank 0"
        if claim.rank not in self._by_rank:
            return f"a job of {claim.world_size} has no such rank"
        self._by_rank[claim.rank].append(claim)
        return None

    @property
    def taken(self) -> dict[int, RankClaim]:
        """The best claim of each rank, of those that have one."""
        found = {rank: self._best(claims) for rank, claims in self._by_rank.items()}
        return {rank: claim for rank, claim in found.items() if claim is not None}

    @property
    def is_full(self) -> bool:
        """Whether each rank has a claim."""
        return len(self.taken) == len(self._by_rank)

    @property
    def is_alike(self) -> bool:
        """Whether all claims that are taken are just like that of rank 0."""
        return all(self._difference(claim) == 0 for claim in self.taken.values())

    def missing(self) -> str:
        """Return the ranks that have no claim, and which claims are of another job, for a message."""
        taken = self.taken
        text = f"missing: {compact_ranks(set(self._by_rank) - set(taken))}"
        others = self._rivals + [
            each for claims in self._by_rank.values() for each in claims if each not in taken.values()
        ]
        if others:
            names = ", ".join(f"{claim.name} as rank {claim.rank}" for claim in others[:4])
            text += f"; of another job, which uses the same port: {names}"
        return text

    def _best(self, claims: list[RankClaim]) -> RankClaim | None:
        ours = [
            claim
            for claim in claims
            if self._certain or not any(rival.difference(claim) < self._own.difference(claim) for rival in self._rivals)
        ]
        return min(ours, key=self._difference, default=None)  # of equal ones the first

    def _difference(self, claim: RankClaim) -> int:
        return 0 if self._certain else self._own.difference(claim)


class RankSlot:
    """The one process that acts as a rank in the first iteration, as the store of the job has it.

        no value ──claim──▶ its id ──enter──▶ its id, and "entered"
                              │ ▲
                              ╰─┴─ take_over, by the replacement of a process that has ended

    So two processes with the same rank never both take part, and one that has ended before the job began is replaced.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._key = f"slot/{rank}"
        self._id = fresh_nonce().hex()

    def claim(self) -> None:
        """Become the rank. StoreError if another process is."""
        self._change("", self._id)

    def take_over(self) -> bool:
        """Become the rank in the place of a process that has ended; return whether that had not entered."""
        held = self._store.compare_set(self._key, "", self._id).decode()
        while held != self._id:
            if held.endswith(_ENTERED):
                return False
            held = self._store.compare_set(self._key, held, self._id).decode()
        return True

    def enter(self) -> None:
        """Begin to act as the rank. StoreError if another process does."""
        self._change(self._id, self._id + _ENTERED)

    def _change(self, before: str, after: str) -> None:
        if self._store.compare_set(self._key, before, after).decode() != after:
            raise StoreError(
                f"another process is rank {self._rank} of this job already: two jobs use the same store, or a process "
                "was started twice. Give each job a store, and a MASTER_PORT, of its own"
            )


def _marks() -> frozenset[str]:
    marks = [f"{name}={value}" for name, value in os.environ.items() if not _OF_ONE_RANK.fullmatch(name)]
    before = ""
    for number, argument in enumerate(getattr(sys, "argv", [])):
        if not _RANK_ARGUMENT.fullmatch(argument) and not _RANK_ARGUMENT.fullmatch(before):
            marks.append(f"{number} {argument}")
        before = argument
    scheduled = scheduled_ranks()
    if scheduled is not None and scheduled.job:  # also where the program has numbers of its own, and may span steps
        marks.append(f"of {scheduled.job}")
    with contextlib.suppress(OSError):  # it was removed
        marks.append(f"in {os.getcwd()}")
    return frozenset(hashlib.sha256(mark.encode(errors="surrogateescape")).hexdigest()[:8] for mark in marks)
