"""What a node deletes of its pack files, and what it never deletes."""

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import StorageError
from ckpt.ranks.failure import Failure
from ckpt.storage.interface import Root
from ckpt.storage.names import SaveId, pack_file
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.outcomes import Published
from ckpt.storage.roots import open_root
from tests.ckpt.storage.syscalls import Call, Syscalls


class Node:
    """A root, and the directory of a node for it."""

    def __init__(self, folder: Path) -> None:
        self.root: Root = open_root(folder / "root")
        self.root.make()
        self.token = self.root.ownership.claim(0)
        self.path = folder / "nvme"
        self.packs = NodePacks(str(self.path), self.root)
        self.packs.claim()

    def save(self, step: int, number: int = 0, *, begin: bool = True) -> SaveId:
        """Begin a save, with a file of it on the node."""
        save = SaveId(step, self.token, f"{number:016x}")
        if begin:
            self.root.pending_save(save).begin(1, "plan")
        file = self.path / save.name / pack_file(0, 0)
        self.packs.writer(save, 0, threads=1)
        file.parent.mkdir(parents=True)
        file.write_bytes(b"data")
        return save

    def publish(self, save: SaveId) -> None:
        pending = self.root.pending_save(save)
        pending.write_part(0, {"rank": 0})
        pending.write_documents({"zarr.json": b"{}", "state.json": b"{}"})
        assert pending.publish() == Published()
        self.packs.note_decided(save)

    def clean(self) -> set[str]:
        """Clean, and return the saves that are left."""
        self.packs.clean(lambda: None)
        return {path.name for path in self.path.iterdir() if path.is_dir()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_what_is_there_stays(node: Node) -> None:
    pending, published, superseded, damaged = (node.save(step) for step in (1, 2, 3, 4))
    for save in (published, superseded, damaged):
        node.publish(save)
    assert node.root.move_aside(3, node.token, "superseded")
    assert node.root.move_aside(4, node.token, "damaged")
    assert node.clean() == {save.name for save in (pending, published, superseded, damaged)}
    node.token = node.root.ownership.claim(node.token)
    assert node.clean() == {save.name for save in (pending, published, superseded, damaged)}, "also of earlier owners"


def test_what_is_gone_is_deleted(node: Node) -> None:
    abandoned, removed, kept = (node.save(step) for step in (1, 2, 3))
    node.publish(removed)
    node.publish(kept)
    node.root.pending_save(abandoned).abandon(Failure(0, "StorageError", "for a reason"))
    assert node.root.retire_step(2, node.token)
    assert node.clean() == {kept.name}


def test_superseded_steps_stay_until_training_has_passed_them(node: Node) -> None:
    before, newer = node.save(1), node.save(3)
    node.publish(before)
    node.publish(newer)
    node.token = node.root.ownership.claim(node.token)
    assert node.root.move_aside(3, node.token, "superseded")
    again = node.save(2)
    node.publish(again)
    assert node.clean() == {save.name for save in (before, newer, again)}
    beyond = node.save(4)
    node.publish(beyond)
    assert node.clean() == {save.name for save in (before, again, beyond)}


def test_without_a_record(node: Node) -> None:
    """Only what is known to be decided, or is of an earlier owner."""
    about_to_begin, decided = node.save(1, begin=False), node.save(2, begin=False)
    node.packs.note_decided(decided)
    assert node.clean() == {about_to_begin.name}
    node.token = node.root.ownership.claim(node.token)
    assert node.clean() == set()


def test_a_root_that_is_not_mounted(node: Node) -> None:
    save = node.save(1)
    node.publish(save)
    shutil.rmtree(node.root.path)
    assert node.clean() == {save.name}
    Path(node.root.path).mkdir()
    assert node.clean() == {save.name}


def test_one_process_of_a_node_cleans(node: Node) -> None:
    save = node.save(1)
    node.root.pending_save(save).abandon(Failure(0, "StorageError", "for a reason"))
    lock = NodeLock(f"clean {node.path}")
    assert lock.take()
    assert node.clean() == {save.name}
    lock.release()
    assert node.clean() == set()


def test_the_directory_of_another_root(node: Node, tmp_path: Path) -> None:
    save = node.save(1)
    other = open_root(tmp_path / "other")
    other.make()
    other.ownership.claim(node.token)
    packs = NodePacks(str(node.path), other)
    with pytest.raises(StorageError, match="give each root a directory"):
        packs.claim()
    packs.clean(lambda: None)
    assert (node.path / save.name).exists()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"root":1}'])
def test_a_directory_whose_record_is_damaged(node: Node, content: bytes) -> None:
    (node.path / "root.json").write_bytes(content)
    with pytest.raises(StorageError):
        node.packs.claim()


def test_links_are_not_followed(node: Node, tmp_path: Path) -> None:
    other = tmp_path / "data"
    other.mkdir()
    (other / "file").write_bytes(b"precious")
    save = SaveId(1, node.token, "ab" * 8)
    (node.path / save.name).symlink_to(other)
    left = node.save(2, begin=False)
    node.token = node.root.ownership.claim(node.token)
    node.clean()
    assert not (node.path / left.name).exists()
    assert (other / "file").read_bytes() == b"precious"


def test_clean_before_is_for_the_first_save_of_an_owner(node: Node) -> None:
    left = node.save(1)
    node.root.pending_save(left).abandon(Failure(0, "StorageError", "for a reason"))
    node.packs.clean_before(node.token)
    assert (node.path / left.name).exists(), "this owner has saved here before"
    node.packs.clean_before(node.token + 1)
    assert not (node.path / left.name).exists()


def test_a_damaged_intent(node: Node) -> None:
    """It is known that there is a step, and not which save it is."""
    kept = node.save(1)
    node.publish(kept)
    intent = Path(node.root.path) / "step_00000001" / "intent.json"
    intent.write_bytes(b"{")
    assert node.clean() == {kept.name}
    assert node.root.move_aside(1, node.token, "damaged")
    assert node.clean() == {kept.name}


def test_a_look_that_fails_deletes_nothing(node: Node) -> None:
    """Each look of a clean-up fails in turn."""
    kept = [node.save(step) for step in (1, 2, 3, 4)]
    for save in kept[1:]:
        node.publish(save)
    assert node.root.move_aside(3, node.token, "superseded")
    assert node.root.move_aside(4, node.token, "damaged")
    node.token = node.root.ownership.claim(node.token)
    looks = ("listdir", "lstat", "open", "scandir", "stat")
    made = 0

    def fail(call: Call, perform: Callable[..., Any]) -> Any:
        nonlocal made
        if call.name in looks and ".probe." not in call.path:
            made += 1
            if made - 1 == at:
                raise OSError(error, "")
        return perform(*call.args)

    for error in (errno.EIO, errno.EACCES, errno.ESTALE):
        at, made = -1, 0
        while at < made:
            at, made = at + 1, 0
            with contextlib.suppress(StorageError), Syscalls().hooked(fail):
                node.packs.clean(lambda: None)
            assert node.clean() == {save.name for save in kept}, f"look {at} fails with {errno.errorcode[error]}"
        assert at > 20


def test_public_names() -> None:
    assert issubclass(ckpt.CheckpointUnreachableError, ckpt.CheckpointError)
    assert not issubclass(ckpt.CheckpointUnreachableError, ckpt.CheckpointNotFoundError)
