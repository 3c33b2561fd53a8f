"""Restoring a part of a step, under other names, in another dtype or shape; and the messages for what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import Checkpointer, PerRank, StateError, StateMismatchError
from tests.ckpt.loading.towers import Tower
from tests.support import run_ranks
from tests.support.saves import save_here


def trained(fill: float, **options: Any) -> tuple[Tower, torch.optim.Optimizer]:
    model = Tower(fill, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model.head(model.encoder(torch.ones(2, 4, dtype=model.head.weight.dtype))).sum().backward()
    optimizer.step()
    return model, optimizer


class Untouchable:
    """An object whose state nobody may ask for."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("state_dict was called")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("load_state_dict was called")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model, optimizer = trained(1.0)
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": model, "optimizer": optimizer, "epoch": 3}, 7)
    return tmp_path / "root"


def restored(root: Path, state: Any, **options: Any) -> Any:
    with Checkpointer(root, read_only=True) as checkpointer:
        assert checkpointer.restore(state, **options) == 7
        return checkpointer.last_restore


def values(module: nn.Module) -> dict[str, float]:
    return {name: parameter.flatten()[0].item() for name, parameter in module.named_parameters()}


def test_only_a_part_is_restored_and_the_rest_is_not_touched(root: Path) -> None:
    model = Tower(0.0)
    state = {"model": model, "optimizer": Untouchable(), "epoch": 0}
    report = restored(root, state, only=["model"])
    assert set(values(model).values()) == {1.0}
    assert state["epoch"] == 0
    assert (report.unexpected, report.missing, len(report.restored)) == ((), (), 4)


def test_only_a_part_of_a_module(root: Path) -> None:
    model = Tower(0.0)
    restored(root, {"model": model}, only="model/encoder")
    assert values(model) == {"encoder.weight": 1, "encoder.bias": 1, "head.weight": 0, "head.bias": 0}


def test_only_what_the_state_has_not_names_what_it_has(root: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"only=\['modle'\] selects nothing of the state, .*'epoch', 'model'"):
        restored(root, {"model": Tower(0.0), "epoch": 0}, only=["modle"])
    with pytest.raises(ValueError, match="give one name or several"):
        restored(root, {"model": Tower(0.0)}, only=[])


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_prefix_of_the_checkpoint_is_named_and_removed(tmp_path: Path, prefix: str) -> None:
    source = {prefix + name: tensor for name, tensor in Tower(2.0).state_dict().items()}
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": source}, 7)
    model = Tower(0.0)
    with pytest.raises(StateMismatchError) as failed:
        restored(tmp_path / "root", {"model": model})
    assert f"restore(..., rename={{{prefix!r}: ''}})" in str(failed.value)
    restored(tmp_path / "root", {"model": model}, rename={prefix: ""})
    assert set(values(model).values()) == {2.0}
    model = Tower(0.0)
    restored(tmp_path / "root", {"model": model}, rename=lambda name: name.replace(prefix, ""))
    assert set(values(model).values()) == {2.0}


def test_a_compiled_model_is_saved_and_restored_plain(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": torch.compile(Tower(2.0), backend="eager")}, 7)
    model = Tower(0.0)
    restored(tmp_path / "root", {"model": model}, rename={"_orig_mod.": ""})
    assert set(values(model).values()) == {2.0}


def test_a_compiled_model_in_the_state_is_told_what_to_do(root: Path) -> None:
    compiled = torch.compile(Tower(0.0), backend="eager")
    with pytest.raises(StateMismatchError, match=r"put the module itself, `compiled._orig_mod`"):
        restored(root, {"model": compiled}, only=["model"])
    restored(root, {"model": compiled._orig_mod}, only=["model"])
    compiled = torch.compile(Tower(0.0), backend="eager")
    restored(root, {"model": compiled}, only=["model"], rename={"model/": "model/_orig_mod."})
    assert set(values(compiled).values()) == {1.0}


def test_rename_inside_a_name_and_of_optimizer_state(tmp_path: Path) -> None:
    _, optimizer = trained(5.0)
    state = {"net": {"layer.base_layer.weight": torch.ones(2)}, "opt": optimizer, "net/": 1}
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, state, 7)
    weight = {"layer.weight": torch.zeros(2)}
    other_model = Tower(0.0)
    other = torch.optim.AdamW(other_model.parameters())
    report = restored(
        tmp_path / "root", {"model": weight, "optimizer": other, "net/": 0},
        rename={"base_layer.": "", "net/layer": "model/layer", "opt/": "optimizer/"},
    )  # fmt: skip
    assert weight["layer.weight"].tolist() == [1, 1]
    assert len(other.state) == 4
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(
        optimizer.state.values(), other.state.values(), strict=True))  # fmt: skip
    assert report.missing == report.unexpected == ()


