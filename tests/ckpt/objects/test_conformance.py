"""Guarantees of every root, in a directory and in every kind of store: one suite for all."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FencedError, StorageError
from ckpt.native import crc32c
from ckpt.ranks.failure import Failure
from ckpt.storage.documents import encode_document
from ckpt.storage.interface import Pending, Root
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.outcomes import Abandoned, NotDurableError, Published
from ckpt.storage.ownership import OwnerState
from ckpt.storage.records import Records
from ckpt.storage.roots import open_root
from ckpt.storage.step_source import HeldStep
from ckpt.storage.store_root import StoreRoot
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions
from inprocess.ipc.process import Process
from tests.support.object_server import Bucket, slow_down
from tests.support.selection import FULL

_REASON = Failure(1, "StorageError", "for a reason")


@pytest.fixture(params=["directory", "store in a directory", "sftp", "moto", "ceph", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    match request.param:
        case "directory":
            yield open_root(tmp_path / "root")
        case "store in a directory":
            yield open_root(f"directory://{tmp_path}/root")
        case "sftp":
            server = request.getfixturevalue("sftp_server")
            yield open_root(server.url(tmp_path / "root"), StorageOptions.of(server.options, 60.0))
        case "moto":
            yield open_root(request.getfixturevalue("bucket").url)
        case "ceph":
            yield open_root(request.getfixturevalue("ceph_bucket").url)
        case _:
            yield open_root(f"memory:///{tmp_path.name}")


@pytest.fixture
def token(root: Root) -> int:
    root.make()
    return root.ownership.claim(0)


def _save(root: Root, token: int, step: int, number: int = 0, *, begin: bool = True, parts: int = 2) -> Pending:
    pending = root.pending_save(SaveId(step, token, f"{number:016x}"))
    if begin:
        pending.begin(2, "plan")
    else:
        pending.join()
    for rank in range(parts):
        pending.write_part(rank, {"rank": rank})
    return pending


def _published(root: Root, token: int, step: int, number: int = 0) -> str:
    pending = _save(root, token, step, number)
    pending.write_documents({"zarr.json": encode_document({"step": step}), "state.json": b"{}"})
    assert pending.publish() == Published()
    return pending.save.name


def test_a_root_that_is_not_there(root: Root) -> None:
    assert root.steps() == []
    assert root.tip() is None
    assert root.pending() == []
    assert root.superseded() == []
    assert root.pinned_steps() == set()
    assert root.ownership.newest() == 0
    with pytest.raises(CheckpointNotFoundError):
        root.hold_step(3, lease=True)
    with pytest.raises(CheckpointNotFoundError):
        root.hold_itself()


def test_the_life_of_a_save(root: Root, token: int) -> None:
    pending = _save(root, token, 7, parts=0)
    assert root.pending() == [pending.save]
    assert (pending.outcome(), pending.decided(), pending.has_begun()) == (None, None, True)
    assert pending.look()[0] is None
    intent = pending.intent()
    assert intent is not None
    assert (intent["save"], intent["world_size"], intent["plan"]) == (pending.save.name, 2, "plan")
    assert pending.parts_present() == set()
    assert pending.write_part(1, {"rank": 1}) == crc32c(encode_document({"rank": 1}))
    assert (pending.has_part(0), pending.has_part(1)) == (False, True)
    pending.write_part(0, {"rank": 0})
    assert pending.parts_present() == pending.ranks_in("parts/000") == {0, 1}
    assert pending.read_part(1) == ({"rank": 1}, crc32c(encode_document({"rank": 1})))
    pending.write_documents({"state.json": b"{}", "zarr.json": b"{}"})
    assert pending.read_document("state.json") == b"{}"
    assert root.steps() == []
    assert pending.publish() == Published()
    assert pending.publish() == pending.outcome() == pending.decided() == Published()
    pending.confirm()
    assert pending.abandon(_REASON) == Published(), "what is decided is final"
    assert (root.steps(), root.pending(), pending.has_begun()) == ([7], [], False)
    assert root.tip() == {"step": 7, "save": pending.save.name}
    assert (root.owner_of(7), root.save_of(7)) == (token, pending.save.name)
    assert root.source_of(7).read("state.json", 100) == b"{}"
    assert abs(root.published_s(7) - time.time()) < 100


@pytest.mark.parametrize("scheme", ["", "directory://"])
def test_a_rank_that_finds_a_published_step_makes_it_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """The process that has published it may not have synced the directory yet, and with the power the step is gone."""
    root = open_root(f"{scheme}{tmp_path}/root")
    root.make()
    pending = _save(root, root.ownership.claim(0), 7)
    pending.write_documents({"zarr.json": b"{}", "state.json": b"{}"})
    assert pending.publish() == Published()
    found = open_root(f"{scheme}{tmp_path}/root").pending_save(pending.save)
    place = f"{tmp_path}/root/records/{pending.save.name}" if scheme else f"{tmp_path}/root"
    for confirm in (found.confirm, found.publish):
        synced: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd, synced=synced: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
            confirm()
        assert place in synced

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NotDurableError, match=r"step 7 is published, but .* may not survive"):
        found.confirm()


def test_an_abandoned_save_can_never_be_published(root: Root, token: int) -> None:
    pending = _save(root, token, 7)
    assert pending.abandon(_REASON) == Abandoned(_REASON)
    assert pending.publish() == pending.outcome() == pending.decided() == Abandoned(_REASON)
    assert pending.abandon(Failure(0, "Other", "")) == Abandoned(_REASON)
    assert (root.steps(), root.pending(), root.abandoned()) == ([], [], [pending.save])
    with pytest.raises(StorageError, match="abandoned"):
        pending.join()
    with pytest.raises(StorageError, match="abandoned"):
        pending.begin(2, "plan")


def test_a_save_is_abandoned_before_it_begins(root: Root, token: int) -> None:
    pending = root.pending_save(SaveId(3, token, "0" * 16))
    assert pending.abandon(_REASON) == Abandoned(_REASON)
    with pytest.raises(StorageError, match="abandoned before"):
        pending.begin(1, "plan")
    assert root.steps() == root.pending() == []


@pytest.mark.parametrize("number", range(4 if FULL else 1))
def test_many_decide_and_agree(root: Root, token: int, number: int) -> None:
    pending = _save(root, token, 7)
    start, found = threading.Barrier(6), []

    def decide(act: Callable[[Pending], Any]) -> None:
        other = root.pending_save(pending.save)
        start.wait(20)
        found.append(act(other))

    acts: list[Callable[[Pending], Any]] = [lambda p: p.publish(), lambda p: p.abandon(_REASON)] * 3
    threads = [threading.Thread(target=decide, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6
    assert len({type(outcome) for outcome in found}) == 1
    assert root.steps() == ([7] if found[0] == Published() else [])


def test_a_step_is_published_once(root: Root, token: int) -> None:
    late = _save(root, token, 7, 1)
    _published(root, token, 7, 0)
    with pytest.raises(CheckpointExistsError, match="already published"):
        _save(root, token, 7, 2)
    with pytest.raises(CheckpointExistsError, match="already published"):
        late.publish()
    assert late.abandon(_REASON) == Abandoned(_REASON)
    again = root.pending_save(_save(root, token, 8).save)
    with pytest.raises(StorageError, match="begun already"):
        again.begin(3, "another plan")


def test_an_earlier_owner_decides_nothing(root: Root, token: int) -> None:
    _published(root, token, 1)
    _published(root, token, 2)
    left = _save(root, token, 3)
    later = root.ownership.claim(token)
    assert later > token
    assert root.ownership.newest() == later
    for act in (
        left.publish,
        lambda: left.abandon(_REASON),
        left.check_token,
        lambda: _save(root, token, 9),
        lambda: root.move_aside(2, token, "superseded"),
    ):
        with pytest.raises(FencedError, match="owned by a job that started later"):
            act()
    assert root.pending_save(left.save, later).publish() == Published()
    _published(root, later, 10)
    with pytest.raises(FencedError):
        root.remove_step(10, token)
    with pytest.raises(FencedError):
        root.retire_step(10, token)
    assert root.steps() == [1, 2, 3, 10]


def test_a_claim_while_a_save_begins(root: Root, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever claims sees the save, or the save sees the claim."""
    seen = []
    check = root.ownership.check

    def claim_first(number: int) -> None:
        monkeypatch.setattr(root.ownership, "check", check)
        later = root.ownership.claim(token)
        seen.append((later, root.pending()))
        check(number)

    monkeypatch.setattr(root.ownership, "check", claim_first)
    with pytest.raises(FencedError):
        _save(root, token, 5)
    ((later, pending),) = seen
    assert [save.step for save in pending] == [5]
    root.clean_records()
    assert root.pending() == []
    assert root.steps() == []
    assert _published(root, later, 5, 1)


