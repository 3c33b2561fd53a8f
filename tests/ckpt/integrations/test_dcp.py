"""torch.distributed.checkpoint writes and reads steps: what it plans, whoever wrote them, and whatever dies."""

from __future__ import annotations

import copy
import enum
import io
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.integrations.dcp import Reader, Writer, latest_step
from ckpt.storage import roots
from tests.support import LeakCheck, run_ranks
from tests.support.loads import stopped_until_a_load_waits
from tests.support.selection import full_only

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.timeout(120),
]

PROGRAMS = Path(__file__).parent / "programs"


class Color(enum.Enum):
    RED = 1


class Shade(enum.Enum):
    DARK = 1


class Point(NamedTuple):
    x: Any
    y: Any


class Pair(NamedTuple):
    a: int
    b: str


def _nested() -> dict[str, Any]:
    """Each structure that DCP divides in its own way."""
    return {
        "model": {"0.weight": torch.randn(4, 3), "deep": {"er": {"bias": torch.randn(5)}}},
        "bfloat16": torch.randn(6).bfloat16(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 4).t(),
        "step": 7,
        "none": None,
        "nan": float("inf"),
        "name": "run",
        "bytes": b"\x00\xff",
        "file": io.BytesIO(b"in memory"),
        "tuple": (1, ("x", 2.0)),
        "lists": [[1, 2], [3]],
        "no items": [],
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}, {"lr": 0.2, "inner": [{"k": 1}, {"k": 2}]}],
        "mixed": [torch.arange(3), {"n": 1, "t": torch.ones(2)}, [5, {"b": 2}], [torch.zeros(1), [6]], "last"],
    }


def _blank(node: Any) -> Any:
    """Return the same structure with other leaves."""
    if isinstance(node, torch.Tensor):
        return torch.full_like(node, 1)
    if isinstance(node, dict):
        return {key: _blank(item) for key, item in node.items()}
    if isinstance(node, list) and node and any(isinstance(item, torch.Tensor | dict | list) for item in node):
        return [_blank(item) for item in node]
    return "to be replaced"


def _assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).contiguous().view(torch.uint8))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, item in expected.items():
            _assert_equal(found[key], item)
    elif isinstance(expected, io.BytesIO):
        assert found.getvalue() == expected.getvalue()
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_equal(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


def _failure(caught: pytest.ExceptionInfo[CheckpointException], rank: int = 0) -> BaseException:
    return caught.value.failures[rank][0]


# -- one process -------------------------------------------------------------------------------------------------------


def test_what_dcp_saves_dcp_loads_and_so_does_a_checkpointer(tmp_path: Path, leak_check: LeakCheck) -> None:
    state = _nested()
    with Writer(tmp_path) as writer:
        dcp.save(state, checkpoint_id=tmp_path / "step-3", storage_writer=writer)
        dcp.save({"other": torch.ones(2)}, checkpoint_id="step_4", storage_writer=writer)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000003", "step_00000004"]

    loaded = _blank(state)
    dcp.load(loaded, checkpoint_id=tmp_path / "step-3", storage_reader=Reader())
    _assert_equal(loaded, state)

    restored = _blank(state)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(restored, step=3) == 3
    _assert_equal(restored, state)

    with ckpt.open(tmp_path, 3) as checkpoint:
        assert checkpoint["model/deep/er/bias"].shape == (5,)
        assert checkpoint.values_by_name["groups"] == state["groups"]
    with ckpt.open(tmp_path) as checkpoint:
        assert (checkpoint.step, list(checkpoint)) == (4, ["other"])


def test_what_a_checkpointer_saves_dcp_loads(tmp_path: Path) -> None:
    state = {**_nested(), "tied": None}
    state["tied"] = state["model"]["0.weight"]
    own = {"seed": ckpt.PerRank({"n": 5, "t": torch.arange(4)})}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({**state, **own}, 1)
    loaded = {**_blank(state), "seed.n@rank0": 0, "seed.t@rank0": torch.zeros(4, dtype=torch.int64)}
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    assert loaded.pop("seed.n@rank0") == 5
    assert torch.equal(loaded.pop("seed.t@rank0"), torch.arange(4))
    _assert_equal(loaded, state)


def test_a_load_is_a_restore_for_those_that_observe(tmp_path: Path) -> None:
    state = {"w": torch.arange(100.0), "array": np.arange(3.0), "n": 1}
    dcp.save(state, storage_writer=Writer(tmp_path / "step_2"))
    seen: list[Any] = []
    with ckpt.observe(seen.append):
        dcp.load({"w": torch.zeros(100), "array": np.zeros(3), "n": 0}, storage_reader=Reader(tmp_path))
        with pytest.raises(CheckpointException):
            dcp.load({"w": torch.zeros(7)}, storage_reader=Reader(tmp_path))
    restored = seen[0]
    assert isinstance(restored, ckpt.events.Restored)
    assert (restored.rank, restored.step, restored.storage_bytes) == (0, 2, 424)
    assert len(seen) == 1  # a plan that does not fit reads nothing


class _App(torch.distributed.checkpoint.stateful.Stateful):
    """The idiom of PyTorch's tutorials: one object for model and optimizer."""

    def __init__(self, kind: type[torch.optim.Optimizer], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.optimizer = kind(self.model.parameters(), lr=0.1 * (seed + 1))
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_stateful_objects(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    saved, loaded = _App(kind, 0), _App(kind, 1)
    expected = saved.state_dict()
    writer = Writer(tmp_path / "step_1")
    dcp.save({"app": saved}, storage_writer=writer)
    dcp.load({"app": loaded}, storage_reader=Reader(tmp_path / "step_1"))
    _assert_equal(loaded.state_dict(), expected)
    restored = _App(kind, 2)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"app": restored}) == 1
    _assert_equal(restored.state_dict(), expected)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_saved_by_dcp_is_restored_by_a_checkpointer(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    saved, restored = _App(kind, 0), _App(kind, 1)
    state = {"model": saved.model.state_dict(), "optimizer": saved.optimizer.state_dict()}
    dcp.save(state, storage_writer=Writer(tmp_path / "step_1"))
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"model": restored.model, "optimizer": restored.optimizer})
    _assert_equal(restored.optimizer.state_dict(), saved.optimizer.state_dict())


