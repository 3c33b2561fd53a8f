"""What ranks conclude from what they hold in memory: which snapshots are whole, and of the lineage training is on."""

from dataclasses import replace

import pytest

from ckpt.keeper.messages import MemoryRecord
from ckpt.saving.offers import (
    Earlier,
    Fence,
    LeftBranch,
    Offer,
    Start,
    Whole,
    agreed_start,
    before_published,
    in_lineage,
    pruned,
    whole_snapshots,
)
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


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("older", [(0, 3), (1, 0)])
def test_of_one_step_the_one_made_later_comes_first(names: tuple[str, str], older: tuple[int, int]) -> None:
    """Whatever their names. A rank that took the place of another counts anew."""
    saves = [SaveId(8, 0, name * 16) for name in names]
    made = [older, (1, 4)]
    shares = [
        tuple(ShareOf(save, rank, 2, restart, order - (2 * rank if order > 2 else 0)) for rank in range(2))
        for save, (restart, order) in zip(saves, made, strict=True)
    ]
    whole = whole_snapshots([Offer("a", (*shares[0], *shares[1]))])
    assert [snapshot.save for snapshot in whole] == saves[::-1]
    assert [snapshot.made for snapshot in whole] == made[::-1]


@pytest.mark.parametrize(
    ("made", "start", "expected"),
    [
        ((0, 6), 1, 1),  # after all snapshots of its step
        ((0, 4), 1, 2),  # between the two
        ((0, 2), 1, 3),
        (None, 1, 3),  # of an earlier start: training has gone on since
        (None, 0, 3),
    ],
)
def test_a_published_step_has_its_place_among_snapshots(
    made: tuple[int, int] | None, start: int, expected: int
) -> None:
    shares = [ShareOf(SaveId(step, 0, f"{order:016x}"), 0, 1, 0, order) for step, order in ((8, 3), (8, 5), (9, 7))]
    published = SaveId(8, 1763840000123, "0" * 16).name
    saves = () if made is None else ((published, *made),)
    offers = [Offer("a", tuple(shares), start=start), Offer("b", saves=saves, start=start)]
    assert before_published(published, whole_snapshots(offers), offers) == expected
    with_copy = ShareOf(SaveId(8, 1763840000123, "0" * 16), 0, 1, 0, 4)
    offers[0] = Offer("a", (*shares, with_copy), start=start)
    assert before_published(published, whole_snapshots(offers), offers) == 3


def test_a_branch_that_was_left_is_what_the_latest_restore_says() -> None:
    """A spare has missed the restore that has chosen this branch again."""
    spare = Offer("a", left=LeftBranch(1, frozenset({"x", "y"})), start=4)
    others = [Offer("b", left=LeftBranch(2, frozenset({"z"})), start=4)] * 2
    newcomer = Offer("c")
    assert agreed_start([newcomer, spare, *others]).left == LeftBranch(2, frozenset({"z"}))
    offer = Offer("b", (), ((1, 5),), left=LeftBranch(2, frozenset({"z", "a"})), saves=(("s", 1, 2),))
    assert Offer.decode(offer.encode()) == offer


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


# -- what earlier starts have left -------------------------------------------------------------------------------------


def _left(
    start: int,
    *shares: ShareOf,
    origin: int | None = None,
    token: int = 0,
    fences: tuple[Fence, ...] = (),
) -> Earlier:
    record = MemoryRecord(
        start, None if origin is None else _save(origin).name, token, [list(fence) for fence in fences]
    )
    return Earlier(record, shares)


def _steps(*offers: Offer) -> list[int]:
    return [snapshot.save.step for snapshot in whole_snapshots(offers)]


def test_an_offer_with_earlier_memory_survives_its_encoding() -> None:
    left = (_left(7, *_shares(8, 0, 1)), _left(5, origin=3, token=9, fences=((0, 4), (2, 3))))
    offer = Offer("a node", (), (), 12, "a save", 17, 1_700_000_000_000, left)
    assert Offer.decode(offer.encode()) == offer