def test_steps_are_moved_aside(root: Root, token: int) -> None:
    names = [_published(root, token, step) for step in (1, 2, 3)]
    later = root.ownership.claim(token)
    assert root.move_aside(3, later, "superseded")
    assert root.move_aside(2, later, "damaged")
    assert root.move_aside(2, later, "damaged") is None
    assert (root.steps(), root.superseded()) == ([1], names[2:])
    _published(root, later, 3, 1)
    assert root.move_aside(1, later, "superseded")
    assert root.superseded() == [names[0], names[2]]


def test_what_was_moved_aside_is_published_again_or_removed(root: Root, token: int) -> None:
    names = [_published(root, token, step) for step in (1, 2, 3)]
    later = root.ownership.claim(token)
    assert root.move_aside(3, later, "superseded")
    assert root.move_aside(2, later, "damaged")
    moved = root.moved_aside()
    assert [(each.step, each.name, each.why) for each in moved] == [
        (2, names[1], "damaged"),
        (3, names[2], "superseded"),
    ]
    assert moved[1].source.read("zarr.json", 1000) == encode_document({"step": 3})
    assert moved[1].source.usage()[0] == sum(moved[1].source.scan()[0].values()) > 0
    with pytest.raises(FencedError):
        root.publish_again(names[2], token)
    root.publish_again(names[2], later)
    assert (root.steps(), root.save_of(3)) == ([1, 3], names[2])
    with pytest.raises(CheckpointNotFoundError):
        root.publish_again(names[2], later)
    _published(root, later, 2, 1)
    with pytest.raises(CheckpointExistsError):
        root.publish_again(names[1], later)
    root.remove_moved(names[1])
    assert (root.steps(), root.moved_aside()) == ([1, 2, 3], [])
    with pytest.raises(CheckpointNotFoundError):
        root.remove_moved(names[1])