def test_an_empty_dict_in_a_list(tmp_path: Path) -> None:
    """DCP hands nothing over for it, and does not load it."""
    dcp.save({"list": [{"a": 1}, {}, {"b": [{}, {"c": 2}]}]}, storage_writer=Writer(tmp_path / "step_1"))
    with ckpt.open(tmp_path) as checkpoint:
        assert checkpoint.values_by_name == {"list": [{"a": 1}, {}, {"b": [{}, {"c": 2}]}]}


def test_keys_that_are_numbers(tmp_path: Path) -> None:
    state = {"layers": {"0": torch.ones(1), "10": torch.ones(2), "01": 5}}
    dcp.save(state, storage_writer=Writer(tmp_path / "step_1"))
    dcp.save(state, storage_writer=Writer(tmp_path / "step_2", string_keys=True))
    for step, keys in (1, [0, 10, "01"]), (2, ["0", "10", "01"]):
        index = ckpt.open(tmp_path, step).index
        assert {path[1] for path in (*index.tensors, *index.values)} == set(keys)
        loaded = _blank(state)
        dcp.load(loaded, checkpoint_id=tmp_path / f"step_{step}", storage_reader=Reader())
        _assert_equal(loaded, state)


def test_enums_and_named_tuples_are_registered(tmp_path: Path) -> None:
    state = {"color": Color.RED, "pair": Pair(1, "x")}
    dcp.save(state, storage_writer=Writer(tmp_path / "step_1"))
    loaded: dict[str, Any] = {"color": None, "pair": None}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(loaded, storage_reader=Reader(tmp_path))
    assert isinstance(_failure(caught), ckpt.StateMismatchError)
    assert "call ckpt.register_encoder before the load" in str(_failure(caught))
    ckpt.register_encoder(Color)
    ckpt.register_encoder(Pair)
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    assert loaded == state


def _objects() -> dict[str, Any]:
    """Leaves that DCP does not divide, with arrays and tensors in them."""
    tied = torch.arange(3)
    return {
        "array": np.arange(6.0).reshape(2, 3).T,
        "number": np.array(7),
        "nested": {"array": np.arange(4, dtype=np.int16)},
        "tuple": (torch.ones(2), "text", np.zeros(3, bool), (tied, tied), {"deep": [torch.zeros(1), 5], "empty": {}}),
        "deque": deque([torch.ones(1), 2], maxlen=3),
        "point": Point(torch.ones(2), np.ones(2)),
        "list": [(torch.ones(1), 3), {"x": (np.ones(1),)}, 4],
    }


