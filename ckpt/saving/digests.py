"""Digests of replicated data in the part manifests, and their comparison by the coordinator.

Each rank writes a digest of a sample of each replicated tensor (see `samples`), and of each value. Ranks choose the
same samples without communication. The digests are compared before a save is published.

Free of torch: runs in writer processes, and where a save of an earlier run is decided.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ckpt.errors import StateError
from ckpt.native import crc32c
from ckpt.paths import display
from ckpt.ranks.rounds import named

_log = logging.getLogger("ckpt")
Tolerance = Literal["error", "warn", "ignore"]
"""What is done about parameters that differ between ranks."""

Warn = Callable[[list[str], bool], None]
"""Is called with the names that differ, and whether the step mixes ranks (else it has the lowest rank's values)."""

ENTRY = np.dtype([("name", "<u8"), ("window", "<u8"), ("digest", "<u4")])
"""A sample: the key of its name, its place in the tensor, and its CRC-32C. Only equal places can be compared."""

_ERROR, _MIXED, _LOWEST = "error", "mixed", "lowest"
_SHOWN = 20
_NAME_CHARACTERS = 200


class InSlot(NamedTuple):
    """A sample of a parameter (or another tensor) that is in the slot once the copies from the device are."""

    is_parameter: bool
    name: int
    window: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Digests:
    """The samples of one rank in one save, as records of ENTRY: of parameters, and of what the lowest rank writes."""

    tolerance: Tolerance
    parameters: bytes
    others: bytes
    in_slot: tuple[InSlot, ...] = ()

    def document(self, region: memoryview) -> dict[str, str]:
        """Return the member of the part manifest. `region` is the slot, with all copies in it."""
        late: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        for sample in self.in_slot:
            digest = crc32c(region[sample.offset : sample.offset + sample.nbytes])
            late[sample.is_parameter].append((sample.name, sample.window, digest))
        parameters = self.parameters + np.array(late[True], ENTRY).tobytes()
        others = self.others + np.array(late[False], ENTRY).tobytes()
        members = {_ERROR if self.tolerance == "error" else _MIXED: parameters, _LOWEST: others}
        return {member: base64.b64encode(entries).decode() for member, entries in members.items() if entries}


def name_key(name: Sequence[str | int]) -> int:
    """Return 64 bits that identify the name of a leaf."""
    return int.from_bytes(hashlib.blake2b(repr(tuple(name)).encode(), digest_size=8).digest(), "little")


def check_replicas(
    documents: Sequence[Mapping[str, str]], names: Callable[[], Iterable[Sequence[str | int]]], warn: Warn
) -> None:
    """Compare the digests of all ranks, in order.

    `names` are those of all leaves; it is called only if something differs. Raises StateError for what is configured as
    an error, and calls `warn` for the rest.
    """
    different = {member: _differing(documents, member) for member in (_ERROR, _MIXED, _LOWEST)}
    if not any(different.values()):
        return
    known = {name_key(name): display(tuple(name)) for name in names()}

    def said(member: str) -> list[str]:
        texts = sorted(f"{known.get(key, '?')[:_NAME_CHARACTERS]} ({how})" for key, how in different[member].items())
        return texts[:_SHOWN] + ([f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else [])

    if different[_ERROR]:
        raise StateError(
            f"ranks have {len(different[_ERROR])} parameter(s) or tensor(s) of optimizers different that should be the "
            f"same: {'; '.join(said(_ERROR))}. Is a seed, a broadcast or a gradient reduction missing? Put what each "
            "rank has for itself into ckpt.PerRank; ckpt.Staging(on_divergence='warn') saves the state nevertheless"
        )
    for member in (_MIXED, _LOWEST):
        if different[member]:
            warn(said(member), member == _MIXED)


def _differing(documents: Sequence[Mapping[str, str]], member: str) -> dict[int, str]:
    """Return the key of each name that differs, and on which ranks."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, document in enumerate(documents):
        ranks_by_text.setdefault(document.get(member, ""), []).append(rank)
    if len(ranks_by_text) == 1:  # nearly always
        return {}
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for text, ranks in ranks_by_text.items():
        for name, window, digest in np.frombuffer(base64.b64decode(text), ENTRY).tolist():
            found.setdefault((name, window), {}).setdefault(digest, []).extend(ranks)
    return {name: _how(list(groups.values())) for (name, _), groups in found.items() if len(groups) > 1}


def _how(groups: list[list[int]]) -> str:
    first = min(groups, key=min)
    others = sorted(rank for group in groups if group is not first for rank in group)
    return f"{named(others)} unlike rank {min(first)}"


class DifferingNames:
    """The names of values that ranks have different; each is logged once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, step: int, names: Iterable[str], *, mixed: bool) -> None:
        """Log the names that are new. `mixed`: the step holds parts of the values of several ranks."""
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new:
            _log.warning(
                "step %d: ranks have different values of %s; the step holds %s. Put what each rank has for itself into "
                "ckpt.PerRank",
                step,
                "; ".join(new),
                "parts of the values of each rank" if mixed else "those of the lowest rank that has them",
            )