def test_when_saves_began_and_were_abandoned(root: Root, token: int) -> None:
    now = time.time()
    pending = _save(root, token, 7)
    assert abs(pending.begun_s() - now) < 100
    assert pending.source.usage()[0] > 0
    joined = _save(root, token, 8, 1, begin=False, parts=1)
    assert abs(joined.begun_s() - now) < 100
    assert root.moved("abandoned") == []
    pending.abandon(_REASON)
    (abandoned,) = root.moved("abandoned")
    assert (abandoned.name, abandoned.why, abandoned.has_files) == (pending.save.name, "abandoned", True)
    assert abs(abandoned.since_s - now) < 100
    assert "parts/000/rank_00000.json" in abandoned.source.scan()[0]
    root.delete(abandoned, lambda: None)
    assert root.abandoned() == [pending.save], "its record stays"
    assert "parts/000/rank_00000.json" not in abandoned.source.scan()[0]


def test_temporary_claims_do_not_fence_the_owner(root: Root) -> None:
    root.make()
    ownership = root.ownership
    owner = ownership.claim(0)
    restores = owner
    for _ in range(3):
        before, restores = restores, ownership.claim(restores, temporary=True)
        ownership.check(owner)
        assert ownership.owner() == owner
        ownership.release(restores)
        ownership.check(owner)
        ownership.check(restores)
        if before != owner:
            with pytest.raises(FencedError):
                ownership.check(before)
    later = ownership.claim(restores)
    restored = ownership.claim(later, temporary=True)
    assert ownership.owner() == later
    for token in (owner, restores):
        with pytest.raises(FencedError, match="owned by a job that started later"):
            ownership.check(token)
    ownership.check(later)
    ownership.check(restored)


