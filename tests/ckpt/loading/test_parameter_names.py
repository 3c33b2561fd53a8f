"""Optimizers whose parameters have names in the step and numbers in the state, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckpt import Checkpointer, PerRank, StateError, StateMismatchError
from tests.ckpt.loading.optimizer_training import same
from tests.support.saves import save_here

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
FORMS = {"named": StateDictOptions(), "flattened": FLATTENED}


class Net(nn.Module):
    """A model with a tied weight, and a frozen parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.hidden.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.hidden(self.embed(tokens)))
        return result


def adam(model: nn.Module, turned: bool = False, **options: Any) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    if turned:
        groups = [{"params": others, "weight_decay": 0.5}, {"params": matrices[::-1], "weight_decay": 0.25}]
    return torch.optim.AdamW(groups, **{"lr": 0.01, "weight_decay": 0.1, **options})


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.arange(step, step + 4)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def by_parameter(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The parameters, their state, and the options of their groups, by name."""
    found: dict[str, Any] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            state = next((each.state[parameter] for each in optimizers if parameter in each.state), {})
            found[names[parameter]] = {"value": parameter.detach().clone(), "state": dict(state), "group": options}
    return found


def check_goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, others: Any) -> None:
    assert same(by_parameter(other, others), by_parameter(model, optimizer))
    train(model, optimizer)
    train(other, others)
    assert same(by_parameter(other, others), by_parameter(model, optimizer))


@pytest.fixture
def trained() -> tuple[Net, torch.optim.Optimizer]:
    model = Net(1)
    optimizer = adam(model)
    train(model, optimizer)
    return model, optimizer


def saved(root: Path, state: Any) -> Path:
    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, state, 7)
    return root


def restored(root: Path, state: Any, **options: Any) -> None:
    with Checkpointer(root, read_only=True) as checkpointer:
        checkpointer.restore(state, 7, **options)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_names_become_numbers_whatever_the_order(tmp_path: Path, trained: Any, form: str, stepped: bool) -> None:
    model, optimizer = trained
    torch.optim.lr_scheduler.LinearLR(optimizer)  # adds `initial_lr` to the groups
    named = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
    root = saved(tmp_path, {"model": model, "optimizer": named})
    other = Net(2)
    others = adam(other, turned=True)
    train(other, others, steps=int(stepped))
    restored(root, {"model": other, "optimizer": others})
    check_goes_on(model, optimizer, other, others)


@pytest.mark.parametrize("wrap", ["parallel", "compiled", "checkpointed", "dict"])
def test_a_parameter_is_known_by_its_identity_not_by_the_names_of_wrappers(
    tmp_path: Path, trained: Any, wrap: str
) -> None:
    model, optimizer = trained
    root = saved(tmp_path, {"optimizer": get_optimizer_state_dict(model, optimizer), "model": model})
    other = Net(2)
    if wrap == "checkpointed":
        other.hidden = checkpoint_wrapper(other.hidden)
    others = adam(other, turned=True)
    wrapped: Any = {
        "parallel": lambda: nn.DataParallel(other),
        "compiled": lambda: torch.compile(other, backend="eager"),
        "checkpointed": lambda: other,
        "dict": lambda: other.state_dict(),
    }[wrap]()
    restored(root, {"optimizer": others, "model": wrapped}, only=["optimizer"])
    plain = {
        name.replace("_checkpoint_wrapped_module.", ""): each for name, each in by_parameter(other, others).items()
    }
    wanted = by_parameter(model, optimizer)
    assert plain.keys() == wanted.keys()
    assert all(same(plain[name]["state"], wanted[name]["state"]) for name in wanted)
    assert all(same(plain[name]["group"], wanted[name]["group"]) for name in wanted)


def test_names_of_a_wrapper_in_the_step_are_renamed_in_its_groups_too(tmp_path: Path, trained: Any) -> None:
    model, optimizer = trained
    named = get_optimizer_state_dict(model, optimizer)
    named["state"] = {f"module.{name}": state for name, state in named["state"].items()}
    for group in named["param_groups"]:
        group["params"] = [f"module.{name}" for name in group["params"]]
    root = saved(tmp_path, {"model": nn.DataParallel(model), "optimizer": named})
    other = Net(2)
    others = adam(other, turned=True)
    with pytest.raises(StateMismatchError, match=r"parameter names: optimizer has 3 .*rename=\{'module.': ''\}"):
        restored(root, {"model": other, "optimizer": others})
    restored(root, {"model": other, "optimizer": others}, rename={"module.": ""})
    check_goes_on(model, optimizer, other, others)


@pytest.mark.parametrize("form", list(FORMS))
def test_several_optimizers_saved_as_one_get_each_its_own(tmp_path: Path, form: str) -> None:
    def build(seed: int, turned: bool) -> tuple[Net, torch.optim.Optimizer, torch.optim.Optimizer]:
        model = Net(seed)
        hidden = torch.optim.SGD(model.hidden.parameters(), lr=0.1, momentum=0.9)
        return model, hidden, torch.optim.AdamW(model.embed.parameters(), lr=0.01)

    model, sgd, adamw = build(1, False)
    train(model, sgd, adamw)
    named = get_optimizer_state_dict(model, (sgd, adamw), options=FORMS[form])
    root = saved(tmp_path, {"model": model, "optimizers": named})
    other, *others = build(2, True)
    restored(root, {"model": other, "optimizers": {"adamw": others[1], "sgd": others[0]}})
    assert same(by_parameter(other, *others), by_parameter(model, sgd, adamw))
    train(model, sgd, adamw)
    train(other, *others)
    assert same(by_parameter(other, *others), by_parameter(model, sgd, adamw))
    with pytest.raises(StateMismatchError, match=r"unexpected: optimizers/.*embed\.weight"):
        restored(root, {"model": other, "optimizers": [others[0]]})


def test_modules_with_equal_names_each_with_its_optimizer(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[dict[str, Net], dict[str, torch.optim.Optimizer]]:
        models = {"generator": Net(seed), "critic": Net(seed + 1)}
        optimizers = {name: adam(model, turned=seed > 2) for name, model in models.items()}
        for name, model in models.items():
            train(model, optimizers[name], steps=2 if seed < 3 else 0)
        return models, optimizers

    models, optimizers = build(1)
    named = {name: get_optimizer_state_dict(models[name], optimizers[name]) for name in models}
    root = saved(tmp_path, {"models": models, "optimizers": named})
    others, other_optimizers = build(3)
    restored(root, {"models": others, "optimizers": other_optimizers})
    for name in models:
        check_goes_on(models[name], optimizers[name], others[name], other_optimizers[name])


@pytest.mark.parametrize("form", list(FORMS))
def test_numbers_become_names(tmp_path: Path, trained: Any, form: str) -> None:
    model, optimizer = trained
    root = saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = Net(2)
    others = adam(other, lr=1.0)
    named = get_optimizer_state_dict(other, others, options=FORMS[form])
    restored(root, {"model": other, "optimizer": named})
    set_optimizer_state_dict(other, others, named, options=FORMS[form])
    check_goes_on(model, optimizer, other, others)


@pytest.mark.parametrize(("stored", "own"), [("named", "flattened"), ("flattened", "named")])
def test_a_named_step_into_a_flattened_dict_and_back(tmp_path: Path, trained: Any, stored: str, own: str) -> None:
    model, optimizer = trained
    named = get_optimizer_state_dict(model, optimizer, options=FORMS[stored])
    root = saved(tmp_path, {"model": model, "optimizer": named})
    other = Net(2)
    others = adam(other, turned=True)
    state = {"model": other, "optimizer": get_optimizer_state_dict(other, others, options=FORMS[own])}
    restored(root, state)
    set_optimizer_state_dict(other, others, state["optimizer"], options=FORMS[own])
    check_goes_on(model, optimizer, other, others)


@pytest.mark.parametrize("form", list(FORMS))
def test_a_learning_rate_that_is_a_tensor(tmp_path: Path, form: str) -> None:
    model = Net(1)
    optimizer = adam(model, lr=torch.tensor(0.02))
    train(model, optimizer)
    named = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
    root = saved(tmp_path, {"model": model, "optimizer": named})
    other = Net(2)
    others = adam(other, turned=True, lr=torch.tensor(1.0))
    restored(root, {"model": other, "optimizer": others})
    check_goes_on(model, optimizer, other, others)


@pytest.mark.parametrize("form", list(FORMS))
def test_what_is_ambiguous_or_lacking_is_said_and_nothing_is_restored(tmp_path: Path, trained: Any, form: str) -> None:
    model, optimizer = trained
    named = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
    root = saved(tmp_path, {"model": model, "optimizer": named, "numbers": optimizer.state_dict()})
    other = Net(2)
    everything = list(other.parameters())
    bigger = nn.ModuleDict({"net": other, "more": nn.Linear(2, 2)})
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            "in no module of the state, and the checkpoint has parameters by name: put the module itself",
            {"optimizer": adam(other)},
        ),
        (
            "has the parameters embed.weight and hidden.bias in one group in the state, and with different options",
            {"model": other, "optimizer": torch.optim.AdamW([everything[0], everything[2], everything[1]])},
        ),
        ("2 parameter.s. that the checkpoint does not have", {"model": bigger, "optimizer": adam(bigger["more"])}),
        ("may be embed.weight", {"a": other, "b": Net(3), "optimizer": None}),
        ("put the optimizer and its module", {"model": other, "optimizer": adam(other).state_dict()}),
        ("itself instead of PerRank", {"model": other, "optimizer": PerRank(adam(other))}),
        ("a parameter group 1 without parameters", {"model": other, "optimizer": adam(other)}),
    ]
    cases[3][1]["optimizer"] = torch.optim.AdamW([*other.parameters(), *cases[3][1]["b"].parameters()])
    cases[6][1]["optimizer"].param_groups[1]["params"].clear()
    for words, state in cases:
        before = str(state)
        with pytest.raises(StateMismatchError, match=f"parameter names: optimizer .*{words}"):
            restored(root, state, only=[name for name in state if name != "b"])
        assert str(state) == before
    named = get_optimizer_state_dict(other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(StateMismatchError, match=r"numbers has parameter groups of \[2, 1\].* of \[3\]"):
        restored(root, {"numbers": named}, only=["numbers"])


def test_state_of_parameters_that_are_frozen_now_is_unexpected(tmp_path: Path, trained: Any) -> None:
    model, optimizer = trained
    named = get_optimizer_state_dict(model, optimizer)
    root = saved(tmp_path, {"model": model, "optimizer": named})
    other = Net(2)
    others = torch.optim.AdamW(other.embed.parameters(), lr=0.01)
    with pytest.raises(StateMismatchError, match=r"unexpected: optimizer/state/hidden\.weight/exp_avg"):
        restored(root, {"model": other, "optimizer": others})
    restored(root, {"model": other, "optimizer": others}, strict=False)
    wanted = by_parameter(model, optimizer)["embed.weight"]
    assert same(by_parameter(other, others), {"embed.weight": wanted})


class Broken(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


def test_an_optimizer_that_has_no_state_dict_is_named(tmp_path: Path, trained: Any) -> None:
    model, optimizer = trained
    root = saved(tmp_path, {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer)})
    other = Net(2)
    with pytest.raises(StateError, match=r"optimizer: Broken\.state_dict failed"):
        restored(root, {"model": other, "optimizer": Broken(other.parameters())})


def layers(count: int, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(count)
    return nn.Sequential(*(nn.Linear(4, 4, bias=bias) for _ in range(count)))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("with_model", [False, True])
def test_a_flattened_dict_of_other_groups_is_refused_whatever_its_number_of_parameters(
    tmp_path: Path, with_model: bool
) -> None:
    model = layers(3)
    first, second, third = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [third], "lr": 0.3}, {"params": [first, second], "lr": 0.7}]
    optimizer = torch.optim.AdamW(groups)
    learn(model, optimizer)
    root = saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = layers(3)
    flat = get_optimizer_state_dict(other, torch.optim.AdamW(other.parameters(), lr=0.5), options=FLATTENED)
    state = {"model": other, "optimizer": flat} if with_model else {"optimizer": flat}
    before = str(state)
    with pytest.raises(
        StateMismatchError, match=r"groups of \[1, 2\] .* of \[3\] .*leaves no groups.*put the optimizer"
    ):
        restored(root, state, only=list(state))
    assert str(state) == before


def test_a_flattened_dict_in_another_order_than_the_modules_may_be_of_several_groups(tmp_path: Path) -> None:
    model = layers(3)
    optimizer = torch.optim.AdamW(model.parameters())
    learn(model, optimizer)
    root = saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = layers(3)
    first, second, third = other.parameters()
    others = torch.optim.AdamW([{"params": [third]}, {"params": [first, second]}])
    flat = get_optimizer_state_dict(other, others, options=FLATTENED)
    with pytest.raises(StateMismatchError, match=r"from 2\.weight on, another order than the modules have"):
        restored(root, {"model": other, "optimizer": flat})
    with pytest.raises(StateMismatchError, match=r"no module of the state has 2\.weight.*put the module beside it"):
        restored(root, {"optimizer": flat}, only=["optimizer"])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("form", list(FORMS))
def test_parameters_that_a_named_step_lacks_are_missing_and_stay_in_their_groups(
    tmp_path: Path, form: str, kind: str, grouped: bool
) -> None:
    def build(count: int, lr: float) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = layers(count)
        made = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
        groups = [{"params": list(model[:3].parameters())}, {"params": list(model[3:].parameters())}]
        return model, made(groups if grouped and count > 3 else model.parameters(), lr=lr)

    model, optimizer = build(3, 0.1)
    learn(model, optimizer)
    root = saved(tmp_path, {"optimizer": get_optimizer_state_dict(model, optimizer, options=FORMS[form])})
    other, others = build(4, 0.5)
    state = {"optimizer": get_optimizer_state_dict(other, others)}
    with pytest.raises(StateMismatchError, match=r"missing: optimizer/state/3\.weight"):
        restored(root, state)
    restored(root, state, strict=False)
    names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    assert names == list(other.state_dict())
    set_optimizer_state_dict(other, others, state["optimizer"])
    wanted = by_parameter(model, optimizer)
    found = by_parameter(other, others)
    assert all(same(found[name]["state"], wanted[name]["state"]) for name in wanted)
    assert [group["lr"] for group in others.param_groups] == ([0.1, 0.5] if grouped else [0.1])
    assert [len(group["params"]) for group in others.param_groups] == ([3, 1] if grouped else [4])


def test_a_group_that_a_named_step_lacks_and_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    model = layers(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    learn(model, optimizer)
    root = saved(tmp_path, {"optimizer": get_optimizer_state_dict(model, optimizer)})
    other = layers(4)
    groups = [{"params": list(other[:3].parameters())}, {"params": list(other[3:].parameters())}]
    state = {"optimizer": get_optimizer_state_dict(other, torch.optim.AdamW(groups, lr=torch.tensor(0.5)))}
    with pytest.raises(
        StateMismatchError, match="no parameter of group 1 in the checkpoint, and this group has an option"
    ):
        restored(root, state, strict=False)


@pytest.mark.parametrize("with_model", [False, True])
def test_moments_of_another_number_of_dimensions_than_the_parameter_are_a_mismatch(
    tmp_path: Path, with_model: bool
) -> None:
    model = layers(2, bias=True)
    optimizer = torch.optim.AdamW(model.parameters())
    learn(model, optimizer)
    root = saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = layers(2, bias=True)
    others = torch.optim.AdamW(list(other.parameters())[::-1])
    state: dict[str, Any] = {"model": other, "optimizer": others} if with_model else {"optimizer": others}
    with pytest.raises(StateMismatchError, match=r"shape: optimizer/state/0/exp_avg is \[4, 4\] .* parameter is \[4\]"):
        restored(root, state, only=list(state))
    assert not others.state


def test_moments_are_compared_with_the_modules_where_a_dict_has_none(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1])
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    root = saved(tmp_path, {"model": model, "optimizer": optimizer})
    named = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    named["state"] = {}
    with pytest.raises(StateMismatchError, match=r"exp_avg \[4, 3\] for parameter 0 .* that of 0\.weight \[3, 4\]"):
        restored(root, {"model": model, "optimizer": named})


@pytest.mark.parametrize("form", ["numbered", *FORMS])
def test_names_that_groups_have_beside_numbers_tell_another_order(tmp_path: Path, form: str) -> None:
    model = layers(3)
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1])
    learn(model, optimizer)
    root = saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = layers(3)
    others: Any = torch.optim.AdamW(other.named_parameters())
    plain = torch.optim.AdamW(other.parameters())
    state = others if form == "numbered" else get_optimizer_state_dict(other, plain, options=FORMS[form])
    with pytest.raises(
        StateMismatchError, match=r"has parameter 0\.weight at place 2 .* at place 0 in that of the state"
    ):
        restored(root, {"model": other, "optimizer": state})
    same_order = torch.optim.AdamW(list(other.named_parameters())[::-1])
    restored(root, {"model": other, "optimizer": same_order})
    assert torch.equal(same_order.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