def test_rename_that_makes_one_name_of_two_is_refused(root: Path) -> None:
    with pytest.raises(StateMismatchError, match="rename makes one name of two"):
        restored(root, {"model": Tower(0.0)}, rename=lambda name: "model/x")
    with pytest.raises(TypeError, match="which is not a name"):
        restored(root, {"model": Tower(0.0)}, rename=lambda name: None)
    with pytest.raises(TypeError, match="rename is a function"):
        restored(root, {"model": Tower(0.0)}, rename="model")


def test_names_that_are_exchanged_come_from_storage_not_from_staging_memory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        state = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)}
        save_here(checkpointer, state, 7)
        checkpointer.restore(state, rename={"a": "b", "b": "a"})
        assert (state["a"].tolist(), state["b"].tolist()) == ([2.0] * 4, [1.0] * 4)


def test_cast_needs_to_be_asked_for(root: Path) -> None:
    model = Tower(0.0, dtype=torch.bfloat16)
    with pytest.raises(StateMismatchError, match=r"dtype: model/encoder.weight is float32 in the checkpoint, bfloat16"):
        restored(root, {"model": model}, only=["model"])
    report = restored(root, {"model": model}, only=["model"], cast=True)
    assert set(values(model).values()) == {1.0}
    assert len(report.cast) == 4
    assert "4 cast" in str(report)
    with pytest.raises(StateMismatchError, match="is float32 in the checkpoint, int64 in the state"):
        restored(root, {"model": {"encoder.weight": torch.zeros(4, 4, dtype=torch.int64)}}, only=["model"], cast=True)


def test_cast_and_resize_of_a_step_in_staging_memory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"a": torch.arange(4.0), "b": torch.arange(4.0)}, 7)
        state = {"a": torch.full((6,), 9.0), "b": torch.zeros(4, dtype=torch.float64)}
        checkpointer.restore(state, cast=True, resize=True)
    assert state["a"].tolist() == [0, 1, 2, 3, 9, 9]
    assert state["b"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("out", [2, 5])
def test_resize_takes_the_common_part_with_the_state_of_a_new_optimizer(root: Path, out: int) -> None:
    model = Tower(0.0, out=out)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    with pytest.raises(StateMismatchError, match=r"shape: model/head.weight is \[3, 4\] in the checkpoint"):
        restored(root, state)
    report = restored(root, state, resize=True)
    common = min(out, 3)
    assert model.head.weight[:common].eq(1).all()
    assert model.head.weight[common:].eq(0).all()
    assert model.encoder.weight.eq(1).all()
    _, expected = trained(1.0)
    before = list(expected.state.values())
    for number, now in enumerate(optimizer.state.values()):
        rows = min(len(now["exp_avg"]), len(before[number]["exp_avg"]))
        assert torch.equal(now["exp_avg"][:rows], before[number]["exp_avg"][:rows])
        assert now["exp_avg"][rows:].eq(0).all()
        assert now["exp_avg"].abs().sum() > 0
    assert "model/head.weight" in report.resized
    assert any(name.endswith("exp_avg") for name in report.resized)


def test_resize_does_not_change_the_number_of_dimensions(root: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"shape: model/encoder.weight"):
        restored(root, {"model": {"encoder.weight": torch.zeros(4, 4, 1)}}, only=["model"], resize=True)


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_restored_is_an_error_always(root: Path, strict: bool) -> None:
    with pytest.raises(StateMismatchError, match=r"missing: net/a|No tensor of the state fits"):
        restored(root, {"net": {"a": torch.zeros(3)}, "epoch": 3}, strict=strict)
    with pytest.raises(StateMismatchError):
        restored(root, {"age": 3}, strict=strict)


def test_the_report_says_what_became_of_each_name(root: Path) -> None:
    state = {"model": {"encoder.weight": torch.zeros(4, 4), "head.weight": torch.zeros(9), "new": torch.zeros(1)}}
    report = restored(root, state, strict=False)
    assert report.restored == ("model/encoder.weight",)
    assert report.missing == ("model/new",)
    assert report.mismatched == ("model/head.weight",)
    assert "model/encoder.bias" in report.unexpected
    assert "epoch" in report.unexpected


def test_another_optimizer_is_refused_by_name(root: Path) -> None:
    model = Tower(0.0)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9), "epoch": 0}
    with pytest.raises(StateMismatchError, match=r"of another kind: .* has amsgrad, betas.*restore\(..., only=...\)"):
        restored(root, state)
    assert set(values(model).values()) == {0.0}
    restored(root, state, only=["model", "epoch"])
    assert (set(values(model).values()), state["epoch"]) == ({1.0}, 3)