def test_an_overview_of_the_owner_tells_what_its_state_does(root: Root) -> None:
    assert root.ownership.overview(time.time()) is None
    root.make()
    token = root.ownership.claim(0)
    found = root.ownership.overview(time.time())
    assert found is not None
    assert (found.token, found.state, found.writers) == (token, root.ownership.state(token), 0)
    assert found.state is OwnerState.ACTIVE
    assert found.renewed_s is not None
    assert found.renewed_s < 100
    own = Process.here()
    root.ownership.leases(token).enter(3, own, own)
    found = root.ownership.overview(time.time())
    assert found is not None
    assert found.writers == 1
    root.ownership.release(token)
    found = root.ownership.overview(time.time())
    assert found is not None
    assert found.state is root.ownership.state(token) is OwnerState.GONE


def test_steps_are_retired_together(root: Root, token: int) -> None:
    for step in range(1, 6):
        _published(root, token, step)
    root.pin_step(2)
    with root.hold_step(3, lease=True):
        assert root.steps() == [1, 2, 3, 4, 5]
        failed: dict[int, str] = {}
        assert root.retire_steps([1, 2, 3, 4], token, failed=failed) == [1, 4]
        assert failed == {}
    assert root.steps() == [2, 3, 5]


def test_a_pin_that_comes_when_the_step_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal has looked at readers and pins before there was one, and ends between two looks of the pinner."""
    root = open_root(f"directory://{tmp_path}/root")
    assert isinstance(root, StoreRoot)
    root.make()
    _published(root, root.ownership.claim(0), 5)
    check, looks = HeldStep.check, []

    def then_removed(held: HeldStep) -> None:
        check(held)
        looks.append(held)
        if len(looks) == 2:
            assert root._remove([root._existing(5)], None) == [5]

    monkeypatch.setattr(HeldStep, "check", then_removed)
    with pytest.raises(CheckpointNotFoundError, match="is being removed"):
        root.pin_step(5)
    assert root.pinned_steps() == set()


def test_removal_waits_for_readers_and_pins(root: Root, token: int) -> None:
    names = {step: _published(root, token, step) for step in (1, 2, 3)}
    with root.hold_step(1, lease=True) as held:
        assert held.source.read("state.json", 100) == b"{}"
        assert not root.remove_step(1, token)
        assert not root.retire_step(1, token)
        held.check()
        assert held.still_there
    root.pin_step(2)
    root.pin_step(2)
    assert root.pinned_steps() == {2}
    assert not root.remove_step(2, token)
    assert root.unpin_step(2)
    assert not root.unpin_step(2)
    with pytest.raises(CheckpointNotFoundError):
        root.pin_step(9)
    unheld = root.hold_step(2, lease=False)
    unheld.close()
    assert root.remove_step(2, token)
    with pytest.raises(CheckpointNotFoundError, match="removed"):
        unheld.check()
    assert not unheld.still_there
    assert root.retire_step(1, token)
    assert root.steps() == [3]
    assert root.save_of(3) == names[3]
    for removed in root.removed():
        root.delete(removed, lambda: None)
    assert root.removed() == []
    assert root.save_of(1) is None
    root.clean()
    assert root.steps() == [3]
    _published(root, token, 2, 5)
    assert root.steps() == [2, 3]


def test_what_is_left_of_abandoned_saves_is_deleted(root: Root, token: int) -> None:
    pending = _save(root, token, 1)
    pending.abandon(_REASON)
    root.clean()
    assert pending.outcome() == Abandoned(_REASON), "ranks learn it from the record"
    assert not pending.has_part(0)
    assert root.pending() == []


def test_what_is_known_of_saves_that_are_gone(root: Root, token: int) -> None:
    save = SaveId(3, token, "ab" * 8)
    assert root.is_gone(save) is None, "it has not begun"
    pending = root.pending_save(save)
    pending.begin(1, "plan")
    assert root.is_gone(save) is False
    pending.write_part(0, {"rank": 0})
    pending.write_documents({"zarr.json": encode_document({"step": 3}), "state.json": b"{}"})
    assert pending.publish() == Published()
    assert root.is_gone(save) is False
    assert root.is_gone(SaveId(3, token, "cd" * 8)) is None, "another save of the step"
    assert root.move_aside(3, token, "damaged") is not None
    assert root.is_gone(save) is False
    abandoned = _save(root, token, 4)
    abandoned.abandon(_REASON)
    assert root.is_gone(abandoned.save) is True
    _published(root, token, 5)
    removed = parse_save_name(root.save_of(5) or "")
    assert removed is not None
    assert root.retire_step(5, token)
    assert root.is_gone(removed) is True
    root.clean()
    assert root.is_gone(removed) in (True, None)


def test_who_is_alive(root: Root, token: int) -> None:
    ownership, here = root.ownership, Process.here()
    assert ownership.state(token) is OwnerState.ACTIVE
    leases = ownership.leases(token)
    gone = Process(here.host, 2**22 + 1, 1)
    lease = leases.register(0, here, lambda: False)
    leases.enter(1, gone, gone)
    try:
        assert leases.alive_ranks() == {0}
        assert {(each.rank, each.alive, each.has_trainer) for each in leases.writers()} == {
            (0, True, True),
            (1, False, False),
        }
        assert leases.watch_host(here.host).alive_ranks() == {0}
        assert not leases.has_left(here)
        leases.enter(2, here, gone)
        ownership.release(token, done=False)
        assert leases.has_left(here)
        assert ownership.state(token) is OwnerState.FINISHING
        ownership.release(token, done=True)
    finally:
        lease.close()
    assert ownership.state(token) is OwnerState.FINISHING, "the writer of another trainer"
    assert ownership.claimer(token) == here
    later = ownership.claim(token)
    assert ownership.state(later) is OwnerState.ACTIVE
    ownership.renew(later)
    root.confirm(later)
    root.check_writable()


def test_saves_in_this_process(root: Root) -> None:
    """From the state to the bytes and back, entirely in this thread."""

    def state(value: float) -> dict[str, Any]:
        return {"w": torch.arange(30_000.0) * value, "small": torch.tensor([value]), "value": value}

    if root.path.startswith("memory:"):  # writers are other processes
        with pytest.raises(StorageError, match="memory of one process"):
            ckpt.Checkpointer(root.path)
        return
    options = dict(root.options.given) if root.options else None
    staging = ckpt.Staging(threads=2, file_bytes=50_000)
    with ckpt.Checkpointer(root.path, keep=2, staging=staging, storage_options=options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_request(state(float(step)), step).execute_sync()
        assert checkpointer.all_steps() == [2, 3]
    restored = state(0.0)
    with ckpt.Checkpointer(root.path, read_only=True, storage_options=options) as checkpointer:
        assert checkpointer.restore(restored) == 3
    assert torch.equal(restored["w"], state(3.0)["w"])
    assert restored["value"] == 3.0
    assert torch.equal(ckpt.load(root.path, 2, storage_options=options)["w"], state(2.0)["w"])


@pytest.fixture(params=["store in a directory", "moto"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """A root in a store."""
    moto = request.param == "moto"
    return open_root(request.getfixturevalue("bucket").url if moto else f"directory://{tmp_path}/root")


def test_a_token_is_above_those_of_saves_whose_claims_are_lost(stored: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    token = stored.ownership.claim(0)
    _published(stored, token, 1)
    pending = _save(stored, token, 2)
    store = stored.store
    store.delete([each.key for each in store.below("owner/")])
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    later = stored.ownership.claim(0)
    assert later > token
    assert stored.pending_save(pending.save, later).publish() == Published()
    with pytest.raises(FencedError):
        pending.check_token()


def test_a_step_that_was_published_after_everything_of_it_was_gone(
    stored: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was stopped before it created the record, for an hour, and ended right after it."""
    token = stored.ownership.claim(0)
    pending = _save(stored, token, 1)
    store = stored.store
    store.delete([each.key for each in store.below("saves/")])
    with monkeypatch.context() as ended:
        ended.setattr(Records, "keeps", lambda self, save: True)
        assert pending.publish() == Published()
    assert stored.steps() == [1]
    stored.clean_records()
    assert stored.steps() == []
    assert stored.is_gone(pending.save) is True


