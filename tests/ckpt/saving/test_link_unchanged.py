"""Saves that link the files that did not change: each step has its own values, whatever becomes of the others."""

import ctypes
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import native
from ckpt.errors import CheckpointError
from ckpt.events import SavePublished
from ckpt.saving import write
from ckpt.staging import copy as staging_copy
from ckpt.staging import held_runs, runs
from ckpt.storage import unchanged_files
from ckpt.storage.names import step_name
from ckpt.storage.unchanged_files import UnchangedFiles
from ckpt.validation import validate
from tests.ckpt.crash.killers import with_writer
from tests.support import LeakCheck, run_ranks
from tests.support.saves import save_here
from tests.support.selection import full_only

_FILE_BYTES = 64 << 10
_POLYNOMIAL = 0x11EDC6F41  # that of CRC-32C: data that differ by it have the same checksum


def _state(count: int = 16_600) -> dict[str, Any]:
    """Return a state with three large tensors, each in a file of its own, and small ones."""
    large = {f"layer{n}": torch.arange(count, dtype=torch.float32) + n for n in range(3)}
    return {"large": large, "adapters": {f"layer{n}": torch.full((20,), float(n)) for n in range(3)}}


def _opened(root: Path, *, threads: int = 2, keep: int | None = 3, **staging: Any) -> ckpt.Checkpointer:
    options = ckpt.Staging(file_bytes=_FILE_BYTES, threads=threads, link_unchanged=True, **staging)
    return ckpt.Checkpointer(root, keep=keep, staging=options)


def _train(state: dict[str, Any]) -> None:
    """Change the small tensors."""
    for adapter in state["adapters"].values():
        adapter += 1.0


def _files(root: Path, step: int) -> dict[str, int]:
    """Return the inodes of the pack files of a step."""
    return {path.name: path.stat().st_ino for path in (root / step_name(step) / "packs").rglob("rank_*")}


def _shared(root: Path, step: int, other: int) -> set[str]:
    """Return the pack files that are one file in two steps."""
    return {name for name, _ in _files(root, step).items() & _files(root, other).items()}


def _bits(state: dict[str, Any]) -> dict[str, bytes]:
    return {f"{key}/{name}": t.numpy().tobytes() for key in state for name, t in state[key].items()}


