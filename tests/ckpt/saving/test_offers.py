"""What ranks conclude from what they hold in memory: which snapshots are whole, and of the lineage training is on."""

import pytest

from ckpt.saving.offers import Fence, Offer, Whole, in_lineage, pruned, whole_snapshots
from ckpt.saving.share import ShareOf
from ckpt.storage.names import SaveId


def _save(step: int) -> SaveId:
    return SaveId(step, 0, f"{step:016x}")


def _share(step: int, rank: int, world_size: int = 4, restart: int = 0) -> ShareOf:
    return ShareOf(_save(step), rank, world_size, restart)


def _shares(step: int, *ranks: int, world_size: int = 4, restart: int = 0) -> tuple[ShareOf, ...]:
    return tuple(_share(step, rank, world_size, restart) for rank in ranks)


def test_an_offer_survives_its_encoding() -> None:
    offer = Offer("a node", (*_shares(7, 0, 1, 3), *_shares(9, 2, restart=3)), ((1, 5), (4, 8)))
    assert Offer.decode(offer.encode()) == offer


def test_an_offer_of_many_ranks_is_small() -> None:
    offer = Offer("x" * 60, tuple(_share(step, rank, 100_000) for step in (1, 2, 3) for rank in range(64)))
    assert len(offer.encode()) < 400


def test_whole_is_what_all_shares_of_are_somewhere() -> None:
    offers = [Offer("a", _shares(8, 0, 1) + _shares(9, 0, 1)), Offer("b", _shares(8, 2, 3) + _shares(9, 3))]
    assert whole_snapshots(offers) == [Whole(_save(8), 4, ((0,), (0,), (1,), (1,)))]


def test_the_newest_comes_first() -> None:
    offers = [Offer("a", _shares(8, 0, 1, 2, 3) + _shares(12, 0, 1, 2, 3) + _shares(9, 0, 1, 2, 3))]
    assert [snapshot.save.step for snapshot in whole_snapshots(offers)] == [12, 9, 8]


def test_shares_of_other_world_sizes_do_not_mix() -> None:
    assert whole_snapshots([Offer("a", _shares(8, 0, world_size=2)), Offer("a", _shares(8, 1, world_size=3))]) == []


@pytest.mark.parametrize(
    ("restart", "step", "fences", "is_in"),
    [
        (0, 100, ((1, 100),), True),  # the one that was restored
        (0, 101, ((1, 100),), False),  # rolled back
        (1, 130, ((1, 100),), True),  # of the iteration that went on from there
        (1, 130, ((1, 100), (2, 110)), False),
        (0, 105, ((1, 100), (2, 110)), False),  # although the later restore went back to a later step
        (0, 99, ((1, 100), (2, 110)), True),
        (2, 10, ((1, 100), (2, 5)), True),
        (0, 0, ((1, -1),), False),  # training began anew
        (0, 7, (), True),
    ],
)
def test_lineage(restart: int, step: int, fences: tuple[Fence, ...], is_in: bool) -> None:
    assert in_lineage(_share(step, 0, restart=restart), pruned(fences)) is is_in


def test_a_rank_that_was_not_there_is_told_by_the_others() -> None:
    """A spare still has what all others have given up: it was rolled back."""
    spare = Offer("a", _shares(120, 0, 1, 2, 3))
    assert [snapshot.save.step for snapshot in whole_snapshots([spare])] == [120]
    assert whole_snapshots([spare, Offer("a", (), ((1, 100),))]) == []


def test_fences_are_few() -> None:
    many = tuple((index, 10 * index) for index in range(1, 1000))
    left = pruned(many)
    assert len(left) == 32
    assert left[-1] == (999, 9990)
    assert not in_lineage(_share(1, 0, restart=5), left)  # what came after it is not known any more
    assert in_lineage(_share(9985, 0, restart=998), left)
    assert pruned([(1, 100), (2, 50), (3, 60)]) == ((2, 50), (3, 60))


def test_who_lacks_memory_of_its_node() -> None:
    whole = Whole(_save(8), 2, ((0,), (0, 1)))
    assert whole.lacks([Offer("a"), Offer("a")])  # rank 1 cannot read share 0
    assert not whole.lacks([Offer("a"), Offer("b")])
    assert not Whole(_save(8), 2, ((0, 1), (0, 1))).lacks([Offer("a"), Offer("a")])
