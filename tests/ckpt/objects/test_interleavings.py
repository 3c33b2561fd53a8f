"""Two owners of one root, with their requests in any order: a scheduler lets one request of one of them pass at a time.

earlier    begins step 2, writes, publishes it, removes step 1
later      claims, decides what it finds, begins another step 2 after step 1, publishes it
remover    a thread of the earlier one, which deletes what is of no use any more
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ckpt.errors import CheckpointError, FencedError, StorageError
from ckpt.saving.publish import publish
from ckpt.saving.recover import Branch, supersede, superseded, take_over
from ckpt.storage.documents import encode_document
from ckpt.storage.interface import Pending
from ckpt.storage.names import INDEX, REFERENCES, SaveId
from ckpt.storage.outcomes import Abandoned, Published
from ckpt.storage.store_root import StoreRoot
from ckpt.storage.stores.interface import About, Store
from ckpt.storage.stores.memory import MemoryStore
from tests.support.selection import FULL

_SEEDS = 3000 if FULL else 500
_RANKS = 2


class _EndedError(BaseException):
    """The process of an actor has ended, before a request."""


class _Scheduler:
    """Lets one actor at a time make one request; which one is drawn. For threads that `run` has started."""

    def __init__(self, seed: int, ends: int | None = None) -> None:
        """`ends`: after how many requests actor 0 ends, as by SIGKILL."""
        self._random = random.Random(seed)
        self._left = ends
        self._switches = self._random.choice((0.5, 0.1, 0.03))  # rare ones find what is late by many requests
        self._last: int | None = None
        self._turn = threading.Condition()
        self._waiting: dict[int | None, bool] = {}  # of each actor that has not ended: whether it waits for its turn
        self._own = threading.local()
        self.order: list[str] = []

    def pass_through(self, what: str) -> None:
        """Wait for the turn of the calling actor; do nothing in other threads."""
        actor = getattr(self._own, "number", None)
        if actor is None:
            return
        with self._turn:
            self._waiting[actor] = True
            self._choose()
            assert self._turn.wait_for(lambda: not self._waiting[actor], 30)
            if actor == 0 and self._left is not None:
                if self._left == 0:
                    self.order.append("0 ends")
                    raise _EndedError
                self._left -= 1
            self.order.append(f"{actor}:{what}")

    def _choose(self) -> None:
        if self._waiting and all(self._waiting.values()):
            if self._last not in self._waiting or self._random.random() < self._switches:
                self._last = self._random.choice(list(self._waiting))
            self._waiting[self._last] = False
            self._turn.notify_all()

    def run(self, *actors: Callable[[], Any]) -> list[Any]:
        """Run the actors, and return what they return or raise."""
        results: list[Any] = [None] * len(actors)
        self._waiting = dict.fromkeys(range(len(actors)), False)

        def act(number: int) -> None:
            self._own.number = number
            try:
                self.pass_through("start")
                results[number] = actors[number]()
            except (CheckpointError, _EndedError) as error:
                results[number] = error
            finally:
                with self._turn:
                    del self._waiting[number]
                    self._choose()

        threads = [threading.Thread(target=act, args=(number,)) for number in range(len(actors))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        return results


class _ScheduledStore(Store):
    """A store whose operations wait for the turn of the actor that calls them."""

    def __init__(self, store: Store, scheduler: _Scheduler) -> None:
        self.url = store.url
        self._store = store
        self._scheduler = scheduler

    def create(self, key: str, data: bytes) -> About | None:
        self._scheduler.pass_through(f"create {key}")
        return self._store.create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._scheduler.pass_through(f"put {key}")
        self._store.put(key, data)

    def read(self, key: str, offset: int, nbytes: int) -> memoryview | None:
        self._scheduler.pass_through(f"read {key}")
        return self._store.read(key, offset, nbytes)

    def about(self, key: str) -> About | None:
        self._scheduler.pass_through(f"about {key}")
        return self._store.about(key)

    def below(self, prefix: str) -> Iterator[About]:
        self._scheduler.pass_through(f"below {prefix}")
        return self._store.below(prefix)

    def names(self, prefix: str) -> tuple[list[str], list[About]]:
        self._scheduler.pass_through(f"names {prefix}")
        return self._store.names(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # a process may end between two of them
            self._scheduler.pass_through(f"delete {key}")
            self._store.delete([key])

    def now(self) -> float:
        return self._store.now()


def _write(pending: Pending) -> None:
    """Write all parts of a save without tensors, and what rank 0 adds to them."""
    index = encode_document({"arrays": [], "regions": []})
    pending.pack_writer(0, threads=1, reuse=False).write_documents({INDEX: index, REFERENCES: b"{}"})
    for rank in range(_RANKS):
        part = {"save": pending.save.name, "rank": rank, "world_size": _RANKS, "plan": "plan", "files": []}
        pending.write_part(rank, part | {"values": [], "aliases": [], "containers": []})


def _save(
    root: StoreRoot,
    token: int,
    step: int,
    number: int,
    branch: Branch | None,
    on_begun: Callable[[], None] = lambda: None,
) -> Published | Abandoned:
    pending = root.pending_save(SaveId(step, token, f"{number:016x}"))
    others = [] if branch is None else superseded(root, token, branch)
    pending.begin(_RANKS, "plan", None, others)
    on_begun()
    _write(pending)

    def before_commit() -> None:
        if branch is not None:
            supersede(root, token, branch, lambda text: None)

    return publish(pending, lambda: None, before_commit=before_commit)


@pytest.mark.parametrize("first", range(0, _SEEDS, 50))
def test_any_order_of_requests(first: int) -> None:
    for seed in range(first, first + 50):
        _play(seed)


def _play(seed: int) -> None:
    scheduler, memory = _Scheduler(seed), MemoryStore()
    roots = [StoreRoot(_ScheduledStore(memory, scheduler)) for _ in range(3)]
    token = roots[0].ownership.claim(0)
    assert _save(roots[0], token, 1, 0, None) == Published()
    branch = Branch(1, roots[0].save_of(1))
    tokens: list[int] = []
    begun: list[bool] = []
    kept: list[bool] = []

    def earlier() -> Any:
        outcome = _save(roots[0], token, 2, 1, None, lambda: begun.append(True))
        if outcome == Published():
            roots[0].ownership.check(token)
            roots[0].retire_step(1, token)
            for removed in roots[0].removed():
                roots[0].delete(removed, lambda: None)
        roots[0].clean_records()
        return outcome

    def later() -> Any:
        tokens.append(roots[1].ownership.claim(token))
        take_over(roots[1], tokens[0], branch, 0.0, lambda text: None)
        kept.append(1 in roots[1].steps())
        outcome = _save(roots[1], tokens[0], 2, 2, branch)
        roots[1].clean_records()
        return outcome

    outcomes = scheduler.run(earlier, later, roots[0].clean_records)
    root, order = roots[2], "\n".join(scheduler.order)
    why = f"seed {seed}: {outcomes}\n{order}"
    assert outcomes[1] == Published(), why
    assert isinstance(outcomes[0], Published | Abandoned | CheckpointError), why
    records = {record.save.owner: record for record in root._records.all() if record.save.step == 2}
    assert records[tokens[0]].state == "published", why
    assert root.save_of(2) == records[tokens[0]].save.name, why
    mine = records.get(token)
    if outcomes[0] == Published():
        assert mine is not None, why
        assert mine.state == "superseded", why
    if isinstance(outcomes[0], Abandoned):
        assert mine is not None, why
        assert mine.state == "abandoned", why
    if begun and mine is not None and mine.reason is not None:
        assert "left behind by an earlier run" in mine.reason.message, why
    if mine is not None and mine.state == "superseded":
        names, _ = memory.names(f"saves/{mine.save.name}/")
        assert names == ["parts"], why
    assert root.steps() in ([1, 2], [2]), why
    assert 1 in root.steps() or kept == [False], f"the step that the later owner continues is gone: {why}"
    for step in root.steps():
        assert {"zarr.json", "state.json", INDEX} <= root.source_of(step).scan()[0].keys(), why
    if isinstance(outcomes[0], FencedError):
        assert root.steps() == [1, 2], why
    roots[1].clean()
    assert not [record for record in root._records.all() if record.by is not None], why
    assert [save.step for save in root.pending()] == [], why


@pytest.mark.parametrize("first", range(0, _SEEDS, 50))
def test_any_order_of_requests_of_a_process_that_comes_too_late(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It publishes and removes steps that a later owner removes, whose records are forgotten at once, not in an hour.

    Or it ends at any of its requests. No step may be published of which the objects are gone.
    """
    monkeypatch.setattr("ckpt.storage.store_root._KEEP_RECORDS_S", -10.0)
    for seed in range(first, first + 50):
        _play_late(seed)