def _saved(root: Path, step: int) -> dict[str, bytes]:
    """Return all tensors of a step as they are on the disk."""
    assert not validate(str(root / step_name(step))).problems
    with ckpt.open(root / step_name(step)) as checkpoint:
        return {name: checkpoint[name][...].tobytes() for name in checkpoint}


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a writer process would keep, for saves in the process of the test."""
    kept = UnchangedFiles()
    monkeypatch.setattr(write, "UnchangedFiles", lambda: kept)


def test_what_does_not_change_is_linked(tmp_path: Path, leak_check: LeakCheck) -> None:
    state, published = _state(), []
    with ckpt.observe(published.append), _opened(tmp_path) as checkpointer:
        for step in range(1, 7):
            _train(state)
            checkpointer.save(state, step)
    assert len(_files(tmp_path, 6)) == 4
    assert len(_shared(tmp_path, 4, 6)) == 3
    assert not _shared(tmp_path, 4, 6) & {"rank_00000_003"}, "the small tensors have a file of their own"
    assert _saved(tmp_path, 6) == _bits(state)
    for step in (4, 5):
        shutil.rmtree(tmp_path / step_name(step))
    assert _saved(tmp_path, 6) == _bits(state)
    sizes = [event.bytes for event in published if isinstance(event, SavePublished)]
    assert sizes[0] == sizes[1] > 20 * sizes[2] > 0
    assert sizes[2:] == sizes[2:3] * 4


def test_without_the_option_nothing_is_linked(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(file_bytes=_FILE_BYTES)) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(_state(), step)
    assert not _shared(tmp_path, 3, 4)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    "staging", [{}, {"compression": "zstd"}, pytest.param({"reuse_files": False}, marks=full_only)], ids=str
)
def test_every_step_has_its_own_values(tmp_path: Path, staging: dict[str, Any]) -> None:
    """Single bits change, and change back, while files are linked, removed and recycled."""
    draw, state, expected = random.Random(5), _state(), {}
    first = _bits(state)
    with _opened(tmp_path, **staging) as checkpointer:
        for step in range(1, 25):
            for name, tensor in state["large"].items():
                if draw.random() < 0.2:
                    raw = tensor.view(torch.uint8)
                    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
                elif draw.random() < 0.1:
                    tensor.copy_(torch.frombuffer(bytearray(first[f"large/{name}"]), dtype=torch.float32))
            _train(state)
            save_here(checkpointer, state, step)
            expected[step] = _bits(state)
            for kept in checkpointer.all_steps():
                assert _saved(tmp_path, kept) == expected[kept], f"step {kept} after step {step}"
    assert any(_shared(tmp_path, step, step + 1) for step in (22, 23))


def _other_data(state: dict[str, Any], name: str) -> None:
    state["large"][name].data = state["large"][name].data + 1


def _other_storage(state: dict[str, Any], name: str) -> None:
    state["large"][name].set_((state["large"][name] + 1).untyped_storage())


def _refilled_storage(state: dict[str, Any], name: str) -> None:
    """Free the memory, and put other values into new memory, most likely at the same address."""
    values = (state["large"][name] + 1).tolist()
    state["large"][name] = None
    state["large"][name] = torch.tensor(values)


def _by_address(state: dict[str, Any], name: str) -> None:
    """As a library does that PyTorch knows nothing of."""
    tensor = state["large"][name]
    byte = ctypes.c_uint8.from_address(tensor.data_ptr() + tensor.nbytes - 3)
    byte.value ^= 1


def _other_stride(state: dict[str, Any], name: str) -> None:
    """Every second element of a tensor is not copied as a run of memory; later it may be one again."""
    tensor = state["large"][name]
    state["large"][name] = torch.stack([tensor, tensor + 1], 1)[:, 1]


def _contiguous(state: dict[str, Any], name: str) -> None:
    state["large"][name] = state["large"][name].contiguous()


def _swapped(state: dict[str, Any], name: str) -> None:
    large = state["large"]
    large[name], large["layer0"] = large["layer0"], large[name]


_REPLACED = (_other_data, _other_storage, _refilled_storage, _by_address, _other_stride, _contiguous, _swapped)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("snapshots", [None, 1], ids=["one slot", "slots in turns"])
def test_replaced_memory_is_noticed(tmp_path: Path, snapshots: int | None) -> None:
    draw, state, used = random.Random(6), _state(), set()
    staging = ckpt.Staging(file_bytes=_FILE_BYTES, threads=2, link_unchanged=True)
    with ckpt.Checkpointer(tmp_path, keep=2, staging=staging, snapshots=snapshots) as checkpointer:
        for step in range(1, 40):
            if step % 3 == 0:
                change = _REPLACED[step // 3 % len(_REPLACED)]
                name = draw.choice([n for n, t in state["large"].items() if t.is_contiguous()] or ["layer0"])
                if change is _contiguous:
                    for each in state["large"]:
                        change(state, each)
                else:
                    change(state, name)
            _train(state)
            request = checkpointer.save_request(state, step)
            used.add(request.async_fn.task.region.region_id)
            request.execute_sync()
            request.execute_finalize_fns()
            assert _saved(tmp_path, step) == _bits(state), f"step {step}"
    assert len(used) == (1 if snapshots is None else 2)
    assert _shared(tmp_path, 38, 39)


@pytest.mark.skipif(not native.can_look(), reason="the compiled functions know what is in a slot")
@pytest.mark.usefixtures("_here")
def test_what_does_not_change_is_not_copied_and_not_read_by_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, digests = [], []

    def copy(runs: Any, held: held_runs.HeldRuns) -> None:
        copy_together(runs, held)
        copied.append(int(runs["bytes"][held.records["is_same"] == 0].sum()))

    copy_together = runs.copy_together
    monkeypatch.setattr(staging_copy, "copy_together", copy)
    monkeypatch.setattr(unchanged_files, "digest", lambda *of: digests.append(of) or native.digest(*of))
    state = _state()
    with _opened(tmp_path) as checkpointer:
        for step in range(1, 6):
            _train(state)
            save_here(checkpointer, state, step)
    all_bytes, small = (sum(t.nbytes for t in state[key].values()) for key in ("large", "adapters"))
    assert copied[:2] >= [all_bytes] * 2
    assert all(small <= nbytes < all_bytes / 100 for nbytes in copied[2:])
    assert not digests
    assert len(_shared(tmp_path, 4, 5)) == 3


@pytest.mark.usefixtures("_here")
def test_an_interrupted_save_leaves_what_is_known_of_memory_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of what changed was copied over what the step before had there. Then it changes back."""
    monkeypatch.setattr(runs, "_LEAST_BATCH_BYTES", 10_000)
    monkeypatch.setattr(runs, "_THREAD_BYTES", 1 << 30)
    state, calls = _state(), []

    def interrupted(*of: Any) -> None:
        calls.append(of)
        if len(calls) == 3:
            raise MemoryError("in the middle of the copies")
        native.update_runs(*of)

    with _opened(tmp_path) as checkpointer:
        for step in range(1, 4):
            save_here(checkpointer, state, step)
        before = _bits(state)
        for tensor in state["large"].values():
            tensor += 1
        monkeypatch.setattr(held_runs, "update_runs", interrupted)
        with pytest.raises(CheckpointError, match="in the middle of the copies"):
            save_here(checkpointer, state, 4)
        for tensor in state["large"].values():
            tensor -= 1
        for step in (5, 6, 7):
            save_here(checkpointer, state, step)
            assert _saved(tmp_path, step) == _bits(state) == before
    assert len(_shared(tmp_path, 6, 7)) == 4


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("is_interrupted", [False, True], ids=["saved", "interrupted"])
def test_nothing_is_known_of_what_was_copied_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """All tensors at once, so that no run is left; or a save that ends before its first run. Then all is as before."""
    state = {"large": {f"layer{n}": torch.arange(16_384, dtype=torch.float32) + n for n in range(3)}}
    strided = {key: torch.stack([each, each + 1], 1)[:, 1] for key, each in state["large"].items()}

    def interrupted(*of: Any) -> None:
        copy_boxes(*of)
        raise MemoryError("before the first run")

    copy_boxes = staging_copy.copy_boxes
    with _opened(tmp_path) as checkpointer:
        for step in range(1, 4):
            save_here(checkpointer, state, step)
        if is_interrupted:
            with monkeypatch.context() as patched:
                patched.setattr(staging_copy, "copy_boxes", interrupted)
                with pytest.raises(CheckpointError, match="before the first run"):
                    save_here(checkpointer, {"large": strided}, 4)
        else:
            save_here(checkpointer, {"large": strided}, 4)
            assert _saved(tmp_path, 4) == _bits({"large": strided})
        for step in (5, 6):
            save_here(checkpointer, state, step)
            assert _saved(tmp_path, step) == _bits(state)