def test_a_late_change_of_a_step_that_is_forgotten_brings_nothing_back(stored: Root) -> None:
    """An earlier owner, stopped for more than an hour, goes on with removing a step that the later one has removed."""
    token = stored.ownership.claim(0)
    name = _published(stored, token, 1)
    records = Records(stored.store)
    (known,) = records.all()
    later = stored.ownership.claim(token)
    assert stored.remove_step(1, later)
    records.forget([known.save])
    assert stored.save_of(1) is None
    assert records.change(known, "removed", by=token) is not None
    stored.clean_records()
    assert (stored.steps(), stored.moved_aside()) == ([], [])
    newest = records.of(known.save)
    assert newest is not None
    assert (newest.save.name, newest.state, newest.by) == (name, "removed", None)


def test_of_two_that_change_a_step_one_succeeds(stored: Root) -> None:
    token = stored.ownership.claim(0)
    _published(stored, token, 1)
    records, other = (Records(stored.store) for _ in range(2))
    ((mine,), (theirs,)) = records.all(), other.all()
    superseded = records.change(mine, "superseded")
    assert superseded is not None
    assert other.change(theirs, "removed") is None
    assert [each.state for each in other.all()] == ["superseded"]
    assert superseded.outcome == records.outcome(mine.save) == Published(), "the outcome of the save is final"
    assert records.change(superseded, "published") is not None
    assert [(each.state, each.number) for each in other.all()] == [("published", 2)]