def test_the_first_restore_of_a_start_takes_what_the_last_one_has_left() -> None:
    offers = [
        Offer("a", earlier=(_left(7, *_shares(8, 0, 1)),)),
        Offer("b", earlier=(_left(7, *_shares(8, 2, 3)), _left(5, *_shares(9, 0, 1, 2, 3)))),
    ]
    assert _steps(*offers) == [8]
    assert agreed_start(offers) == Start(7, is_earlier=True)


def test_later_restores_take_nothing_of_an_earlier_start() -> None:
    late = Offer("b", earlier=(_left(7, *_shares(8, 0, 1, 2, 3)),))
    assert _steps(Offer("a", start=9, fences=((0, 5),)), late) == []
    assert _steps(Offer("a", _shares(2, 0, 1, 2, 3)), late) == [2]  # it trains, and has not restored anything


def test_a_process_that_died_in_this_start() -> None:
    """One in its place has taken over its memory; it counts like that of the others, as its fences say."""
    left = _left(9, *_shares(8, 2, 3, restart=1), *_shares(6, 2, 3), fences=((0, 0),))
    mine = Offer("a", (*_shares(8, 0, 1, restart=1), *_shares(6, 0, 1)), ((0, 0), (1, 5)), start=9)
    assert _steps(mine, Offer("a", earlier=(left,))) == [8]


def test_the_restores_of_the_last_start_count() -> None:
    left = _left(7, *_shares(8, 0, 1, 2, 3), *_shares(5, 0, 1, 2, 3), *_shares(6, 0, 1, 2, 3, restart=1))
    other = _left(7, fences=((0, 0), (1, 5)))
    assert _steps(Offer("a", earlier=(left,))) == [8, 6, 5]
    assert _steps(Offer("a", earlier=(left,)), Offer("b", earlier=(other,))) == [6, 5]


def test_the_snapshot_that_the_last_start_began_with() -> None:
    """Wherever it is: one process has told its new holder, another one died before that."""
    told = _left(9, *_shares(8, 0, 1, restart=3), origin=8, fences=((0, 8),))
    not_told = _left(7, *_shares(8, 2, 3, restart=3), *_shares(7, 0, 1, 2, 3), fences=((3, 6),))
    offers = [Offer("a", earlier=(told,)), Offer("b", earlier=(not_told,))]
    assert _steps(*offers) == [8]
    went_back = _left(9, fences=((0, 8), (1, 4)))
    assert _steps(*offers, Offer("c", earlier=(went_back,))) == []


@pytest.mark.parametrize(("token", "steps"), [(0, []), (5, []), (6, [8]), (7, [])])
def test_another_owner_of_the_root(token: int, steps: list[int]) -> None:
    """The owner that the last start knew of at its restore, or saved as, is not another one; if it is there."""
    left = _left(3, *_shares(8, 0, 1), token=5)
    owned = ShareOf(SaveId(9, 6, "0" * 16), 0, 4, 0)
    other = _left(3, *_shares(8, 2, 3), owned)
    assert _steps(Offer("a", token=token, earlier=(left,)), Offer("a", earlier=(other,))) == steps


@pytest.mark.parametrize(("roots", "steps"), [("aaa", [8]), ("baa", []), ("aba", []), ("aab", [])])
def test_another_root(roots: str, steps: list[int]) -> None:
    """What the coordinator finds at the place of the root is what all that was left belongs to, or nothing is taken."""
    here, *of_left = roots
    left = [_left(3, *_shares(8, rank, rank + 1)) for rank in (0, 2)]
    records = [replace(each, record=replace(each.record, root=root)) for each, root in zip(left, of_left, strict=True)]
    assert _steps(Offer("a", root=here, earlier=(records[0],)), Offer("a", earlier=(records[1],))) == steps


def test_memory_of_a_start_without_a_number_is_not_taken() -> None:
    assert _steps(Offer("a", earlier=(_left(0, *_shares(8, 0, 1, 2, 3)),))) == []