class WithTables(nn.Module):
    """A model with a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(1.0)
        self.register_buffer("angles", torch.ones(3), persistent=False)
        self.register_buffer("counts", torch.ones(3))


def test_meta_tensors_are_told_to_be_allocated_and_buffers_are_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": WithTables()}, 7)
    with torch.device("meta"):
        model = WithTables()
    with pytest.raises(StateError, match=r"model: 6 tensors .* to_empty\(device=...\) first, and compute .*: angles"):
        restored(tmp_path / "root", {"model": model})
    restored(tmp_path / "root", {"model": model.to_empty(device="cpu")})
    assert model.counts.tolist() == [1, 1, 1]
    with pytest.raises(StateError, match="x: this tensor is on the meta device"):
        restored(tmp_path / "root", {"x": torch.empty(3, device="meta")})


def test_frozen_layers_and_an_average_of_the_weights(tmp_path: Path) -> None:
    def make(fill: float) -> dict[str, Any]:
        model = Tower(fill)
        model.encoder.requires_grad_(False)
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
        model.head(model.encoder(torch.ones(1, 4))).sum().backward()
        optimizer.step()
        average.update_parameters(model)
        return {"model": model, "average": average, "optimizer": optimizer}

    saved = make(1.0)
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, saved, 7)
    state = make(2.0)
    restored(tmp_path / "root", state)
    for name in ("model", "average"):
        for key, tensor in saved[name].state_dict().items():
            assert torch.equal(state[name].state_dict()[key], tensor), (name, key)
    # Only the average, into a plain model.
    model = Tower(0.0)
    restored(tmp_path / "root", {"model": model}, only=["model"], rename=_average_as_model)
    assert values(model) == values(saved["average"].module)


def _average_as_model(name: str) -> str:
    if name.startswith("average/module."):
        return "model/" + name.removeprefix("average/module.")
    return "plain/" + name if name.startswith("model/") else name


def _sharded(rank: int, world_size: int, root: Path) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.arange(24.0).reshape(6, 4)
    with Checkpointer(root) as checkpointer:
        state = {"t": distribute_tensor(full, mesh, [Shard(0)]), "own": PerRank(rank)}
        save_here(checkpointer, state, 7)
        target = distribute_tensor(torch.full((9, 5), -1.0, dtype=torch.float64), mesh, [Shard(0)])
        checkpointer.restore({"x": target}, only=["x"], rename={"t": "x"}, cast=True, resize=True)
        assert isinstance(target, DTensor)
        return target.full_tensor().tolist()


def test_a_grown_sharded_tensor_in_another_dtype(tmp_path: Path) -> None:
    expected = torch.full((9, 5), -1.0)
    expected[:6, :4] = torch.arange(24.0).reshape(6, 4)
    assert all(result.value == expected.tolist() for result in run_ranks(_sharded, 2, tmp_path / "root"))


class Tied(nn.Module):
    """An embedding and a head, which may have the same weight."""

    def __init__(self, fill: float, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        if tied:
            self.head.weight = self.embedding.weight
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, fill + number)


def test_only_the_second_name_of_a_tied_weight(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": Tied(1.0)}, 7)
    model = Tied(5.0)
    report = restored(tmp_path / "root", {"model": model}, only=["model/head"])
    assert report.restored == ("model/head.bias", "model/head.weight")
    assert values(model) == values(Tied(1.0))


@pytest.mark.parametrize("stored", ["embedding", "head"])
def test_a_step_with_one_name_of_a_tied_weight(tmp_path: Path, stored: str) -> None:
    weights = {f"{stored}.weight": Tied(1.0).head.weight.detach(), "head.bias": Tied(1.0).head.bias.detach()}
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": weights}, 7)
    model = Tied(5.0)
    restored(tmp_path / "root", {"model": model})
    assert values(model) == values(Tied(1.0))
    with pytest.raises(StateMismatchError, match=r"missing: model/(embedding|head)\.weight"):
        restored(tmp_path / "root", {"model": Tied(5.0, tied=False)})


def test_a_step_with_no_name_of_a_tied_weight(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": {"head.bias": torch.zeros(5)}}, 7)
    with pytest.raises(StateMismatchError) as caught:
        restored(tmp_path / "root", {"model": Tied(5.0)})
    assert "missing: model/embedding.weight" in str(caught.value)
    assert "missing: model/head.weight" in str(caught.value)


def test_two_tensors_for_one_tied_weight_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": Tied(1.0, tied=False)}, 7)
    model = Tied(5.0)
    restored(tmp_path / "root", {"model": model})
    assert values(model) == {"embedding.weight": 1.0, "head.bias": 3.0}
    assert "model/head.weight (restored: model/embedding.weight)" in caplog.text


def test_each_name_of_only_must_exist(root: Path) -> None:
    model = Tower(0.0)
    with pytest.raises(StateMismatchError, match=r"only=\['optimiser'\] selects nothing of the state"):
        restored(root, {"model": model}, only=["model", "optimiser"])
    assert set(values(model).values()) == {0.0}


def _tied_differently(rank: int, world_size: int, root: Path) -> list[Any]:
    def make(fill: float, tied: bool) -> dict[str, torch.Tensor]:
        a, b = (torch.full((3,), fill * (10 * rank + number)) for number in (1, 2))
        return {"a": a, "b": b, "c": (b if rank else a) if tied else torch.zeros(3)}

    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, {"own": PerRank(make(1.0, True))}, 7)
        target = make(0.0, False)
        checkpointer.restore({"own": PerRank(target)})
    loaded = ckpt.load(root, rank=rank)["own"]
    return [[state[name][0].item() for name in "abc"] for state in (target, loaded)]


def test_tensors_of_ranks_that_are_tied_differently(tmp_path: Path) -> None:
    results = [result.value for result in run_ranks(_tied_differently, 2, tmp_path / "root")]
    assert results == [[[1.0, 2.0, 1.0]] * 2, [[11.0, 12.0, 12.0]] * 2]


_BASE = torch.zeros(6, 6)


@pytest.mark.parametrize(
    ("one", "two", "overlap"),
    [
        (_BASE[:4], _BASE[3:], True),
        (_BASE, _BASE[2], True),
        (_BASE[:, :4], _BASE[:, 3:], True),
        (_BASE.view(-1)[::2], _BASE.view(-1)[::3], True),
        (_BASE, _BASE.t(), True),
        (_BASE[:3], _BASE.view(torch.int32)[2:], True),
        (_BASE[:3], _BASE[3:], False),
        (_BASE[:, :3], _BASE[:, 3:], False),
        (_BASE.view(-1)[::2], _BASE.view(-1)[1::2], False),
        (_BASE[:0], _BASE, False),
        (_BASE, _BASE[:], False),
    ],
)
def test_views_that_overlap_are_not_restored(
    tmp_path: Path, one: torch.Tensor, two: torch.Tensor, overlap: bool
) -> None:
    saved = {"one": torch.ones_like(one).contiguous(), "two": torch.full_like(two, 2).contiguous()}
    if one.shape == two.shape and one.stride() == two.stride() and one.data_ptr() == two.data_ptr():
        saved["two"] = saved["one"]
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, saved, 1)
        _BASE.zero_()
        state = {"one": one, "two": two}
        if overlap:
            with pytest.raises(ckpt.StateError, match=r"(one and two|two and one) of the state"):
                checkpointer.restore(state)
            assert not _BASE.any()
            assert checkpointer.restore(state, only=["one"]) == 1
            assert one.eq(1).all()
        else:
            assert checkpointer.restore(state) == 1
            assert one.equal(saved["one"])
            assert two.equal(saved["two"])
