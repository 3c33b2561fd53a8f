"""Exchanges of descriptions between simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.planning.description import StateDescription
from ckpt.planning.exchange import Exchange


class _NextRound(Exception):
    """Ends a simulated exchange at a round for which the payloads of the other ranks are not known yet."""


class _Gather:
    """One rank of all-gathers with known results."""

    def __init__(self, rank: int, rounds: list[list[bytes]]) -> None:
        self.rank = rank
        self.payloads: list[bytes] = []
        self._rounds = rounds

    def __call__(self, payload: bytes) -> list[bytes]:
        self.payloads.append(payload)
        if len(self.payloads) > len(self._rounds):
            raise _NextRound
        return self._rounds[len(self.payloads) - 1]


def exchange_all(descriptions: Sequence[StateDescription]) -> tuple[list[list[StateDescription]], list[list[bytes]]]:
    """Return what `exchange` returns on each rank, and the payloads of each round by rank.

    Raises what it raises on rank 0, after checking that the others raise the same.
    """
    rounds: list[list[bytes]] = []
    while True:
        gathers = [_Gather(rank, rounds) for rank in range(len(descriptions))]
        results: list[list[StateDescription]] = []
        errors: list[Exception] = []
        for own, gather in zip(descriptions, gathers, strict=True):
            try:
                exchange = Exchange(own)
                results.append(exchange.finish(gather(exchange.told), gather))
            except _NextRound:
                pass
            except Exception as error:
                errors.append(error)
        if errors:
            assert len({(type(error), str(error)) for error in errors}) == 1
            assert len(errors) == len(descriptions)
            raise errors[0]
        assert len({len(gather.payloads) for gather in gathers}) == 1  # the collectives of all ranks match
        if results:
            return results, rounds
        rounds.append([gather.payloads[-1] for gather in gathers])