def test_records_of_what_is_gone_are_deleted_after_an_hour(stored: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root = stored
    token = root.ownership.claim(0)
    _published(root, token, 1)
    _published(root, token, 2)
    kept, abandoned = _save(root, token, 3), _save(root, token, 4)
    abandoned.abandon(_REASON)
    assert root.remove_step(1, token)
    root.clean()
    assert [save.step for save in root.abandoned()] == [4]
    assert len(root._records.all()) == 3  # type: ignore[attr-defined]
    real = root.store.now()
    monkeypatch.setattr(type(root.store), "now", lambda store: real + 3700)
    root.clean_records()
    assert [each.save.step for each in root._records.all()] == [2]  # type: ignore[attr-defined]
    assert {each.key.split("-")[0] for each in root.store.below("records/")} == {"records/step_00000002"}
    assert root.steps() == [2]
    assert root.pending() == [kept.save]


def test_a_step_that_is_published_again_too_late_is_moved_aside_again(
    stored: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = stored
    token = root.ownership.claim(0)
    name = _published(root, token, 1)
    assert root.move_aside(1, token, "superseded")
    check, checks = root.ownership.check, []

    def claim_before_the_second(number: int) -> None:
        checks.append(number)
        if len(checks) == 2:
            assert root.steps() == [1]
            root.ownership.claim(token)
        check(number)

    monkeypatch.setattr(root.ownership, "check", claim_before_the_second)
    with pytest.raises(FencedError):
        root.publish_again(name, token)
    assert (root.steps(), root.superseded()) == ([], [name])


def test_processes_of_other_hosts_are_alive_while_they_renew(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this host cannot look up in /proc is told by the age of objects, by the clock of the store."""
    root = open_root(bucket.url)
    store = open_store(bucket.url, StorageOptions.of(None, 60.0))
    elsewhere = Process("another-host", 71, 512)
    with monkeypatch.context() as there:
        there.setattr(Process, "here", classmethod(lambda cls: elsewhere))
        token = root.ownership.claim(0)
        leases = root.ownership.leases(token)
        leases.enter(3, elsewhere, elsewhere)
    assert root.ownership.state(token) is OwnerState.ACTIVE
    assert leases.alive_ranks() == leases.watch_host("another-host").alive_ranks() == {3}
    ahead = store.now() - time.time()
    assert abs(ahead) < 5
    monkeypatch.setattr(type(store), "now", lambda self: time.time() + 60)
    assert leases.alive_ranks() == set()
    assert root.ownership.state(token) is OwnerState.GONE
    later = root.ownership.claim(0)
    assert later > token, "an owner that is gone does not keep others out"


def test_a_close_does_not_wait_for_a_store_that_is_gone(bucket: Bucket) -> None:
    with ckpt.Checkpointer(bucket.url, timeout=timedelta(seconds=8)) as checkpointer:
        checkpointer.save({"w": torch.ones(3)}, 1)
        bucket.proxy.rule = lambda request: slow_down()
        begin = time.monotonic()
    assert time.monotonic() - begin < 45
