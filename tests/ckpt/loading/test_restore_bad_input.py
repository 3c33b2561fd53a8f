"""Invalid input raises an error that says what and where, on every rank, before anything is changed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointNotFoundError,
    FormatVersionError,
    PerRank,
    StateError,
    StateMismatchError,
    StorageError,
)
from ckpt.storage.documents import encode_root
from ckpt.storage.root import CheckpointRoot
from tests.support import LeakCheck, run_ranks
from tests.support.saves import save_here


@pytest.mark.parametrize(
    "leaf",
    [threading.Lock(), lambda: 0, object(), {torch.ones(2)}, torch.empty(2, 2).to_sparse(), torch.ones(3).to("meta")],
    ids=["lock", "lambda", "object", "set of tensors", "sparse", "meta"],
)
def test_a_leaf_that_cannot_be_stored(tmp_path: Path, leaf: object, leak_check: LeakCheck) -> None:
    root = tmp_path / "root"
    checkpointer = Checkpointer(root)
    for state in ({"model": {"layers": [torch.ones(3), {"bad": leaf}]}}, {"model": {"layers": [0, {"bad": leaf}]}}):
        with pytest.raises(StateError, match=r"model/layers/1/bad(/\(in a set\))?: "):
            checkpointer.save_request(state, 1)
    started = [left for left in leak_check.difference() if "eventfd" not in left]
    assert not started, "no process was started, no memory mapped"
    assert not root.exists()
    checkpointer.close()


def test_keys_that_cannot_be_stored(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for key in (None, (1, 2), 1.5, True):
            with pytest.raises(StateError, match="model: keys must be str or int"):
                checkpointer.save_request({"model": {key: torch.ones(2)}}, 1)


def _disagree(rank: int, world_size: int, root: Path) -> list[str]:
    texts = []
    states: list[dict[str, Any]] = [
        {"model": {"w": torch.zeros(3 + rank), "v": torch.zeros(2)}},
        {"model": {"w": torch.zeros(3, dtype=torch.int32 if rank else torch.float32)}},
        {"model": {"w": PerRank(torch.zeros(3)) if rank else torch.zeros(3)}},
    ]
    with Checkpointer(root) as checkpointer:
        for state in states:
            with pytest.raises(StateError) as caught:
                checkpointer.save_request(state, 1)
            texts.append(str(caught.value))
        assert CheckpointRoot(str(root)).pending() == checkpointer.all_steps() == []
        save_here(checkpointer, {"model": {"w": torch.zeros(3)}, "own": PerRank(torch.zeros(rank))}, 1)
        assert checkpointer.all_steps() == [1]
    return texts


def test_ranks_that_disagree(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks(_disagree, 2, tmp_path / "root"))
    assert first == second
    assert "model/w: float32[3] replicated on rank 0, float32[4] replicated on rank 1" in first[0]
    assert "model/w: float32[3] replicated on rank 0, int32[3] replicated on rank 1" in first[1]
    assert "model/w: float32[3] replicated on rank 0, float32[3] per rank on rank 1" in first[2]
    assert all("nothing was written" in text for text in first)


def _state(value: float) -> dict[str, Any]:
    return {
        "a": torch.full((400,), value),
        "b": {"c": torch.full((30, 20), value), "d": torch.full((2,), value)},
        "n": value,
        "list": [value],
    }


def test_everything_that_does_not_fit_is_listed_and_nothing_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def target() -> dict[str, Any]:
        state = _state(0.0)
        state["b"]["c"] = torch.zeros(30, 21)
        state["b"]["d"] = torch.zeros(2, dtype=torch.float16)
        del state["list"]
        return {**state, "new": torch.zeros(3), "new_number": 4}

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, _state(5.0), 7)
        state = target()
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.restore(state)
        text = str(caught.value)
        assert text.startswith("5 name(s) of the state do not fit step 7:")
        for line in (
            "dtype: b/d is float32 in the checkpoint, float16 in the state",
            "missing: new (float32[3])",
            "missing: new_number (a value)",
            "shape: b/c is [30, 20] in the checkpoint, [30, 21] in the state",
            "unexpected: list",
        ):
            assert f"\n  {line}" in text
        assert str(state) == str(target())
        with caplog.at_level(logging.WARNING, "ckpt"):
            assert checkpointer.restore(state, strict=False) == 7
    assert "unexpected: list" in caplog.text
    assert "missing: new (float32[3])" in caplog.text
    assert (state["n"], state["new_number"]) == (5.0, 4)
    assert torch.equal(state["a"], torch.full((400,), 5.0))
    assert not any(tensor.any() for tensor in (*state["b"].values(), state["new"]))


def test_a_long_list_is_cut_to_twenty_and_a_count(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"a": 1}, 7)
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.restore({"a": 1, **{f"t{i:02d}": torch.zeros(1) for i in range(33)}})
    text = str(caught.value)
    assert text.startswith("33 name(s)")
    assert text.count("  missing:") == 20
    assert "and 13 more" in text


def _mismatch_on_one_rank(rank: int, world_size: int, root: Path) -> list[Any]:
    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, {"shared": torch.ones(30), "own": PerRank(torch.full((20,), rank))}, 1)
        state = {"shared": torch.zeros(30), "own": PerRank(torch.zeros(20 + rank, dtype=torch.int64))}
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.restore(state)
        assert not state["shared"].any()
        return [str(caught.value)]


def test_a_mismatch_on_one_rank_stops_all(tmp_path: Path) -> None:
    for result in run_ranks(_mismatch_on_one_rank, 2, tmp_path):
        assert "shape: own is [20] in the checkpoint, [21] in the state" in result.value[0]


def _stages(rank: int, world_size: int, root: Path) -> None:
    """Pipeline parallelism: every rank has different names, and its own optimizer."""
    with Checkpointer(root) as checkpointer:
        for seed in (1, 2):
            torch.manual_seed(seed + 10 * rank)
            model = torch.nn.Linear(20 + rank, 30)
            optimizer = torch.optim.AdamW(model.parameters())
            state = {f"stage{rank}": model, "shared": torch.full((9,), float(seed)), "optimizer": PerRank(optimizer)}
            state[f"position{rank}"] = PerRank(rank + seed)
            if seed == 1:
                model(torch.ones(20 + rank)).sum().backward()
                optimizer.step()
                expected = str(model.state_dict()) + str(optimizer.state_dict())
                save_here(checkpointer, state, 1)
        assert checkpointer.restore(state) == 1
        assert str(model.state_dict()) + str(optimizer.state_dict()) == expected
        assert state["shared"].tolist() == [1.0] * 9
        assert state[f"position{rank}"].value == rank + 1
        for name in (f"stage{rank}", f"position{rank}"):
            with (
                pytest.raises(StateMismatchError, match=f"unexpected: {name}")
                if rank == 1
                else pytest.raises(StateMismatchError)
            ):
                checkpointer.restore({key: item for key, item in state.items() if rank == 0 or key != name})


def test_ranks_with_different_names(tmp_path: Path) -> None:
    run_ranks(_stages, 2, tmp_path)


# -- damage ------------------------------------------------------------------------------------------------------------


def _flip(path: Path, offset: int = 40) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


_FILE = "packs/000/rank_00000_{:03d}"


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture
def two_steps(tmp_path: Path) -> Iterator[tuple[Checkpointer, Path]]:
    root = tmp_path / "root"
    with Checkpointer(root, staging=ckpt.Staging(inner_bytes=256, file_bytes=512)) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
    with Checkpointer(
        root, staging=ckpt.Staging(inner_bytes=256, file_bytes=512)
    ) as checkpointer:  # another one, which has nothing in memory
        yield checkpointer, root / "step_00000002"


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        (_FILE.format(0), _flip, [r"tensor a, chunk \(0,\)", _FILE.format(0), "checksum"]),
        (_FILE.format(1), _cut, ["tensor ", r"chunk \(", _FILE.format(1), "ends at offset"]),
        (_FILE.format(1), Path.unlink, ["tensor ", r"chunk \(", _FILE.format(1), "missing"]),
        ("packs", shutil.rmtree, ["tensor ", r"chunk \(", "packs/000/rank_00000_", "missing"]),
        ("index.json", _cut, ["index.json"]),
        ("index.json", Path.unlink, ["index.json", "missing"]),
        ("state.json", _cut, ["state.json"]),
        ("state.json", Path.unlink, ["state.json", "missing"]),
        ("zarr.json", _cut, ["zarr.json", "truncated"]),
        ("zarr.json", lambda path: _flip(path, 300), ["zarr.json"]),
        ("zarr.json", Path.unlink, ["zarr.json", "missing"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_damaged_step(
    two_steps: tuple[Checkpointer, Path],
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], None],
    says: list[str],
) -> None:
    checkpointer, step = two_steps
    damage(step / file)
    with pytest.raises(CheckpointCorruptError) as caught:
        checkpointer.restore(_state(0.0), 2)
    for pattern in says:
        caught.match(pattern)
    assert caught.match(str(step))
    state = _state(0.0)
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert checkpointer.restore(state) == 1
    assert str(state) == str(_state(1.0))
    assert "step 2 cannot be restored, trying the step before" in caplog.text
    assert file.removeprefix("./") in caplog.text


def test_when_every_step_is_damaged(two_steps: tuple[Checkpointer, Path]) -> None:
    checkpointer, step = two_steps
    for path in (step, step.with_name("step_00000001")):
        _flip(path / _FILE.format(0))
    with pytest.raises(CheckpointCorruptError, match="step_0000000"):
        checkpointer.restore(_state(0.0))


def test_format_1_says_which_version_reads_it(two_steps: tuple[Checkpointer, Path]) -> None:
    checkpointer, step = two_steps
    document = json.loads((step / "zarr.json").read_bytes())
    document["attributes"]["ckpt"]["format"] = 1
    del document["attributes"]["ckpt"]["crc32c"]
    (step / "zarr.json").write_bytes(encode_root(document))
    for attempt in (lambda: checkpointer.restore(_state(0.0)), lambda: ckpt.open(step)):
        with pytest.raises(FormatVersionError, match=r"is in format 1.*reads format 2.*version 0\.1 of ckpt-inprocess"):
            attempt()


_OF_RANK_1 = "packs/000/rank_00001_000"


def _damaged_for_one_rank(rank: int, world_size: int, root: Path) -> list[Any]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            state = {"shared": torch.full((300,), step), "own": PerRank(torch.full((100,), 10 * step + rank))}
            save_here(checkpointer, state, step)
    torch.distributed.barrier()
    with Checkpointer(root) as checkpointer:  # another one, which has nothing in memory
        if rank == 0:
            _flip(root / "step_00000002" / _OF_RANK_1)
        torch.distributed.barrier()
        with pytest.raises(CheckpointCorruptError) as caught:
            checkpointer.restore(state, 2)
        state = {"shared": torch.zeros(300, dtype=torch.int64), "own": PerRank(torch.zeros(100, dtype=torch.int64))}
        restored = checkpointer.restore(state)
    return [str(caught.value), restored, int(state["shared"].sum()), int(state["own"].value.sum()), messages]


def test_damage_that_one_rank_meets_sends_all_ranks_back(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(_damaged_for_one_rank, 2, tmp_path)):
        text, restored, shared, own, messages = result.value
        assert "tensor own, chunk (0,)" in text
        assert _OF_RANK_1 in text
        assert rank == 1 or text.startswith("rank 1 could not read step 2")
        assert (restored, shared, own) == (1, 300, 100 * (10 + rank))
        assert any("step 2 cannot be restored, trying the step before" in message for message in messages)


def test_a_newer_format_version(two_steps: tuple[Checkpointer, Path]) -> None:
    checkpointer, step = two_steps
    document = json.loads((step / "zarr.json").read_bytes())
    document["attributes"]["ckpt"]["format"] = 9
    del document["attributes"]["ckpt"]["crc32c"]
    (step / "zarr.json").write_bytes(encode_root(document))
    for attempt in (lambda: checkpointer.restore(_state(0.0)), lambda: ckpt.open(step)):
        with pytest.raises(FormatVersionError, match=r"is in format 9.*reads format 2.*newer version"):
            attempt()


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.write_text("no directory")
    with Checkpointer(root) as checkpointer:
        for attempt in (checkpointer.latest_step, lambda: checkpointer.restore(_state(0.0))):
            with pytest.raises(StorageError, match=f"{root} is a file"):
                attempt()
    with Checkpointer(root) as checkpointer:
        with pytest.raises(StorageError, match=f"(?s){root}.*is a file"):  # training can go on
            checkpointer.async_save(_state(1.0), 1)
        assert checkpointer.maybe_finalize(blocking=True) == []
    assert root.read_text() == "no directory"


def test_a_step_that_is_not_there(two_steps: tuple[Checkpointer, Path]) -> None:
    checkpointer, step = two_steps
    with pytest.raises(CheckpointNotFoundError, match=r"no published step 3; it has \[1, 2\]"):
        checkpointer.restore(_state(0.0), 3)
    with pytest.raises(CheckpointNotFoundError, match="no published step 9"):
        ckpt.open(step.parent, 9)


def test_a_root_that_is_not_there_has_no_step(tmp_path: Path) -> None:
    state = _state(3.0)
    with Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.restore(state) is None
        assert checkpointer.latest_step() is None
        with pytest.raises(CheckpointNotFoundError, match="it has none"):
            checkpointer.restore(state, 3)
    assert str(state) == str(_state(3.0))
    assert not (tmp_path / "root").exists()


def _empty(path: Path) -> None:
    path.mkdir()


def _packs_only(path: Path) -> None:
    shutil.copytree(path.parent / "step_00000002", path)
    for name in os.listdir(path):
        if name != "packs":
            (shutil.rmtree if (path / name).is_dir() else os.unlink)(path / name)


def _linked_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def _linked_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [_empty, _packs_only, Path.touch, os.mkfifo, _linked_to_nothing, _linked_to_itself])
def test_an_entry_with_the_name_of_the_newest_step_that_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], Any]
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
    make(tmp_path / "step_00000003")
    with Checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING, "ckpt"):
        state = _state(0.0)
        assert checkpointer.restore(state) == 2
        assert str(state) == str(_state(2.0))
        (message,) = caplog.messages
        assert "step 3 cannot be restored, trying the step before" in message
        assert "step_00000003 has the name of a step, and is none: it" in message
        with pytest.raises(CheckpointCorruptError, match="step_00000003 has the name of a step, and is none"):
            checkpointer.restore(state, 3)
        with pytest.raises(CheckpointCorruptError, match="step_00000003 has the name of a step, and is none"):
            ckpt.load(tmp_path)
        assert checkpointer.restore(state) == 2
        save_here(checkpointer, _state(3.0), 3)
        assert checkpointer.restore(state) == 3
    assert str(state) == str(_state(3.0))
    assert len(list((tmp_path / ".damaged").iterdir())) == 1