def _play_late(seed: int) -> None:
    ends = random.Random(-seed).choice((None, random.Random(-seed).randrange(40)))
    scheduler, memory = _Scheduler(seed, ends), MemoryStore()
    roots = [StoreRoot(_ScheduledStore(memory, scheduler)) for _ in range(3)]
    token = roots[0].ownership.claim(0)
    assert _save(roots[0], token, 1, 0, None) == Published()
    pending = roots[0].pending_save(SaveId(2, token, f"{1:016x}"))
    pending.begin(_RANKS, "plan", None, [])
    _write(pending)
    tokens: list[int] = []

    def earlier() -> None:
        publish(pending, lambda: None)
        roots[0].remove_step(1, token)
        roots[0].clean_records()

    def later() -> None:
        tokens.append(roots[1].ownership.claim(token))
        take_over(roots[1], tokens[0], Branch(1, None), 0.0, lambda text: None)
        for step in (1, 2):
            roots[1].remove_step(step, tokens[0])
            roots[1].clean_records()
        assert _save(roots[1], tokens[0], 3, 2, None) == Published()
        roots[1].clean_records()

    outcomes = scheduler.run(earlier, later, roots[2].clean_records)
    why = f"seed {seed}: {outcomes}\n" + "\n".join(scheduler.order)
    assert outcomes[1] is None, why
    for _ in range(2):
        roots[1].clean()
    root = roots[2]
    assert root.steps()[-1] == 3, why
    for step in root.steps():
        assert {"intent.json", "zarr.json", "state.json", INDEX} <= root.source_of(step).scan()[0].keys(), why
    assert root.pending() == [], why
    assert not [record for record in root._records.all() if record.by is not None], why
    assert {about.key.split("/")[1] for about in memory.below("saves/")} == set(root.saves().values()), why


