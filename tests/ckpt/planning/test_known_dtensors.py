"""DTensors and modules of FSDP2 whose leaves are those of the save before: recognised, and never after a change.

Every answer is compared with that of `flatten`. This process is a rank of several in a process group that only
pretends: its shards have the sizes of a real job's, some of them none, and its collectives do nothing.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, _StridedShard

import ckpt
from ckpt import Checkpointer
from ckpt.errors import StateError
from ckpt.planning.flat_state import FlatState
from ckpt.planning.known_state import KnownStates
from ckpt.planning.state_dict import flatten
from ckpt.planning.tensor_records import TensorRecords
from tests.ckpt.planning.flattening import is_known, known_states, seen
from tests.support import run_ranks

_RANKS, _RANK = 4, 3
State = dict[str, Any]

pytestmark = pytest.mark.skipif(
    TensorRecords.of([torch.zeros(1)]) is None, reason="the compiled functions are not installed"
)


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=_RANK, world_size=_RANKS)
    yield
    dist.destroy_process_group()


@functools.cache
def _meshes() -> tuple[Any, Any]:
    """Return a mesh of one dimension, and one of two, over all ranks."""
    return init_device_mesh("cpu", (_RANKS,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


def _dtensor(*placements: Any, shape: tuple[int, ...] = (8, 6), local: torch.Tensor | None = None) -> Any:
    mesh = _meshes()[len(placements) - 1]
    if local is None:
        own = list(shape)
        for placement in placements:
            if isinstance(placement, Shard):
                own[placement.dim] //= mesh.size() if mesh.ndim == 1 else 2
        local = torch.rand(own)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


class _Application:
    """An object that makes its state dict anew for each call: other DTensors, and other local ones in them."""

    def __init__(self) -> None:
        self.tensors = {f"w{number}": _dtensor(Shard(0), Shard(1)) for number in range(4)}

    def state_dict(self) -> State:
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    def load_state_dict(self, state_dict: State) -> None:
        raise NotImplementedError


def _model() -> Any:
    """Return a module of FSDP2. This rank has no elements of the first layer of each block."""
    blocks = (torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 4)) for _ in range(5))
    model = torch.nn.Sequential(*blocks, torch.nn.BatchNorm1d(4))
    for block in model:
        fully_shard(block, mesh=_meshes()[0])
    fully_shard(model, mesh=_meshes()[0])
    model(torch.ones(2, 4))  # from then on there are hooks
    return model


def _training() -> State:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "average": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "tensors": {f"t{number}": _dtensor(Shard(0), Replicate()) for number in range(8)},
        "plain": {f"p{number}": torch.rand(3) for number in range(8)},
        "application": _Application(),
        "step": 3,
    }


def test_only_elements_change() -> None:
    state = _training()
    states = known_states(state)
    for leaf in flatten(state).tensors.values():
        leaf.local.add_(1)
    assert is_known(states, state)


def test_a_module_of_fsdp_is_read_and_not_asked() -> None:
    """Each of its modules has a hook, and its state dict makes another DTensor for each one."""
    state = _training()
    states = known_states(state)
    before = {owner.path: owner.before for owner in states.flatten(state).owners}
    assert before["model",] is None
    assert before["application",] is not None


def test_parameters_that_are_whole_are_sharded_before_they_are_read() -> None:
    state = _training()
    states = known_states(state)
    for _ in range(2):
        state["model"].unshard()
        for block in state["model"]:
            block.unshard()
        assert not any(isinstance(parameter, DTensor) for parameter in state["model"].parameters())
        flat = states.flatten(state)
        assert type(flat) is not FlatState
        assert all(isinstance(parameter, DTensor) for parameter in state["model"].parameters())
        assert seen(flat) == seen(flatten(state))


def _first(state: State) -> Any:
    """Return a weight of which this rank has elements."""
    return state["model"][0][1].weight


def _swap_local(state: State) -> None:
    weight = _first(state)
    weight._local_tensor = weight._local_tensor.clone()


def _swap_local_data(state: State) -> None:
    local = _first(state)._local_tensor
    local.data = local.data * 2


def _replace_parameter(state: State) -> None:
    weight = _first(state)
    state["model"][0][1].weight = torch.nn.Parameter(weight.detach().clone())


def _share_memory(state: State) -> None:
    state["tensors"]["t1"]._local_tensor = state["tensors"]["t2"]._local_tensor


def _change_spec(state: State, **fields: Any) -> None:
    """Give a DTensor another spec; it keeps its shape."""
    tensor = state["tensors"]["t1"]
    spec = tensor._spec
    fields = {"mesh": spec.mesh, "placements": spec.placements, "tensor_meta": spec.tensor_meta, **fields}
    tensor._spec = DTensorSpec(**fields)


def _change_spec_in_place(state: State) -> None:
    """Several tensors may have this spec."""
    spec = state["tensors"]["t1"]._spec
    spec.shard_order = None
    spec.placements = spec.placements[::-1]
    state["tensors"]["t1"]._local_tensor = torch.ones(8, 3)


def _move_to_strided(state: State) -> None:
    strided = _StridedShard(0, split_factor=2)
    _change_spec(state, placements=(strided, state["tensors"]["t1"].placements[1]), shard_order=None)


def _permuted_mesh(state: State) -> None:
    mesh = dist.device_mesh.DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), _init_backend=False)
    _change_spec(state, mesh=mesh)


def _set_data(state: State) -> None:
    """Give a DTensor the shape of another one. The local tensor in it stays."""
    tensor = state["tensors"]["t1"]
    tensor.data = _dtensor(Shard(0), Replicate(), shape=(4, 12))


def _swap_tensors(state: State) -> None:
    torch.utils.swap_tensors(state["tensors"]["t1"], _dtensor(Replicate(), Shard(1)))


def _free_and_refill(state: State) -> None:
    """Replace a DTensor by one of another shape, with its elements at the same address."""
    address = state["tensors"]["t1"].to_local().data_ptr()
    del state["tensors"]["t1"]
    kept = []
    for _ in range(100):
        kept.append(torch.rand(6, 4))
        if kept[-1].data_ptr() == address:
            break
    state["tensors"]["t1"] = _dtensor(Shard(0), Replicate(), shape=(12, 4), local=kept[-1])


def _offload_and_back(state: State) -> None:
    locals_ = [parameter._local_tensor for parameter in state["model"].parameters()]
    host = [local.clone() for local in locals_]
    for local in locals_:
        local.data = torch.empty(0)
    gc.collect()
    for local, copy in zip(locals_, host, strict=True):
        local.data = copy + 1


def _unshard_with_other_memory(state: State) -> None:
    for block in state["model"]:
        block.unshard()
        block.reshard()


def _set_local(tensor: torch.Tensor) -> Callable[[State], None]:
    return lambda state: setattr(state["tensors"]["t1"], "_local_tensor", tensor)


def _wrapped_hook(state: State) -> None:
    """Replace a hook of FSDP2 by one that looks like it, and does more."""
    hooks = state["model"][0][1]._state_dict_pre_hooks
    (number,) = hooks
    original, sevens = hooks[number], torch.full((1, 5), 7.0)

    @functools.wraps(original)
    def to_sharded_hook(module: Any, *arguments: Any) -> None:
        original(module, *arguments)
        module.weight._local_tensor = sevens

    hooks[number] = to_sharded_hook


def _hook_before(state: State) -> None:
    average, more = state["average"], torch.ones(2)
    state["model"][1].register_state_dict_pre_hook(lambda module, *_: average.update(more=more))


def _hook_after(state: State) -> None:
    state["model"][1].register_state_dict_post_hook(lambda module, destination, *_: destination.popitem())


class _Other(DTensor):
    pass


def _other_class(state: State) -> None:
    tensor = state["tensors"]["t1"]
    state["tensors"]["t1"] = _Other(tensor._local_tensor, tensor._spec, requires_grad=False)


_CHANGES: dict[str, Callable[[State], Any]] = {
    "local tensor": _swap_local,
    "data of the local tensor": _swap_local_data,
    "a parameter": _replace_parameter,
    "one is another": _share_memory,
    "one is a plain one": lambda state: state["tensors"].update(t1=state["tensors"]["t1"].to_local()),
    "one is a plain one with its memory": lambda state: state["plain"].update(p1=state["tensors"]["t1"].to_local()),
    "a plain one is a DTensor": lambda state: state["plain"].update(p1=_dtensor(Shard(0))),
    "a DTensor of the same memory": lambda state: state["tensors"].update(t1=state["tensors"]["t1"].detach()),
    "placements": lambda state: _change_spec(state, placements=(Replicate(), Shard(0))),
    "placements of another size": lambda state: _change_spec(state, placements=(Replicate(), Replicate())),
    "equal placements": lambda state: _change_spec(state, placements=(Shard(0), Replicate())),
    "partial sums": lambda state: _change_spec(state, placements=(Partial(), Shard(0))),
    "spec in place": _change_spec_in_place,
    "strided shard": _move_to_strided,
    "order of ranks": _permuted_mesh,
    "another mesh": lambda state: _change_spec(state, mesh=_meshes()[0], placements=(Shard(0),)),
    "redistributed": lambda state: state["tensors"].update(t1=_dtensor(Replicate(), Shard(1))),
    "shape": lambda state: state["tensors"].update(t1=_dtensor(Shard(0), Replicate(), shape=(4, 12))),
    "shape in place": _set_data,
    "shape in the spec": lambda state: _change_spec(
        state, tensor_meta=TensorMeta(torch.Size((4, 12)), (12, 1), torch.float32)
    ),
    "swapped": _swap_tensors,
    "freed and refilled": _free_and_refill,
    "offloaded and back": _offload_and_back,
    "unsharded and back": _unshard_with_other_memory,
    "storage is freed": lambda state: state["tensors"]["t1"]._local_tensor.untyped_storage().resize_(0),
    "set_": lambda state: state["tensors"]["t1"]._local_tensor.set_(torch.ones(4, 6)),
    "set_ to another stride": lambda state: state["tensors"]["t1"]._local_tensor.set_(torch.ones(6, 4).T),
    "resize_": lambda state: state["tensors"]["t1"]._local_tensor.resize_(4, 7),
    "transposed in place": lambda state: state["tensors"]["t1"]._local_tensor.t_(),
    "negated": _set_local(torch._neg_view(torch.ones(4, 6))),
    "another dtype": _set_local(torch.ones(4, 6, dtype=torch.bfloat16)),
    "a parameter inside": _set_local(torch.nn.Parameter(torch.ones(4, 6))),
    "a sparse one inside": _set_local(torch.ones(4, 6).to_sparse()),
    "no elements inside": _set_local(torch.ones(0, 6)),
    "another class": _other_class,
    "dtype of the module": lambda state: state["model"].to(torch.bfloat16),
    "a moment in another placement": lambda state: (
        state["optimizer"].state[_first(state)].update(exp_avg=_dtensor(Shard(1), shape=(5, 4), local=torch.ones(5, 1)))
    ),
    "a moment is whole": lambda state: state["optimizer"].state[_first(state)].update(exp_avg=torch.ones(4, 5)),
    "an object's tensor": lambda state: state["application"].tensors.update(w1=_dtensor(Shard(1), Shard(0))),
    "a parameter more": lambda state: setattr(state["model"][0][0], "more", torch.nn.Parameter(torch.ones(3))),
    "a parameter less": lambda state: setattr(state["model"][0][0], "bias", None),
    "a hook before": _hook_before,
    "a hook after": _hook_after,
    "a hook around that of FSDP": _wrapped_hook,
    "no hooks": lambda state: state["model"][0][0]._state_dict_pre_hooks.clear(),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    state = _training()
    states = known_states(state)
    _CHANGES[change](state)
    for _ in range(3):
        is_known(states, state)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.sampled_from(sorted(_CHANGES)), max_size=2), max_size=6))
def test_any_changes_between_saves_are_noticed(saves: list[list[str]]) -> None:
    state, states = _training(), KnownStates()
    for changes in saves:
        for change in changes:
            with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError, RuntimeError):
                _CHANGES[change](state)  # which an earlier one may have made impossible
        is_known(states, state)


def test_a_hook_that_raises_is_told_with_the_path_of_its_module() -> None:
    state = _training()
    states = known_states(state)
    hook = next(iter(state["model"][0][0]._state_dict_pre_hooks.values()))
    (group,) = (cell.cell_contents for cell in hook.__closure__)
    group._sharded_state = None
    group.fsdp_params = [object()]
    with pytest.raises(StateError, match=r"model: .*state_dict failed"):
        states.flatten(state)


def test_hooks_that_are_not_of_fsdp_are_called_by_the_module() -> None:
    """They may do anything, also by the name that the module has. Only then it makes its state dict."""
    state, prefixes = _training(), list[str]()
    states = known_states(state)
    state["model"][1].register_state_dict_pre_hook(lambda module, prefix, keep: prefixes.append(prefix))
    states.flatten(state)
    assert prefixes == ["1."]
    known_states({"first": state["average"], **state})


def _save_while_training(rank: int, world_size: int, root: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(20)))
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state, states = {"model": model, "optimizer": optimizer}, KnownStates()
    with Checkpointer(root) as checkpointer:
        for step in range(1, 6):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            expected = {("model", name): each.to_local().clone() for name, each in model.named_parameters()}
            for number, parameter in enumerate(model.parameters()):
                moment = optimizer.state[parameter]["exp_avg"].to_local()
                expected["optimizer", "state", number, "exp_avg"] = moment.clone()
            if step == 4:  # other memory, as after an offload
                for parameter in model.parameters():
                    local = parameter._local_tensor
                    local.data = local.clone()
            sharded.unshard()  # as in a forward pass
            assert (type(states.flatten(state)) is FlatState) == (step == 1)
            sharded.unshard()
            assert checkpointer.save(state, step)
            with ckpt.open(root, step) as saved:
                found = {keys: leaf for keys, _, leaf in saved.leaves()}
                for keys, tensor in expected.items():
                    assert torch.equal(found[keys].torch().chunk(world_size)[rank], tensor), (step, keys)


def test_each_save_of_sharded_training_has_the_elements_of_its_time(tmp_path: Path) -> None:
    run_ranks(_save_while_training, 2, tmp_path / "root")