@pytest.mark.usefixtures("_here")
def test_other_bytes_with_the_same_checksums_are_written(tmp_path: Path) -> None:
    state = _state()
    raw = state["large"]["layer1"].view(torch.uint8).numpy()
    with _opened(tmp_path) as checkpointer:
        for step in range(1, 4):
            save_here(checkpointer, state, step)
        before = native.crc32c(raw.data)
        # In a reflected CRC the lowest bit of a byte is its first one, and the highest power of the polynomial.
        pattern = int(f"{_POLYNOMIAL:033b}"[::-1], 2).to_bytes(5, "little")
        for at, byte in enumerate(pattern):
            raw[1000 + at] ^= byte
        assert native.crc32c(raw.data) == before
        for step in (4, 5):
            save_here(checkpointer, state, step)
    assert len(_shared(tmp_path, 3, 4)) == 3
    assert len(_shared(tmp_path, 4, 5)) == 4
    assert _saved(tmp_path, 4) == _saved(tmp_path, 5) == _bits(state)


def _rewrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _replace(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def _put_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("change", [_rewrite, _replace, _put_a_link, os.unlink], ids=lambda each: each.__name__)
def test_a_file_that_is_not_the_written_one_is_not_linked(tmp_path: Path, change: Callable[[Path], None]) -> None:
    state = _state()
    with _opened(tmp_path) as checkpointer:
        for step in range(1, 4):
            save_here(checkpointer, state, step)
        change(tmp_path / step_name(3) / "packs" / "000" / "rank_00000_001")
        save_here(checkpointer, state, 4)
        assert _saved(tmp_path, 4) == _bits(state)
        assert _shared(tmp_path, 3, 4) == {"rank_00000_000", "rank_00000_002", "rank_00000_003"}
        save_here(checkpointer, state, 5)
        assert len(_shared(tmp_path, 4, 5)) == 4


@pytest.mark.usefixtures("_here")
def test_damage_is_reported_in_each_step_that_has_the_file(tmp_path: Path) -> None:
    """The documentation says so; the next save does not carry it on."""
    state = _state()
    with _opened(tmp_path) as checkpointer:
        for step in range(1, 4):
            save_here(checkpointer, state, step)
        _rewrite(tmp_path / step_name(2) / "packs" / "000" / "rank_00000_001")
        save_here(checkpointer, state, 4)
    damaged = [step for step in (2, 3, 4) if validate(str(tmp_path / step_name(step))).problems]
    assert damaged == [2, 3]
    assert _saved(tmp_path, 4) == _bits(state)


@pytest.mark.usefixtures("_here")
def test_a_step_that_was_deleted_is_written_anew(tmp_path: Path) -> None:
    state = _state()
    with _opened(tmp_path, keep=None) as checkpointer:
        for step in range(1, 4):
            save_here(checkpointer, state, step)
        checkpointer.delete(3)
        save_here(checkpointer, state, 4)
    assert not _shared(tmp_path, 1, 4)
    assert not _shared(tmp_path, 2, 4)
    assert _saved(tmp_path, 4) == _bits(state)


@pytest.mark.usefixtures("_here")
def test_another_structure_is_written(tmp_path: Path) -> None:
    with _opened(tmp_path) as checkpointer:
        for step in range(1, 4):
            save_here(checkpointer, _state(), step)
        other = _state(16_601)
        for step in range(4, 8):
            save_here(checkpointer, other, step)
    assert len(_shared(tmp_path, 5, 7)) == 4
    assert _saved(tmp_path, 7) == _bits(other)


def _save_on_ranks(rank: int, world_size: int, root: Path) -> None:
    state = _state()
    with _opened(root) as checkpointer:
        for step in range(1, 5):
            _train(state)
            checkpointer.save(state, step)


def test_by_all_ranks(tmp_path: Path) -> None:
    run_ranks(_save_on_ranks, 2, tmp_path)
    state = _state()
    for _ in range(4):
        _train(state)
    shared = _shared(tmp_path, 3, 4)
    assert {name[:10] for name in shared} == {"rank_00000", "rank_00001"}
    assert _saved(tmp_path, 4) == _bits(state)


def test_killed_between_links_and_the_record(tmp_path: Path) -> None:
    """The save is abandoned as any other; the steps whose files it had linked are whole, and so is the next one."""
    state = _state()
    with _opened(tmp_path, threads=1) as checkpointer:
        for step in range(1, 4):
            _train(state)
            checkpointer.save(state, step)
        before = _bits(state)
        _train(state)
        request = with_writer(checkpointer.save_request(state, 4), point="during write", victims=("writer",))
        checkpointer.queue.schedule_async_request(request)
        with pytest.raises(CheckpointError):
            checkpointer.maybe_finalize(blocking=True)
        assert checkpointer.all_steps() == [1, 2, 3]
        assert _saved(tmp_path, 3) == before
        for step in (5, 6, 7):
            _train(state)
            checkpointer.save(state, step)
            assert _saved(tmp_path, step) == _bits(state)
        assert len(_shared(tmp_path, 6, 7)) == 3
    assert not list((tmp_path / ".pending").iterdir())
    assert all(path.stat().st_nlink == 3 for path in (tmp_path / step_name(7)).rglob("rank_*_000"))


def test_where_files_cannot_be_linked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a local root"):
        ckpt.Checkpointer(f"directory://{tmp_path}", staging=ckpt.Staging(link_unchanged=True))
    mirror = ckpt.Mirror(tmp_path / "mirror")
    with pytest.raises(ValueError, match="no node_local"):
        ckpt.Checkpointer(
            tmp_path / "root", node_local=tmp_path, mirror=mirror, staging=ckpt.Staging(link_unchanged=True)
        )