def _assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, item in expected.items():
            _assert_same(found[key], item)
    elif isinstance(expected, list | tuple | deque):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    else:
        assert found == expected


def test_arrays_and_tuples_with_tensors_are_stored_as_in_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.values.registry._ENCODERS", {})
    ckpt.register_encoder(Point)
    state = _objects()
    dcp.save(state, storage_writer=Writer(tmp_path / "step_1"))
    loaded = {**_blank(state), "list": [None, {"x": None}, 0]}
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    _assert_same(loaded, state)

    restored = copy.deepcopy(state)
    restored["array"][:], restored["tuple"][0][:], restored["nested"]["array"][:] = 0, 0, 0
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(restored) == 1
        _assert_same(restored, state)
        checkpointer.save({"tuple": (torch.ones(2), 5)}, 2)
    of_a_checkpointer: dict[str, Any] = {"tuple": None}
    dcp.load(of_a_checkpointer, storage_reader=Reader(tmp_path))
    _assert_same(of_a_checkpointer, {"tuple": (torch.ones(2), 5)})


@pytest.mark.parametrize("metric", [3, "text", True, {"a": 1}, [["a", ["b"]]], [3, None, [None], [{"a": 1}]]])
def test_a_metric_of_the_program_with_the_name_of_the_list_of_arrays(metric: Any, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": torch.ones(2)}, 1, metrics={"dcp_arrays": metric})
    loaded = {"a": torch.zeros(2)}
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    assert loaded["a"].tolist() == [1, 1]


def test_a_named_tuple_with_tensors_must_be_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.values.registry._ENCODERS", {})
    dcp.save({"p": (Point(torch.ones(2), 1),)}, storage_writer=Writer(tmp_path / "step_1"))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"p": None}, storage_reader=Reader(tmp_path))
    assert isinstance(_failure(caught), ckpt.StateMismatchError)
    assert "p/0 is a tests.ckpt.integrations.test_dcp.Point, which this program has not registered" in str(
        _failure(caught)
    )


def test_a_class_is_stored_by_the_name_of_a_registered_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.values.registry._ENCODERS", {})
    ckpt.register_encoder(Color)
    state = {"kind": Color, "kinds": [Color, 1]}
    dcp.save(state, storage_writer=Writer(tmp_path / "step_1"))
    loaded: dict[str, Any] = {"kind": None, "kinds": None}
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    assert loaded == state
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        restored = {"kind": Color, "kinds": [0]}
        assert checkpointer.restore(restored) == 1
    assert restored == state


def test_a_state_dict_made_of_the_step_alone(tmp_path: Path) -> None:
    state = _nested()
    dcp.save(state, storage_writer=Writer(tmp_path / "step_1"))
    found = _load_state_dict_from_keys({"groups", "mixed"}, storage_reader=Reader(tmp_path))
    _assert_equal(found, {"groups": [*state["groups"]], "mixed": state["mixed"]})


def test_partial_loads(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": 1}, storage_writer=Writer(tmp_path / "step_1"))
    wanted = {"a": torch.zeros(2), "new": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        dcp.load(wanted, storage_reader=Reader(tmp_path))
    dcp.load(wanted, storage_reader=Reader(tmp_path), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(wanted["a"], torch.ones(2))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"a": torch.zeros(3)}, storage_reader=Reader(tmp_path))


def test_tensors_of_another_dtype_are_converted(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(4.0)}, storage_writer=Writer(tmp_path / "step_1"))
    wanted = {"a": torch.zeros(4, dtype=torch.bfloat16)}
    dcp.load(wanted, storage_reader=Reader(tmp_path))
    assert torch.equal(wanted["a"], torch.arange(4.0).bfloat16())