@pytest.mark.parametrize("number", range(3))
def test_a_process_that_ends_while_it_forgets_a_step_leaves_it_removed(number: int) -> None:
    class Ending(MemoryStore):
        def delete(self, keys: Sequence[str]) -> None:
            for key in keys:
                if not left:
                    raise _EndedError
                left.pop()
                super().delete([key])

    left = [True] * 100
    root = StoreRoot(Ending())
    token = root.ownership.claim(0)
    assert _save(root, token, 1, 0, None) == Published()
    assert root.remove_step(1, token)
    (record,) = root._records.all()
    assert record.number == 2
    del left[number:]
    with contextlib.suppress(_EndedError):
        root._records.forget([record.save])
    assert [each.state for each in root._records.all()] == ["removed"]


class _Failing(MemoryStore):
    """A store that fails at the creation of a record, once: before it, or when it is done and the answer is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None  # records to be created before
        self.error: BaseException = _EndedError()
        self.answers = False

    def create(self, key: str, data: bytes) -> About | None:
        fails = False
        if self.left is not None and key.startswith("records/"):
            fails, self.left = self.left == 0, self.left - 1
        if fails and not self.answers:
            raise self.error
        about = super().create(key, data)
        if fails:
            raise self.error
        return about


def _changes(root: StoreRoot, token: int, change: str) -> dict[int, str]:
    """Remove step 1, or move it aside; return what has failed, if that is no error."""
    failed: dict[int, str] = {}
    match change:
        case "remove":
            root.remove_step(1, token)
        case "retire":
            assert root.steps() == [1, 2, 3]
            assert set(root.retire_steps([1, 2], token, failed=failed)) | set(failed) == {1, 2}
        case _:
            root.move_aside(1, token, "superseded")
    return failed


@pytest.mark.parametrize("change", ["remove", "retire", "move aside"])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("number", range(4))
def test_a_step_is_published_until_its_change_is_complete(number: int, answers: bool, ends: bool, change: str) -> None:
    """Whichever record is not created: every step is listed, and whole, or all of its change is there."""
    store = _Failing()
    root = StoreRoot(store)
    token = root.ownership.claim(0)
    for step in (1, 2, 3):
        assert _save(root, token, step, step, None) == Published()
    store.left, store.answers = number, answers
    store.error = _EndedError() if ends else StorageError("the store fails")
    failed: dict[int, str] = {}
    with contextlib.suppress(_EndedError, StorageError):
        failed = _changes(root, token, change)
    store.left = None
    assert ends or change != "retire" or len(failed) == 1, "one fails, and the other is removed"

    reader = StoreRoot(store)
    changed = {record.save.step for record in reader._records.all() if record.by is None and record.number}
    assert set(reader.steps()) == {1, 2, 3} - changed == set(reader.listed_steps())
    assert len(reader.moved_aside()) == (len(changed) if change == "move aside" else 0)
    for step in reader.steps():
        with reader.hold_step(step, lease=False) as held:
            held.check()
        assert {"intent.json", "zarr.json", "state.json", INDEX} <= reader.source_of(step).scan()[0].keys()

    if change == "retire":
        assert all(root.retire_step(step, token) for step in (1, 2))
    else:
        _changes(root, token, change)
    assert root.steps() == StoreRoot(store).steps() == ([3] if change == "retire" else [2, 3]), (
        "the owner does it again"
    )


def test_a_later_owner_publishes_a_step_that_is_changed_in_part() -> None:
    store = _Failing()
    roots = [StoreRoot(store) for _ in range(2)]
    token = roots[0].ownership.claim(0)
    assert _save(roots[0], token, 1, 1, None) == Published()
    store.left = 1
    with pytest.raises(_EndedError):
        roots[0].remove_step(1, token)
    later = roots[1].ownership.claim(token)
    take_over(roots[1], later, Branch(1, roots[1].save_of(1)), 0.0, lambda text: None)
    (record,) = roots[1]._records.all()
    assert (record.state, record.by, roots[1].steps()) == ("published", None, [1])
    with pytest.raises(FencedError):
        roots[0].remove_step(1, token)
    assert roots[1].steps() == [1]
