"""Dicts of many tensors, which are looked at together: those that are not like the others are stored as they are."""

import os
import signal
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.async_calls.call import pickled
from ckpt.async_calls.request import AsyncRequest
from ckpt.errors import StateError, WriterError
from ckpt.planning.state_dict import flatten

_COUNT = 40


def _plain() -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.full((3, 4), float(number)) for number in range(_COUNT)}


def _with_others() -> dict[str, torch.Tensor]:
    """Return tensors of one type, with others among them."""
    base = torch.arange(24, dtype=torch.float32)
    others = {
        "layer.3": base.view(4, 6).T,
        "layer.4": base[:12].view(3, 4),
        "layer.5": base[:12].view(4, 3),
        "layer.6": base[:12].view(3, 4),
        "layer.10": torch.zeros(0, 3),
        "layer.11": torch.tensor(7.0),
        "layer.12": torch.full((2, 3), 1 + 2j).conj(),
        "layer.13": torch.ones(5, dtype=torch.bfloat16),
        "layer.14": torch.ones(3, 1).expand(3, 4),
        "layer.39": torch.ones(3, 4, requires_grad=True),
    }
    return {**_plain(), **others}


def test_tensors_unlike_the_others_are_found_among_them() -> None:
    state = _with_others()
    flat = flatten({"model": state})
    paths = [("model", name) for name in state]
    assert flat.aliases == {("model", "layer.6"): ("model", "layer.4")}
    assert list(flat.tensors) == [path for path in paths if path not in flat.aliases]
    for name, tensor in state.items():
        if name != "layer.6":
            leaf = flat.tensors["model", name]
            assert leaf.local.data_ptr() == tensor.data_ptr()
            assert not leaf.local.requires_grad
            assert leaf.spec.shape == tuple(tensor.shape)
            assert leaf.spec.dtype == str(tensor.dtype).removeprefix("torch.")
            assert leaf.writeable == (name != "layer.14")


def test_tensors_of_several_dicts_are_aliases_of_the_first() -> None:
    first = _plain()
    second = {name: tensor if number % 3 else tensor.clone() for number, (name, tensor) in enumerate(first.items())}
    flat = flatten({"model": first, "average": second})
    same = [name for number, name in enumerate(first) if number % 3]
    assert flat.aliases == {("average", name): ("model", name) for name in same}
    assert len(flat.tensors) == 2 * _COUNT - len(same)


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("kind", ["sparse", "quantized", "meta"])
def test_one_that_cannot_be_stored_is_named(kind: str) -> None:
    tensors = {
        "sparse": lambda: torch.zeros(3, 4).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3, 4), 1.0, 0, torch.qint8),
        "meta": lambda: torch.zeros(3, 4, device="meta"),
    }
    for names in (["layer.20"], [f"layer.{number}" for number in range(20, _COUNT)]):
        with pytest.raises(StateError, match=rf"model.*layer\.20.*{kind}"):
            flatten({"model": {**_plain(), **{name: tensors[kind]() for name in names}}})


def test_a_tensor_that_is_exchanged_between_saves_is_noticed(tmp_path: Path) -> None:
    def exchange(state: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        state[name] = tensor

    def set_data(state: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        state[name].data = tensor

    state = _plain()
    with Checkpointer(tmp_path) as checkpointer:
        step = 0
        for change in (exchange, set_data):
            for tensor in (
                torch.full((3, 4), -1.0),
                torch.full((4, 3), -2.0),
                torch.full((12,), -3.0),
                torch.arange(12.0).view(4, 3).T,
                torch.full((3, 4), -4, dtype=torch.float16 if change is exchange else torch.float32),
            ):
                step += 1
                change(state, "layer.7", tensor)
                expected = {name: each.clone() for name, each in state.items()}
                checkpointer.async_save({"model": state}, step)
                checkpointer.maybe_finalize(blocking=True)
                for each in state.values():
                    each.zero_()
                assert checkpointer.restore({"model": state}, step) == step
                for name, each in state.items():
                    assert torch.equal(each, expected[name])


def test_many_tensors_come_back(tmp_path: Path) -> None:
    state = _with_others()
    state["layer.39"] = state["layer.39"].detach()
    del state["layer.14"]  # can only be saved
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.async_save({"model": state}, 1)
    # Memory of their own: views of one memory are not restored together.
    state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"model": state}) == 1
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name])


def test_a_plan_is_sent_to_each_writer_once(tmp_path: Path) -> None:
    """Not with each save; and also to one that replaces another, and for another structure of the state."""
    state = {f"layer.{number}": torch.zeros(4) for number in range(2000)}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 5):
            if step == 3:
                checkpointer.queue.schedule_async_request(AsyncRequest(_die, (), []))
                with pytest.raises(WriterError, match="SIGKILL"):
                    checkpointer.queue.maybe_finalize_async_calls(blocking=True)
            if step == 4:
                state["more"] = torch.ones(5)
            for tensor in state.values():
                tensor.add_(1)
            request = checkpointer.save_request({"model": state}, step)
            message = pickled(request.async_fn.in_writer, {})
            assert os.fstat(message).st_size < 20_000
            os.close(message)
            checkpointer.queue.schedule_async_request(request)
            checkpointer.maybe_finalize(blocking=True)
            loaded = ckpt.load(tmp_path / f"step_{step:08}")["model"]
            assert loaded.keys() == state.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