class _Renamed(DefaultSavePlanner):
    """Renames all keys, leaves some out, and saves matrices in half precision, each in two items."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"ema_{key}": value for key, value in state_dict.items() if key != "left_out"}
        super().set_up_planner(renamed, storage_meta, is_coordinator)

    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.half() if isinstance(made, torch.Tensor) else made


class _OwnBytes(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(b"text")


def test_planners_that_rename_filter_and_convert(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 4), "left_out": torch.ones(1), "n": 5, "d": {"x": [1, {"y": 2}]}}
    dcp.save(state, storage_writer=Writer(tmp_path / "step_1"), planner=_Renamed())
    with ckpt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["ema_w"]
        assert checkpoint["ema_w"].dtype == "float16"
        assert checkpoint.values_by_name == {"ema_n": 5, "ema_d/x": [1, {"y": 2}]}
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"n": 5}, storage_writer=Writer(tmp_path / "step_2"), planner=_OwnBytes())
    assert "n: _OwnBytes.resolve_data did not make what torch.load reads" in str(_failure(caught))


def test_a_state_that_is_not_flattened(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "d": {"x": 1, "y": [2]}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=Writer(tmp_path / "step_1"), planner=planner)
    assert list(ckpt.open(tmp_path).index.tensors) == [("a.b",)]
    loaded: dict[str, Any] = {"a.b": torch.zeros(2), "d": {"x": 0, "y": [0]}}
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    _assert_equal(loaded, state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"o": {"p": object()}}, "o/p: a builtins.object cannot be stored"),
        ({"t": (1, torch.ones(2), torch.nn.ReLU())}, "t/2: an object with state_dict(), and what belongs to a rank"),
        ({"a": np.array(["x"])}, "a: numpy arrays of dtype <U1 cannot be stored"),
        ({"c": Shade}, "c: the class tests.ckpt.integrations.test_dcp.Shade itself cannot be stored unless"),
        ({"s": torch.eye(2).to_sparse()}, "s: this tensor has the layout torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, "m: this tensor is on the meta device"),
        ({"\ud800": 1}, "is not valid Unicode"),
    ],
)
def test_what_cannot_be_stored_is_named(state: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=Writer(tmp_path / "step_1"))
    assert isinstance(_failure(caught), ckpt.StateError)
    assert message in str(_failure(caught))
    assert not list(tmp_path.glob("step_*"))


def test_which_step(tmp_path: Path) -> None:
    state = {"a": torch.ones(1)}
    for number, name in enumerate(["7", "step-8", "global_step9", "checkpoint-10", "step_00000011"]):
        dcp.save(state, checkpoint_id=f"{tmp_path}/{name}/", storage_writer=Writer())
        assert (tmp_path / f"step_{7 + number:08d}").is_dir()
        assert Reader.validate_checkpoint_id(tmp_path / name)
        assert Writer.validate_checkpoint_id(tmp_path / name)
    assert not Writer.validate_checkpoint_id("runs/lm7")
    assert not Reader.validate_checkpoint_id(tmp_path / "step_99")
    with pytest.raises(ValueError, match="which step"):
        dcp.save(state, checkpoint_id=tmp_path / "lm7", storage_writer=Writer())
    with pytest.raises(CheckpointException, match="which step"):
        dcp.save(state, storage_writer=Writer(tmp_path))
    with pytest.raises(CheckpointException, match="already published"):
        dcp.save(state, storage_writer=Writer(tmp_path / "step_8"))
    with pytest.raises(CheckpointException, match="has no published step 99"):
        dcp.load(state, checkpoint_id=tmp_path / "step_99", storage_reader=Reader())
    (tmp_path / "step_00000008").rename(tmp_path / "copied")
    dcp.load(state, checkpoint_id=tmp_path / "copied", storage_reader=Reader())


def test_a_job_that_has_loaded_nothing_saves_behind_the_newest_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the background process of ``dcp.async_save`` does: only the trainer has loaded, and it may be replaced."""
    for step in (10, 20):
        monkeypatch.setattr(roots, "_seen", set())  # as in another process
        dcp.save({"x": step}, storage_writer=Writer(tmp_path / f"step_{step}"))
    for step, words in ((15, "has later steps, the newest is 20"), (20, "step 20 is already published in")):
        monkeypatch.setattr(roots, "_seen", set())
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"x": step}, storage_writer=Writer(tmp_path / f"step_{step}"))
        error = _failure(caught)
        assert isinstance(error, ckpt.CheckpointExistsError)
        assert words in str(error)
        assert "inspect_ckpt rm" in str(error)
        assert "start_over" not in str(error)  # there is no such method here
    assert ckpt.Checkpointer(tmp_path).all_steps() == [10, 20]


