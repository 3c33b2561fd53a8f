"""What is left in a pending save may be damaged: it is not published, and the reason names the file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CheckpointCorruptError
from ckpt.saving.publish import publish
from ckpt.storage.commit import Abandoned, PendingSave
from ckpt.storage.documents import decode_document, encode_document
from ckpt.storage.names import MANIFEST, NODES, SaveId, parse_save_name
from ckpt.storage.root import CheckpointRoot
from ckpt.validation import validate
from tests.ckpt.storage.small_saves import opened, save, state_of

PART = "parts/000/rank_00000.json"


@pytest.fixture
def pending(tmp_path: Path) -> PendingSave:
    """A complete save of step 2 that was not published; step 1 was."""
    with opened(tmp_path) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
    step = tmp_path / "step_00000002"
    name = decode_document((step / "intent.json").read_bytes(), "intent.json")["save"]
    for document in ("zarr.json", "state.json"):
        (step / document).unlink()
    step.rename(tmp_path / ".pending" / name)
    save_id = parse_save_name(name)
    assert isinstance(save_id, SaveId)
    return PendingSave(CheckpointRoot(str(tmp_path)), save_id)


def resealed(name: str, **changes: Any) -> Callable[[Path], None]:
    """Change members of a document and its checksum; None deletes a member."""

    def make(directory: Path) -> None:
        file = directory / name
        document = decode_document(file.read_bytes(), name) | changes
        file.write_bytes(encode_document({key: member for key, member in document.items() if member is not None}))

    return make


def missing(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def flipped(name: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        content = bytearray((directory / name).read_bytes())
        content[len(content) // 2] ^= 1
        (directory / name).write_bytes(content)

    return make


@pytest.mark.parametrize("gone", [{MANIFEST}, {NODES}, {MANIFEST, NODES}])
def test_a_database_that_is_missing_is_made(pending: PendingSave, tmp_path: Path, gone: set[str]) -> None:
    """No restore needs it."""
    for name in gone:
        (Path(pending.path) / name).unlink()
    publish(pending, lambda: None)
    step = tmp_path / "step_00000002"
    assert {MANIFEST, NODES} <= {path.name for path in step.iterdir()}
    assert validate(str(step)).whole


def test_a_save_that_an_earlier_version_began(pending: PendingSave, tmp_path: Path) -> None:
    """Its first part does not say whether all pack files are below one base."""
    resealed(PART, ocdbt=None)(Path(pending.path))
    for name in (MANIFEST, NODES):
        (Path(pending.path) / name).unlink()
    publish(pending, lambda: None)
    step = tmp_path / "step_00000002"
    assert not {MANIFEST, NODES} & {path.name for path in step.iterdir()}
    assert b"an earlier version began the save" in (step / "zarr.json").read_bytes()
    assert validate(str(step)).whole


DAMAGE = {
    "index missing": ("index.json", missing("index.json")),
    "index with a flipped bit": ("index.json", flipped("index.json")),
    "index without regions": ("index.json", resealed("index.json", regions=None)),
    "index with a number as an array": ("index.json", resealed("index.json", arrays=[7])),
    "index with a region that has no arrays": ("index.json", resealed("index.json", arrays=[])),
    "references missing": ("references.json", missing("references.json")),
    "part with a flipped bit": (PART, flipped(PART)),
    "part without files": (PART, resealed(PART, files=None)),
    "part with a file that is no list": (PART, resealed(PART, files=[3])),
    "part with another size": (PART, resealed(PART, files=[[0, 1, 2]])),
    "part that lacks its file": (PART, resealed(PART, files=[])),
    "part of another save": (PART, resealed(PART, save="another")),
}


def test_a_complete_save_is_published(pending: PendingSave, tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        assert checkpointer.restore(state_of(0.0)) == 2


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(pending: PendingSave, what: str) -> None:
    name, damage = DAMAGE[what]
    damage(Path(pending.path))
    with pytest.raises(CheckpointCorruptError) as caught:
        publish(pending, lambda: None)
    assert str(caught.value).startswith(os.path.join(pending.path, name))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-parts")], "none waits for gc"
    assert pending.has_begun(), "it is left as it was"


@pytest.mark.parametrize("what", DAMAGE)
def test_the_next_start_goes_on_without_a_damaged_save(pending: PendingSave, what: str, tmp_path: Path) -> None:
    name, damage = DAMAGE[what]
    damage(Path(pending.path))
    with opened(tmp_path) as checkpointer:
        assert checkpointer.restore(state_of(0.0)) == 1
    outcome = pending.outcome()
    assert isinstance(outcome, Abandoned)
    assert os.path.join(pending.path, name) in outcome.reason.message
