"""What a mirror needs of every root: in a directory, in an S3 bucket and in memory."""

import pytest

from ckpt.errors import FencedError, StorageError
from ckpt.storage.interface import Root
from ckpt.storage.outcomes import Published
from ckpt.storage.ownership import OwnerState
from ckpt.storage.regular_files import MissingFileError
from tests.ckpt.objects.test_conformance import _published, _save, root, token

__all__ = ["root", "token"]  # the fixtures


def test_files_of_a_pending_save(root: Root, token: int) -> None:
    pending = _save(root, token, 7, parts=0)
    with pytest.raises(MissingFileError):
        pending.source.read("packs/000/rank_00001_000", 10)
    for data in (b"first", b"the second one"):
        pending.write_file("packs/000/rank_00001_000", memoryview(data))
        assert pending.source.read("packs/000/rank_00001_000", 100) == data
        file = pending.source.open("packs/000/rank_00001_000")
        assert file.size == len(data)
        file.close()
    pending.write_file("parts/000/rank_00001.json", memoryview(b"{}"))
    assert pending.parts_present() == {1}
    pending.write_documents({"zarr.json": b"{}"})
    assert pending.publish() == Published()
    assert root.source_of(7).read("packs/000/rank_00001_000", 100) == b"the second one"


def test_saves(root: Root, token: int) -> None:
    assert root.saves() == {}
    names = {step: _published(root, token, step, step) for step in (3, 5)}
    assert root.saves() == names


def test_a_claim_with_the_token_of_another_root(root: Root) -> None:
    root.make()
    ownership = root.ownership
    assert ownership.claim_as(10**12) == 10**12
    assert ownership.claim_as(10**12) == 10**12, "by another process of the job"
    ownership.check(10**12)
    with pytest.raises(FencedError, match="started later"):
        ownership.claim_as(10**12 - 1)
    assert ownership.claim_as(10**12 + 5) == 10**12 + 5
    with pytest.raises(FencedError):
        ownership.check(10**12)
    assert ownership.newest() == 10**12 + 5


def test_a_temporary_claim_does_not_end_a_mirror(root: Root) -> None:
    root.make()
    ownership, job = root.ownership, 10**12
    ownership.claim_as(job)
    temporary = ownership.claim(job, temporary=True)
    with pytest.raises(StorageError, match="try again"):
        ownership.claim_as(job)
    ownership.release(temporary)
    assert ownership.state(temporary) is OwnerState.GONE
    again = ownership.claim_as(job)
    assert again > temporary
    assert ownership.claim_as(job, again) == again, "a later process of the job, which knows that"
    with pytest.raises(FencedError):
        ownership.claim_as(job)
    assert ownership.claim_as(again + 1) == again + 1
    with pytest.raises(FencedError):
        ownership.claim_as(job, again)


def test_a_claim_is_larger_than_those_of_the_mirror(root: Root) -> None:
    root.make()
    above = 10**17
    assert root.ownership.claim(0, above=above) == above + 1