def test_metadata_have_the_version_of_torch(tmp_path: Path) -> None:
    written = [
        dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "step_1", storage_writer=Writer()),
        dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "torch"),
        Reader(tmp_path / "step_1").read_metadata(),
        dcp.FileSystemReader(tmp_path / "torch").read_metadata(),
    ]
    assert len({metadata.version for metadata in written}) == 1
    assert written[0].version is not None


@pytest.mark.parametrize("name", ["step_2", ""])
def test_a_load_waits_for_what_is_being_written(name: str, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": torch.ones(1)}, 1)
        with stopped_until_a_load_waits():
            checkpointer.async_save({"a": torch.full((1,), 2.0)}, 2)
            loaded = {"a": torch.zeros(1)}
            dcp.load(loaded, checkpoint_id=tmp_path / name, storage_reader=Reader())
        assert loaded["a"].item() == 2


def test_one_writer_for_several_roots_and_its_options(tmp_path: Path, leak_check: LeakCheck) -> None:
    with Writer(tmp_path / "a", keep=1) as writer:
        for name in ("a/step_1", "a/step_2", "b/step_1"):
            dcp.save({"x": 1}, checkpoint_id=tmp_path / name, storage_writer=writer)
    assert ckpt.Checkpointer(tmp_path / "a").all_steps() == [2]
    assert ckpt.Checkpointer(tmp_path / "b").all_steps() == [1]


def test_a_writer_of_one_step_leaves_nothing_running(tmp_path: Path, leak_check: LeakCheck) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=Writer(tmp_path / "step_1"))
    with pytest.raises(CheckpointException):
        dcp.save({"x": object()}, storage_writer=Writer(tmp_path / "step_2"))


def test_ranks_must_commit_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_collectives=True"):
        dcp.save({"x": 1}, storage_writer=Writer(tmp_path / "step_1"), use_collectives=False)


def test_damaged_bytes_and_names_that_become_one(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"w": torch.ones(1000)}, 1)
        checkpointer.save({"a.b": {"c": 1}, "a": {"b.c": 2}}, 2)
    pack = next((tmp_path / "step_00000001" / "packs").rglob("rank_*"))
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(1000)}, checkpoint_id=tmp_path / "step_1", storage_reader=Reader())
    assert isinstance(_failure(caught), ckpt.CheckpointCorruptError)
    with pytest.raises(CheckpointException, match=r"are the same for DCP, a\.b\.c"):
        dcp.load({"x": 1}, checkpoint_id=tmp_path / "step_2", storage_reader=Reader())


# -- several processes -------------------------------------------------------------------------------------------------


def _sharded_app(seed: int) -> _App:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    app = _App.__new__(_App)
    torch.manual_seed(seed)
    app.model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 1))
    for module in (*app.model, app.model):
        fully_shard(module, mesh=mesh)
    app.optimizer = torch.optim.AdamW(app.model.parameters(), lr=0.1 * (seed + 1))
    app.model(torch.ones(3, 7)).sum().backward()
    app.optimizer.step()
    return app


def _whole(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _whole(item) for key, item in node.items()}
    return node.full_tensor() if isinstance(node, DTensor) else node


def _save_sharded(rank: int, world_size: int, root: str) -> Any:
    app = _sharded_app(0)
    with Writer(root) as writer:
        for step in (1, 2):
            dcp.save({"app": app, "n": 5}, checkpoint_id=f"{root}/step_{step}", storage_writer=writer)
    return _whole(app.state_dict())


def _load_sharded(rank: int, world_size: int, root: str) -> Any:
    app = _sharded_app(1)
    state = {"app": app, "n": 0}
    dcp.load(state, checkpoint_id=root, storage_reader=Reader())
    loaded = _whole(app.state_dict())
    again = _sharded_app(2)
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        checkpointer.restore({"app": again, "n": 0})
    _assert_equal(_whole(again.state_dict()), loaded)
    return loaded, state["n"]


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), pytest.param(1, 2, marks=full_only), (2, 3)])
def test_fsdp_on_another_number_of_ranks(saving: int, loading: int, tmp_path: Path) -> None:
    saved = run_ranks(_save_sharded, saving, str(tmp_path))
    for result in run_ranks(_load_sharded, loading, str(tmp_path)):
        _assert_equal(result.value, (saved[0].value, 5))


