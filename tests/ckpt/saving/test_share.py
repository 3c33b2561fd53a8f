"""What is behind a slot: enough to restore from it, and nothing that could be taken for another save."""

import os
from collections.abc import Iterator

import pytest

from ckpt.errors import CheckpointCorruptError
from ckpt.saving.share import HEADER_BYTES, PlanDocuments, Share
from ckpt.storage.documents import encode_document
from ckpt.storage.names import SaveId
from inprocess.ipc.shared_memory import SharedMemory

_ABOUT = {"rank": 1, "world_size": 2, "plan": "p", "aliases": [], "containers": [], "places": [[0, 4096, 100]]}
_SAVE = SaveId(7, 0, "0" * 16)
_PART = {"save": _SAVE.name, "files": [[0, 100, 5]], "values": [], "restart": 3}


@pytest.fixture
def share() -> Iterator[Share]:
    with SharedMemory.create("ckpt-slot-0", 4 * HEADER_BYTES) as region:
        found = Share(region)
        found.describe(PlanDocuments(encode_document(_ABOUT), b"index"))
        yield found


def _complete(share: Share, generation: int = 5) -> None:
    share.clear()
    share.region.buffer[-HEADER_BYTES:][:8] = generation.to_bytes(8, "little")
    share.label(_SAVE.name, generation)
    share.add_part(_PART)


def test_another_process_that_has_the_memory_reads_it(share: Share) -> None:
    _complete(share)
    fd = os.dup(share.region.fd)
    with SharedMemory(fd, share.region.size, "mapped", "1") as region:
        documents = Share(region).documents()
        assert documents is not None
        assert (documents.of.save, documents.of.rank, documents.of.world_size, documents.of.restart) == (_SAVE, 1, 2, 3)
        assert documents.index == b"index"
        assert documents.places == {0: (4096, 100)}
        expected = {**_ABOUT, **_PART, "times": {}}
        del expected["places"], expected["restart"]
        assert documents.manifest() == expected


def test_nothing_before_the_copies_are_complete(share: Share) -> None:
    _complete(share)
    share.region.buffer[-HEADER_BYTES:][:8] = bytes(8)
    assert (share.save_name, share.is_whole, share.documents()) == (None, False, None)


def test_nothing_before_the_part_is_there(share: Share) -> None:
    _complete(share)
    share.clear()
    assert share.documents() is None
    share.label(_SAVE.name, 5)
    assert share.save_name == _SAVE.name
    assert share.documents() is None


def test_the_part_of_another_save_does_not_count(share: Share) -> None:
    _complete(share)
    share.label(SaveId(8, 0, "1" * 16).name, 5)
    assert share.documents() is None


def test_a_part_may_grow(share: Share) -> None:
    _complete(share)
    share.add_part({**_PART, "values": ["x" * 100_000]})
    documents = share.documents()
    assert documents is not None
    assert documents.part["values"] == ["x" * 100_000]


@pytest.mark.parametrize("at", [10, -10])
def test_a_wrong_byte_is_found(share: Share, at: int) -> None:
    _complete(share)
    size = os.fstat(share.region.fd).st_size
    offset = share.region.size + at if at > 0 else size + at
    os.pwrite(share.region.fd, bytes([os.pread(share.region.fd, 1, offset)[0] ^ 1]), offset)
    with pytest.raises(CheckpointCorruptError, match="share in memory is damaged"):
        share.documents()


def test_documents_that_do_not_say_whose_they_are(share: Share) -> None:
    _complete(share)
    share.add_part({**_PART, "restart": "x"})
    documents = share.documents()
    assert documents is not None
    with pytest.raises(CheckpointCorruptError):
        assert documents.of
