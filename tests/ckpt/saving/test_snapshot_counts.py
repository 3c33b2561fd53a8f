"""The counts of snapshots in the store of torch: atomic, never negative, and never more than a few keys."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.ranks.collectives import Ranks
from ckpt.saving.snapshot_counts import SnapshotCounts


class _Ranks(Ranks):
    """One of several ranks, with the store that they share."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        super().__init__()
        self._last, self._store = (rank, world_size), store

    def store(self) -> Any:
        return self._store


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=10))


def _completions(store: Any, world_size: int = 2) -> list[SnapshotCounts]:
    ranks = (_Ranks(rank, world_size, dist.PrefixStore("ckpt", store)) for rank in range(world_size))
    return [SnapshotCounts(each) for each in ranks]


def test_complete_when_all_have_counted(store: Any) -> None:
    first, second = _completions(store)
    assert first.count("a")
    assert (first.newest_of(["a"]), second.newest_of([])) == (None, None)
    assert first.progress("a") == (1, 2)
    assert second.count("a")
    assert (first.newest_of(["a"]), second.newest_of(["a"])) == ("a", "a")


def test_the_count_of_the_newest_complete_one_stays(store: Any) -> None:
    """Rank 0 deletes those before it; the others may look later."""
    first, second = _completions(store)
    for name in ("a", "b"):
        for each in (first, second):
            each.count(name)
    assert first.newest_of(["a", "b"]) == "b"
    assert second.newest_of(["a", "b"]) == "b"
    second.count("c")
    assert second.newest_of(["b", "c"]) == "b"


def test_keys_do_not_grow(store: Any) -> None:
    first, second = _completions(store)
    before = store.num_keys()
    held: list[str] = []
    for number in range(1000):
        held = [*held[-2:], f"s{number}"]
        for each in (first, second):
            each.count(held[-1])
            assert each.newest_of(held) == held[-1] or each is first
    first.newest_of(held)
    assert store.num_keys() <= before + 2


def test_two_checkpointers_with_one_store(store: Any) -> None:
    """What rank 0 finds complete of one of them says nothing about the other, and hides nothing."""
    first, second = _completions(store), _completions(store)
    for name, pair in (("a", first), ("b", second)):
        for each in pair:
            each.count(name)
        assert pair[0].newest_of([name]) == name
    assert (first[1].newest_of(["a"]), second[1].newest_of(["b"])) == ("a", "b")


def test_a_snapshot_that_is_withdrawn_is_never_complete(store: Any) -> None:
    first, second = _completions(store)
    first.count("a")
    assert first.withdraw("a")
    second.count("a")
    assert second.newest_of(["a"]) is None


def test_a_complete_snapshot_cannot_be_withdrawn(store: Any) -> None:
    first, second = _completions(store)
    for each in (first, second):
        each.count("a")
    assert not second.withdraw("a")
    assert first.newest_of(["a"]) == "a"
    assert not second.withdraw("a")
    assert second.newest_of(["a"]) == "a"


def test_ranks_that_give_up_at_once_leave_a_complete_snapshot(store: Any) -> None:
    """Rank 0 has found it complete, and has let go of the one before."""
    first, second, third = _completions(store, 3)
    for each in (first, second, third):
        each.count("a")
    assert first.newest_of(["a"]) == "a"

    class Between:
        """The other rank gives up, too, between what one does to do so."""

        def __init__(self) -> None:
            self.both = True

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                answer = getattr(plain, name)(*arguments)
                if self.both and (name == "add" or str(arguments[0]).endswith("/decision")):
                    self.both = False
                    answers.append(third.withdraw("a"))
                return answer

            return call

    plain, answers = second._ranks.store(), []
    second._ranks._store = Between()  # type: ignore[attr-defined]
    answers.append(second.withdraw("a"))
    assert answers == [False, False]
    assert [each.newest_of(["a"]) for each in (first, second, third)] == ["a", "a", "a"]


def test_a_newer_store_knows_of_nothing(store: Any) -> None:
    """After a restart: a key that is missing there says nothing."""
    first, second = _completions(store)
    for each in (first, second):
        each.count("a")
    assert first.newest_of(["a"]) == "a"
    other = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=10))
    third, _ = _completions(other)
    assert third.newest_of(["a"]) is None


def test_a_store_that_fails(store: Any) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the connection is closed")

    (broken,) = [SnapshotCounts(_Ranks(1, 2, Broken()))]
    assert broken.count("a")  # which may have arrived
    assert broken.newest_of(["a"]) is None
    assert not broken.withdraw("a")
    assert broken.progress("a") == (0, 2)


def test_a_snapshot_is_counted_once_though_the_answer_was_lost(store: Any) -> None:
    """Else one rank would count for two, and the snapshot before would be let go."""
    first, second = _completions(store)

    class Cut:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                getattr(plain, name)(*arguments)
                raise RuntimeError("the connection was lost")

            return call

    plain = second._ranks.store()
    second._ranks._store = Cut()  # type: ignore[attr-defined]
    assert second.count("a")  # not to be repeated
    second._ranks._store = plain  # type: ignore[attr-defined]
    assert second.newest_of(["a"]) is None
    first.count("a")
    assert (first.newest_of(["a"]), second.newest_of(["a"])) == ("a", "a")


def test_without_a_store_it_is_not_counted_yet() -> None:
    assert not SnapshotCounts(_Ranks(1, 2, None)).count("a")


def test_one_rank_needs_no_store() -> None:
    alone = SnapshotCounts(_Ranks(0, 1, None))
    assert alone.count("a")
    assert alone.newest_of(["a", "b"]) == "b"