def _sharded_tensor(rank: int, world_size: int) -> Any:
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    whole = torch.arange(8 * 6.0).reshape(8, 6)
    boxes = [((0, 0), (3, 2)), ((0, 2), (3, 4))] if rank == 0 else [((3, 0), (5, 6))]
    shards = []
    for (row, column), (rows, columns) in boxes:
        part = whole[row : row + rows, column : column + columns].clone()
        shards.append(LocalShard.from_tensor_and_offsets(part, [row, column], rank))
    return init_from_local_shards(shards, 8, 6)


def _save_and_load_layouts(rank: int, world_size: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).reshape(5, 3)
    layouts = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    state: dict[str, Any] = {
        **{name: distribute_tensor(whole, mesh, [placement]) for name, placement in layouts.items()},
        "one row": distribute_tensor(whole[:1], mesh, [Shard(0)]),  # rank 1 has an empty shard
        "no rows": distribute_tensor(whole[:0], mesh, [Shard(0)]),
        "shards": _sharded_tensor(rank, world_size),
        "plain": whole.clone(),
        "list": [{"n": 1}, {"m": 2, "k": 3}, {"t": whole.clone()}],
        "groups": [{"a": 1, "b": 2, "c": 3}, {"d": 4}],
        f"only {rank}": rank,
        "on some": [{"rank": rank}] if rank else 0,
    }
    dcp.save(state, storage_writer=Writer(f"{root}/step_1"))
    loaded: dict[str, Any] = {
        name: distribute_tensor(torch.zeros(value.shape), mesh, [Shard(1)])
        for name, value in state.items()
        if isinstance(value, DTensor)
    }
    loaded |= {"shards": torch.zeros(8, 6), "plain": torch.zeros(5, 3), f"only {rank}": None}
    loaded |= {"list": [{"n": 0}, {"m": 0, "k": 0}, {"t": torch.zeros(5, 3)}], "groups": [{"a": 0, "d": 0}, {"d": 0}]}
    loaded["groups"] = [{"a": 0, "b": 0, "c": 0}, {"d": 0}]
    dcp.load(loaded, checkpoint_id=f"{root}/step_1", storage_reader=Reader())
    for name in (*layouts, "one row", "no rows"):
        assert torch.equal(loaded[name].full_tensor(), state[name].full_tensor()), name
    assert torch.equal(loaded["shards"], torch.arange(8 * 6.0).reshape(8, 6))
    assert torch.equal(loaded["plain"], whole)
    assert loaded["groups"] == state["groups"]
    assert loaded["list"][:2] == state["list"][:2]
    assert torch.equal(loaded["list"][2]["t"], whole)
    assert loaded[f"only {rank}"] == rank
    again = _sharded_tensor(rank, world_size)
    for shard in again.local_shards():
        shard.tensor.zero_()
    dcp.load({"shards": again}, checkpoint_id=f"{root}/step_1", storage_reader=Reader())
    for found, expected in zip(again.local_shards(), state["shards"].local_shards(), strict=True):
        assert torch.equal(found.tensor, expected.tensor)


def test_all_layouts_of_tensors_and_lists_divided_among_ranks(tmp_path: Path) -> None:
    run_ranks(_save_and_load_layouts, 2, str(tmp_path))
    with ckpt.open(tmp_path) as checkpoint:
        assert checkpoint.values_by_name["groups"] == [{"a": 1, "b": 2, "c": 3}, {"d": 4}]
        assert checkpoint.values_by_name["list/1/m"] == 2


def _alternate(rank: int, world_size: int, root: str) -> None:
    """Save states whose structure changes on one rank only, with plans that DCP keeps."""
    with Writer(root) as writer:
        for step in range(1, 7):
            state: dict[str, Any] = {"w": torch.full((4,), float(step)), "n": step}
            if rank == 1 and step in (3, 4):
                state["extra"] = torch.full((2,), float(step))
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state, checkpoint_id=f"{root}/step_{step}", storage_writer=writer, planner=planner)
    for step in range(1, 7):
        found = {"w": torch.zeros(4), "n": 0}
        dcp.load(found, checkpoint_id=f"{root}/step_{step}", storage_reader=Reader())
        assert (found["n"], found["w"].tolist()) == (step, [step] * 4)


