"""Optimizers of torch.optim and of other packages are restored as `load_state_dict` loads what `torch.save` wrote.

Of the packages, those that are installed: see the extra `optimizers`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import AsyncCallsQueue, Checkpointer, StateError
from tests.ckpt.loading.every_optimizer import PACKAGES, Make, optimizers_of
from tests.ckpt.loading.optimizer_training import model_of, same, train
from tests.support.selection import FULL, full_only

_KEYS, _OBJECTS = r"optimizer/.*: keys must be str or int.* str\(key\)", r"optimizer/state/0/.* cannot be stored"
REFUSED = {
    "pytorch_optimizer.AggMo": _KEYS,
    "pytorch_optimizer.Conda": _OBJECTS,
    "pytorch_optimizer.Lookahead": _KEYS,
    "pytorch_optimizer.Magma": _KEYS,
    "pytorch_optimizer.ScalableShampoo": _OBJECTS,
    "pytorch_optimizer.ScheduleFreeWrapper": _KEYS,
}
"""Optimizers that cannot be saved once they have state, and the error of the save."""

TRANSPOSED = {"pytorch_optimizer.SOAP", "pytorch_optimizer.SPlus"}
"""Optimizers with state in column-major order, which a step does not record: new tensors have other strides, and the
products that are computed of them are rounded in another way."""


@pytest.fixture(scope="module")
def queue() -> Iterator[AsyncCallsQueue]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    with AsyncCallsQueue() as queue:
        yield queue
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Discard what other packages warn of and print."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _trained(make: Make, seed: int, steps: range) -> dict[str, Any]:
    model = model_of(seed)
    optimizer = make(model)
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


def _state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {key: item.state_dict() for key, item in state.items()}


def _load(state: dict[str, Any], state_dicts: dict[str, Any]) -> None:
    for key, item in state.items():
        item.load_state_dict(state_dicts[key])


def _selected(package: str) -> dict[str, Make]:
    """Return all optimizers; of the large package, only some without TESTS=full."""
    optimizers = optimizers_of(package)
    if FULL or package != "pytorch_optimizer":
        return optimizers
    return {
        name: make
        for number, (name, make) in enumerate(optimizers.items())
        if name in set(REFUSED) | TRANSPOSED or number % 8 == 0
    }


@pytest.mark.timeout(400 if FULL else 200)
@pytest.mark.parametrize(
    "package", [pytest.param(each, marks=full_only if each == "bitsandbytes.optim" else ()) for each in PACKAGES]
)
def test_optimizers_are_restored_as_torch_loads_them(queue: AsyncCallsQueue, tmp_path: Path, package: str) -> None:
    """One test for a package, which only this test imports: not every process that collects it."""
    pytest.importorskip(package, exc_type=ImportError)
    failed: list[BaseException] = []
    for name, make in _selected(package).items():
        try:
            _assert_restored_as_torch_loads_it(queue, tmp_path / name, name, make)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(name)
            failed.append(error)
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} optimizers of {package}", failed)


def _assert_restored_as_torch_loads_it(queue: AsyncCallsQueue, root: Path, name: str, make: Make) -> None:
    with Checkpointer(root, queue=queue) as checkpointer:
        for saved, others in (0, (2,)), (2, (0, 3)):
            state = _trained(make, 1, range(saved))
            if name in REFUSED and (saved or name.endswith("Lookahead")):
                with pytest.raises(StateError, match=REFUSED[name]):
                    checkpointer.save(state, saved)
                continue
            checkpointer.save(state, saved)
            file = io.BytesIO()
            torch.save(_state_dicts(state), file)
            for steps in others:
                ours, theirs = (_trained(make, 2, range(100, 100 + steps)) for _ in range(2))
                if name in TRANSPOSED and not steps:
                    _load(theirs, ckpt.load(root, saved))
                else:
                    file.seek(0)
                    _load(theirs, torch.load(file, weights_only=False))
                checkpointer.restore(ours, saved)
                restored, loaded, before = map(_state_dicts, (ours, theirs, state))
                if not same(restored, loaded):  # torch casts state that is narrower or wider than its parameter
                    assert same(restored, before), f"step {saved}, into one of {steps} steps"
                    continue
                for each in (ours, theirs):
                    train(each["model"], each["optimizer"], range(saved, saved + 2))
                weights, expected = ours["model"].state_dict(), theirs["model"].state_dict()
                assert same(weights, expected), f"two steps after step {saved}, restored into one of {steps} steps"


def test_the_packages_are_those_of_the_extra() -> None:
    assert len(optimizers_of("torch.optim")) >= 14
    if importlib.util.find_spec("pytorch_optimizer") is not None:
        assert set(REFUSED) | TRANSPOSED <= set(optimizers_of("pytorch_optimizer"))