def test_structures_that_change_on_one_rank_and_plans_that_dcp_keeps(tmp_path: Path) -> None:
    run_ranks(_alternate, 2, str(tmp_path))
    assert [step for step in range(1, 7) if "extra" in ckpt.open(tmp_path, step)] == [3, 4]


def _refused(rank: int, world_size: int, root: str) -> None:
    good = {"w": torch.ones(4)}
    with Writer(root) as writer:
        state = {**good, "o": object()} if rank == 1 else good
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state, checkpoint_id=f"{root}/step_1", storage_writer=writer)
        for failed in (0, 1):
            assert isinstance(_failure(caught, failed), ckpt.StateError)
            assert "rank 1 cannot store" in str(_failure(caught, failed))
            assert "o: a builtins.object cannot be stored" in str(_failure(caught, failed))
        with pytest.raises(CheckpointException, match="give both the same process_group"):
            dcp.save(good, checkpoint_id=f"{root}/step_2", storage_writer=writer, no_dist=True)
        dcp.save(good, checkpoint_id=f"{root}/step_3", storage_writer=writer)
    groups = [dist.new_group([number]) for number in range(world_size)]
    if rank == 1:
        dcp.save(good, storage_writer=Writer(f"{root}/step_4", process_group=groups[1]), no_dist=True)
    dist.barrier()
    assert latest_step(root) == 4
    assert latest_step(f"{root}/missing") is None
    dcp.load(good, checkpoint_id=f"{root}/step_4", storage_reader=Reader(), no_dist=True)


def test_a_refusal_of_one_rank_is_one_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    run_ranks(_refused, 2, str(tmp_path))
    assert ckpt.Checkpointer(tmp_path).all_steps() == [3, 4]


class _Dies(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def _die(rank: int, world_size: int, root: str, when: str) -> None:
    from ckpt.checkpointer import Checkpointer

    state = {"w": torch.full((4,), float(rank)), "v": torch.ones(3), "n": 1}
    writer = Writer(root)
    dcp.save(state, checkpoint_id=f"{root}/step_1", storage_writer=writer)
    planner = _Dies() if rank == 1 and when == "resolving" else None
    if rank == 1 and when == "staged":
        save = Checkpointer.async_save

        def staged(self: Checkpointer, *args: Any, **options: Any) -> None:
            save(self, *args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        Checkpointer.async_save = staged
    try:
        dcp.save(state, checkpoint_id=f"{root}/step_2", storage_writer=writer, planner=planner)
    except BaseException as error:
        print(type(error).__name__, flush=True)
    else:
        raise AssertionError("DCP did not notice that rank 1 is dead")
    os._exit(0)


@pytest.mark.parametrize(("when", "steps"), [("resolving", [1]), ("staged", [1, 2])])
def test_a_rank_that_is_killed_in_a_save(when: str, steps: list[int], tmp_path: Path) -> None:
    """Absent if the rank dies before its items are staged; whole if afterwards."""
    run_ranks(_die, 2, str(tmp_path), when, returncodes={1: -signal.SIGKILL}, timeout=60)
    assert latest_step(tmp_path) == steps[-1]
    assert ckpt.Checkpointer(tmp_path).all_steps() == steps
    run_ranks(_save_sharded_at, 2, str(tmp_path), 3)
    assert ckpt.Checkpointer(tmp_path).all_steps() == [*steps, 3]
    for step in (*steps, 3):
        dcp.load({}, checkpoint_id=tmp_path / f"step_{step}", storage_reader=Reader())
    loaded = {"v": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "step_1", storage_reader=Reader())
    assert torch.equal(loaded["v"], torch.ones(3))


def _save_sharded_at(rank: int, world_size: int, root: str, step: int) -> None:
    dcp.save({"app": _sharded_app(0)}, storage_writer=Writer(f"{root}/step_{step}"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=full_only)])
def test_async_save(kind: str, tmp_path: Path) -> None:
    for first in ("1", "3"):  # the second job resumes
        run_ranks(PROGRAMS / "dcp_async.py", 2, str(tmp_path), kind, first, timeout=90, imports=())
    for step in (1, 2, 3, 4):
        found = {"w": torch.zeros(6), "n": 0}
        dcp.load(found, checkpoint_id=tmp_path / f"step_{step}", storage_reader=Reader())
        assert (found["n"], found["w"].tolist()) == (step, [step] * 6)
