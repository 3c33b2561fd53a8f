"""Megatron-core saves and loads steps: its sharded state dicts, divided in any way, at once and in the background."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import os
import resource
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from inspect_ckpt.__main__ import main as inspect_ckpt

import ckpt
from tests.support import run_ranks
from tests.support.frameworks import MEGATRON

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

IMPORTS = (*MEGATRON, "ckpt.integrations.megatron", "megatron.core.dist_checkpointing.strategies.fully_parallel")


class Shade(enum.Enum):
    DARK = 1


class Opaque:
    """An object that no step can hold."""


def _core() -> Any:
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def _strategies() -> Any:
    warnings.simplefilter("ignore")
    from ckpt.integrations import megatron

    return megatron


def _folder(path: Path) -> str:
    """Make the directory of a checkpoint, as Megatron does."""
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(path)


def _values(shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def _raised(call: Callable[[], Any]) -> str:
    """Return the class and the text of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


WEIGHT, LAYERS, EMBEDDING = _values((8, 6)), _values((4, 3, 5), 100), _values((11, 2), 500)
UNEVEN, BUCKET = _values((10,), 700), _values((13,), 900)


def _model(tp: int, pp: int, blank: bool = False, padded: int = 12) -> dict[str, Any]:
    """Return a sharded state dict as a model of Megatron makes it, for this rank of a division by `tp` and `pp`.

    Ranks that are left are data-parallel replicas. With `blank`, tensors are to be loaded.
    """
    core, rank = _core(), dist.get_rank()
    tp_rank, pp_rank, dp_rank = rank % tp, rank // tp % pp, rank // (tp * pp)

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, -1) if blank else tensor.clone()

    def sharded(key: str, tensor: torch.Tensor, *offsets: tuple[int, int, int], **options: Any) -> Any:
        return core.ShardedTensor.from_rank_offsets(key, of(tensor), *offsets, **options)

    rows, layers = len(WEIGHT) // tp, len(LAYERS) // pp
    embedding = torch.cat([EMBEDDING, torch.zeros(padded - len(EMBEDDING), 2)]).chunk(tp)[tp_rank]
    bounds = [0, 1, 4, 10] if tp == 2 else [0, 6, 10]
    first = range(tp_rank, len(bounds) - 1, tp)  # this rank has several boxes of one tensor, of different sizes
    uneven = [
        core.ShardedTensor(
            "uneven", of(UNEVEN[a:b]), torch.float32, (b - a,), (10,), (a,), None, replica_id=(0, pp_rank, dp_rank)
        )
        for a, b in ((bounds[i], bounds[i + 1]) for i in first)
    ]
    return {
        "weight": sharded(
            "decoder.weight",
            WEIGHT[tp_rank * rows : (tp_rank + 1) * rows],
            (0, tp_rank, tp),
            replica_id=(0, pp_rank, dp_rank),
        ),
        "layers": {
            number: sharded(
                "decoder.layers.weight",
                LAYERS[pp_rank * layers + number],
                (0, pp_rank * layers + number, len(LAYERS)),
                prepend_axis_num=1,
                replica_id=(0, tp_rank, dp_rank),
            )
            for number in range(layers)
        },
        "embedding": sharded(
            "embedding.weight",
            embedding,
            (0, tp_rank, tp),
            replica_id=(0, pp_rank, dp_rank),
            allow_shape_mismatch=True,
        ),
        "uneven": uneven,
        "bias": sharded("decoder.bias", _values((5,), 50).bfloat16(), replica_id=rank),
        "temperature": sharded("temperature", torch.tensor(0.25), replica_id=rank),
    }


def _plain(loaded: dict[str, Any]) -> dict[str, Any]:
    """Return what was loaded as lists."""
    layers = [loaded["layers"][number].tolist() for number in sorted(loaded["layers"])]
    names = ("weight", "embedding", "bias", "temperature")
    return {name: loaded[name].tolist() for name in names} | {
        "layers": layers,
        "uneven": [each.tolist() for each in loaded.get("uneven", [])],
    }


# -- divisions ---------------------------------------------------------------------------------------------------------


def _save_model(rank: int, world_size: int, root: Path, tp: int, pp: int) -> None:
    core, megatron = _core(), _strategies()
    with megatron.CkptSaveStrategy(timeout=60) as strategy:
        core.save(_model(tp, pp) | {"iteration": 100}, _folder(root / "iter_0000100"), strategy)


def _datas(node: Any) -> Any:
    """Return a sharded state dict with the data in place of the sharded tensors."""
    if isinstance(node, dict):
        return {key: _datas(item) for key, item in node.items()}
    return [_datas(item) for item in node] if isinstance(node, list) else node.data


def _load_and_compare(rank: int, world_size: int, root: Path, divisions: list[tuple[int, int]]) -> None:
    core, megatron = _core(), _strategies()
    folder = str(root / "iter_0000100")
    assert core.check_is_distributed_checkpoint(folder)
    for tp, pp in divisions:
        seen: list[Any] = []
        with ckpt.observe(seen.append):
            loaded = core.load(_model(tp, pp, blank=True, padded=16), folder, megatron.CkptLoadStrategy())
        assert [(type(each).__name__, each.rank, each.step) for each in seen] == [("Restored", rank, 100)]
        wanted = _datas(_model(tp, pp, padded=16))
        assert loaded["iteration"] == 100
        assert _plain(loaded) == _plain(wanted), (tp, pp)


def test_a_step_is_loaded_with_another_tp_pp_and_dp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_save_model, 4, tmp_path, 2, 2, timeout=120, imports=IMPORTS)
    folder = tmp_path / "iter_0000100"
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "ckpt"
    assert [path.name for path in folder.glob("step_*")] == ["step_00000100"]
    with ckpt.open(folder) as checkpoint:  # by plain names, without Megatron
        assert np.array_equal(checkpoint["decoder.weight"].read(), WEIGHT.numpy())
        assert np.array_equal(checkpoint["decoder.layers.weight"].read(), LAYERS.numpy())
        assert np.array_equal(checkpoint["uneven"].read(), UNEVEN.numpy())
        assert checkpoint["embedding.weight"].shape == (12, 2)
        assert checkpoint.values_by_name["megatron/common/iteration/value"] == 100
    assert inspect_ckpt(["validate", str(folder)]) == 0
    assert "whole" in capsys.readouterr().out
    run_ranks(_load_and_compare, 4, tmp_path, [(4, 1), (1, 4), (1, 1)], timeout=120, imports=IMPORTS)
    run_ranks(_load_and_compare, 2, tmp_path, [(2, 1), (1, 2)], timeout=120, imports=IMPORTS)
    run_ranks(_load_and_compare, 1, tmp_path, [(1, 1)], timeout=120, imports=IMPORTS)


def _fully_parallel(rank: int, world_size: int, root: Path) -> None:
    core, megatron = _core(), _strategies()
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    torch.cuda.synchronize = lambda *given: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    folder = _folder(root / "iter_0000100")
    with megatron.CkptSaveStrategy(timeout=60) as strategy:
        core.save(_model(1, 1), folder, fully_parallel.FullyParallelSaveStrategyWrapper(strategy))
    dist.barrier()
    wrapper = fully_parallel.FullyParallelLoadStrategyWrapper
    load = wrapper(megatron.CkptLoadStrategy(), exchange_algo="gather_object")  # the other ways need CUDA
    assert _plain(core.load(_model(1, 1, blank=True), folder, load)) == _plain(_datas(_model(1, 1)))


def test_the_wrappers_of_megatron_divide_reading_and_writing(tmp_path: Path) -> None:
    run_ranks(_fully_parallel, 2, tmp_path, timeout=120, imports=IMPORTS)
    with ckpt.open(tmp_path / "iter_0000100") as checkpoint:
        assert np.array_equal(checkpoint["decoder.weight"].read(), WEIGHT.numpy())


# -- objects and the common state --------------------------------------------------------------------------------------


def _objects(rank: int, world_size: int, value: int) -> dict[str, Any]:
    core = _core()
    generators = {"numpy": ("MT19937", np.arange(7, dtype=np.uint32) + value, 3), "torch": torch.arange(9) + value}
    moments = {number: {"exp_avg": torch.full((3,), float(value + rank))} for number in range(2)}
    return {
        "rng": core.mapping.ShardedObject("rng", [generators | {"rank": rank}], (world_size,), (rank,)),
        "moments": core.mapping.ShardedObject("moments", moments, (1, world_size), (0, rank)),
        "same": core.mapping.ShardedObject("same", {"value": value}, (1,), (0,), replica_id=rank),
        "args": Namespace(lr=0.1, dtype=torch.bfloat16, betas=(0.9, 0.95)),
        "groups": [{"lr": value, 3: None, "step": torch.tensor(value), True: torch.tensor(7)}],
        "iteration": value,
    }


def _save_objects(rank: int, world_size: int, root: Path) -> None:
    core, megatron = _core(), _strategies()
    folder = _folder(root / "run")
    strategy, load = megatron.CkptSaveStrategy(timeout=60), megatron.CkptLoadStrategy()
    core.save(_objects(rank, world_size, 5), folder, strategy, content_metadata={"version": 1})
    for common in (None, load.common):  # from common.pt, and from the step
        found = core.load(_objects(rank, world_size, 0), folder, load, common)
        assert found["rng"][0]["rank"] == rank
        name, numbers, position = found["rng"][0]["numpy"]
        assert (name, numbers.tolist(), numbers.dtype, position) == ("MT19937", list(range(5, 12)), np.uint32, 3)
        assert found["rng"][0]["torch"].tolist() == list(range(5, 14))
        assert found["moments"][1]["exp_avg"].tolist() == [5.0 + rank] * 3
        assert found["same"] == {"value": 5}
        assert found["args"] == Namespace(lr=0.1, dtype=torch.bfloat16, betas=(0.9, 0.95))
        assert (found["groups"][0]["lr"], found["groups"][0][3], found["groups"][0]["step"].item()) == (5, None, 5)
        assert found["groups"][0][True].item() == 7
        assert found["content_metadata"] == {"version": 1}
    megatron.register_strategies(strategy)  # then the name of the backend suffices
    assert core.load_common_state_dict(folder)["iteration"] == 5
    assert core.load(_objects(rank, world_size, 0), folder)["same"] == {"value": 5}
    metadata = core.serialization.load_sharded_metadata(folder)
    assert metadata.keys() == {"same/shard_0_1", *(f"{key}{r}_{shape}" for r in (0, 1) for key, shape in _SHARDS)}
    core.save({"key": core.ShardedTensor.from_rank_offsets("key", torch.ones(2), replica_id=rank)}, folder, ("ckpt", 1))
    assert core.load_plain_tensors(folder)["key"].tolist() == [1, 1]
    strategy.close()


_SHARDS = (("rng/shard_", "2"), ("moments/shard_0.", "1.2"))


def test_objects_and_the_common_state(tmp_path: Path) -> None:
    run_ranks(_save_objects, 2, tmp_path, timeout=120, imports=IMPORTS)
    with ckpt.open(tmp_path / "run") as checkpoint:  # the second save into the directory replaces the first
        assert (checkpoint.step, list(checkpoint)) == (1, ["key"])


def _save_twice(rank: int, world_size: int, root: Path) -> list[str]:
    core, megatron = _core(), _strategies()
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    torch.cuda.synchronize = lambda *given: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    folder, load = _folder(root / "iter_0000100"), megatron.CkptLoadStrategy()
    with megatron.CkptSaveStrategy(timeout=60) as strategy:
        core.save(_objects(rank, world_size, 5), folder, strategy)
        broken = _objects(rank, world_size, 6) | {"bad": core.mapping.ShardedObject("bad", Opaque(), (2,), (rank,))}
        failed = _raised(lambda: core.save(broken, folder, strategy))
    mixed = _raised(lambda: core.load(_objects(rank, world_size, 0), folder, load))
    parallel = fully_parallel.FullyParallelLoadStrategyWrapper(load, exchange_algo="gather_object")
    for strict, sharded in (("assume_ok_unexpected", load), ("log_all", load), ("assume_ok_unexpected", parallel)):
        found = core.load(_objects(rank, world_size, 0), folder, sharded, load.common, strict=strict)
        assert (found["iteration"], found["same"]) == (5, {"value": 5})
        # What was noted for that load is not for the next one.
        assert _raised(lambda sharded=sharded: core.load(_objects(rank, world_size, 0), folder, sharded)) == mixed
    return [failed, mixed]


def test_a_failed_save_over_a_checkpoint_is_never_mixed_with_it(tmp_path: Path) -> None:
    """Megatron replaces common.pt before the save: then that is not the one of the step."""
    for result in run_ranks(_save_twice, 2, tmp_path, timeout=120, imports=IMPORTS):
        failed, mixed = result.value
        assert failed.startswith("StateError: rank 0 cannot store its part")
        assert "megatron/objects/bad/shard_0_2/value" in failed
        assert "register_encoder" in failed
        assert mixed.startswith("CheckpointingException: ")
        assert "common.pt is not the one that was saved with the step" in mixed


class _Executed:
    """An object whose unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self._path,)


def _save_beside_a_foreign_file(rank: int, world_size: int, root: Path) -> list[Any]:
    core, megatron = _core(), _strategies()
    folder = _folder(root / "run")
    if rank == 0:
        torch.save({"iteration": _Executed(root / "executed")}, Path(folder, "common.pt"))
    dist.barrier()
    own = core.ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=rank)
    with megatron.CkptSaveStrategy(timeout=60) as strategy:
        refused = _raised(lambda: strategy.save({"w": own}, folder))
        executed = (root / "executed").exists()
        core.save({"w": own, "shade": Shade.DARK, "iteration": 3}, folder, strategy)  # replaces the file
        stale = _raised(lambda: strategy.save({"w": own}, folder))
        strategy.save({"w": own}, _folder(root / "without"))
    ckpt.register_encoder(Shade)
    load = megatron.CkptLoadStrategy()
    found = core.load({"w": own.without_data()}, folder, load, load.common)
    return [refused, executed, stale, found["iteration"], found["shade"] is Shade.DARK]


def test_a_save_reads_no_common_state_from_the_directory(tmp_path: Path) -> None:
    """A common.pt of another save is not executed, nor stored as the state of this one."""
    for result in run_ranks(_save_beside_a_foreign_file, 2, tmp_path, timeout=120, imports=IMPORTS):
        refused, executed, stale, *found = result.value
        assert not executed
        for text in (refused, stale):
            assert text.startswith("StateError: rank 0 cannot store its part")
            assert "common.pt was not written by this save: save with dist_checkpointing.save" in text
        assert found == [3, True]


# -- in the background -------------------------------------------------------------------------------------------------


def _train(rank: int, world_size: int, root: Path) -> list[Any]:
    core, megatron = _core(), _strategies()
    strategy, load = megatron.CkptSaveStrategy(timeout=60), megatron.CkptLoadStrategy()
    weight, seen = torch.zeros(2, 4), list[Any]()

    def state() -> dict[str, Any]:
        return {"w": core.ShardedTensor.from_rank_offsets("w", weight, (0, rank, world_size)), "iteration": 0}

    for iteration in (1, 2, 3):
        weight += 1
        folder = _folder(root / f"iter_{iteration:07d}")
        request = core.save(state(), folder, strategy, async_sharded_save=True)
        request.add_finalize_fn(partial(seen.append, iteration))
        strategy.queue.schedule_async_request(request)
        weight += 100  # copied before
        if iteration == 2:
            strategy.queue.maybe_finalize_async_calls(blocking=True)
            assert seen == [1, 2]
        weight -= 100
    strategy.close()
    values = []
    for iteration in (1, 2, 3):
        loaded = core.load({"w": state()["w"].without_data()}, str(root / f"iter_{iteration:07d}"), load)
        values.append(loaded["w"].unique().tolist())
    return [seen, values]


def test_saves_in_the_background(tmp_path: Path) -> None:
    for result in run_ranks(_train, 2, tmp_path, timeout=120, imports=IMPORTS):
        assert result.value == [[1, 2, 3], [[1.0], [2.0], [3.0]]]


def _limit_files(queue: Any, limit_bytes: int | None) -> None:
    """Limit the size of files that the writer writes; None: not on this rank."""
    call = None if limit_bytes is None else resource.setrlimit
    limits = (limit_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    queue.schedule_async_request(ckpt.AsyncRequest(call, (resource.RLIMIT_FSIZE, limits), []))
    queue.maybe_finalize_async_calls(blocking=True)


def _fail(rank: int, world_size: int, root: Path) -> list[Any]:
    """Save where the writer of rank 1 cannot write, then elsewhere."""
    core, megatron = _core(), _strategies()
    strategy, seen, errors = megatron.CkptSaveStrategy(timeout=60), list[str](), list[str]()
    for name, limit in (("iter_0000001", 64 << 10), ("iter_0000002", resource.RLIM_INFINITY)):
        _limit_files(strategy.queue, limit if rank == 1 else None)
        tensor = core.ShardedTensor.from_rank_offsets("w", torch.ones(64, 1024), (0, rank, world_size))
        request = core.save({"w": tensor}, _folder(root / name), strategy, async_sharded_save=True)
        request.add_finalize_fn(partial(seen.append, name))
        strategy.queue.schedule_async_request(request)
        errors.append(_raised(lambda: strategy.queue.maybe_finalize_async_calls(blocking=True)))
    strategy.close()
    failed = _raised(lambda: core.load({}, str(root / "iter_0000001"), megatron.CkptLoadStrategy()))
    return [seen, errors, failed]


def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_is_not_loaded(tmp_path: Path) -> None:
    for result in run_ranks(_fail, 2, tmp_path, timeout=120, imports=IMPORTS):
        seen, errors, failed = result.value
        assert seen == ["iter_0000002"]
        assert errors[0].startswith("SaveAbandonedError")
        assert "rank 1" in errors[0]
        assert errors[1] == "nothing"
        assert "is not a distributed checkpoint" in failed
    assert not list((tmp_path / "iter_0000001").glob("step_*"))
    assert not (tmp_path / "iter_0000001" / "metadata.json").exists()


def _fails() -> None:
    raise ValueError("a mistake in another call")


def _share_the_queue(rank: int, world_size: int, root: Path) -> list[Any]:
    """Save while calls of another owner fail in the queue, then where the writer of rank 1 cannot write."""
    core, megatron = _core(), _strategies()
    tensor = core.ShardedTensor.from_rank_offsets("w", torch.ones(64, 1024), (0, rank, world_size))
    with ckpt.AsyncCallsQueue(timeout_s=60) as queue, megatron.CkptSaveStrategy(queue=queue, timeout=60) as strategy:
        for _ in range(2):
            queue.schedule_async_request(ckpt.AsyncRequest(_fails, (), []))
        saved = [_raised(lambda: core.save({"w": tensor}, _folder(root / "iter_0000001"), strategy))]
        theirs = [_raised(lambda: queue.maybe_finalize_async_calls()) for _ in range(3)]
        _limit_files(queue, 64 << 10 if rank == 1 else None)
        queue.schedule_async_request(ckpt.AsyncRequest(_fails, (), []))
        saved.append(_raised(lambda: core.save({"w": tensor}, _folder(root / "iter_0000002"), strategy)))
        theirs += [_raised(lambda: queue.maybe_finalize_async_calls()) for _ in range(2)]
    loaded = core.load({"w": tensor.without_data()}, str(root / "iter_0000001"), megatron.CkptLoadStrategy())
    return [saved, theirs, loaded["w"].unique().tolist()]


def test_a_save_raises_its_own_failure_and_the_queue_those_of_others(tmp_path: Path) -> None:
    for result in run_ranks(_share_the_queue, 2, tmp_path, timeout=120, imports=IMPORTS):
        (first, second), theirs, values = result.value
        assert first == "nothing"
        assert values == [1.0]
        assert second.startswith("SaveAbandonedError")
        assert "rank 1" in second
        assert ["a mistake in another call" in text for text in theirs] == [True, True, False, True, False]
        assert (theirs[2], theirs[4]) == ("nothing", "nothing")
    assert not (tmp_path / "iter_0000002" / "metadata.json").exists()


def _leave(rank: int, world_size: int, root: Path) -> list[int]:
    """End the training with an exception while a save is scheduled."""
    core, megatron = _core(), _strategies()
    folder = _folder(root / "iter_0000007")
    with contextlib.suppress(KeyError), megatron.CkptSaveStrategy(timeout=60) as strategy:
        tensor = core.ShardedTensor.from_rank_offsets("w", torch.ones(2, 4), (0, rank, world_size))
        strategy.queue.schedule_async_request(core.save({"w": tensor}, folder, strategy, async_sharded_save=True))
        raise KeyError("a mistake in the program")
    deadline = time.monotonic() + 60
    while not Path(folder, "step_00000007").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with ckpt.open(folder) as checkpoint:
        return [checkpoint.step, len(checkpoint)]


def test_an_exception_waits_for_nothing_and_loses_nothing_that_is_staged(tmp_path: Path) -> None:
    assert [result.value for result in run_ranks(_leave, 2, tmp_path, timeout=120, imports=IMPORTS)] == [[7, 1]] * 2
    assert not (tmp_path / "iter_0000007" / "metadata.json").exists()


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refusals(rank: int, world_size: int, root: Path) -> dict[str, str]:
    core, megatron = _core(), _strategies()
    tensor, folder = core.ShardedTensor.from_rank_offsets, _folder(root / "run")
    strategy, load = megatron.CkptSaveStrategy(timeout=60), megatron.CkptLoadStrategy()

    def saved(state: Any, **options: Any) -> str:
        return _raised(lambda: core.save(state, folder, strategy, validate_access_integrity=False, **options))

    def loaded(state: Any, where: str = folder) -> str:
        return _raised(lambda: core.load(state, where, load, validate_access_integrity=False))

    flat = tensor("flat", torch.ones(4), replica_id=rank)
    flat.flattened_range = slice(0, 4)
    found = {
        "common": saved({"object": Opaque()}),
        "uncovered": saved({"w": tensor("w", torch.ones(2), (0, 0, 2), replica_id=rank)}),
        "name": saved({"w": tensor("megatron", torch.ones(2), replica_id=rank)}),
        "flat": saved({"w": flat}),
        "array": saved({"text": np.array(["a"])}),
        "bytes": saved({"big": [np.arange(3, dtype=np.dtype(int).newbyteorder())]}),
        "mask": saved({"part": [np.ma.array([1.0, 2.0], mask=[False, True])]}),
        "names": saved({"pairs": {None: torch.zeros(1), "None": torch.ones(1)}}),
    }
    state = {"w": tensor("w", torch.ones(2), replica_id=rank)}
    core.save(state | {"object": core.mapping.ShardedObject("o", Shade.DARK, (1,), (0,), rank)}, folder, strategy)
    request = core.save({"w": state["w"]}, _folder(root / "other"), strategy, async_sharded_save=True)
    theirs = core.strategies.async_utils.AsyncCallsQueue()
    found["queue"] = _raised(lambda: theirs.schedule_async_request(request))
    strategy.queue.schedule_async_request(request)
    strategy.close()
    found |= {
        "missing": loaded({"x": tensor("x", torch.ones(2)), "y": tensor("y", torch.ones(2))}),
        "shape": loaded({"w": tensor("w", torch.ones(3))}),
        "dimensions": loaded({"w": tensor("w", torch.ones(1, 2), allow_shape_mismatch=True)}),
        "object": loaded({"p": core.mapping.ShardedObject("p", None, (1,), (0,))}),
        "enum": loaded({"o": core.mapping.ShardedObject("o", None, (1,), (0,))}),
        "remove": _raised(lambda: load.remove_sharded_tensors(folder, "w")),
        "backend": _raised(lambda: load.check_backend_compatibility("torch_dist")),
        "version": _raised(lambda: load.check_version_compatibility(2)),
    }
    ckpt.register_encoder(Shade)
    again = core.load({"o": core.mapping.ShardedObject("o", None, (1,), (0,), rank)}, folder, load)
    assert again["o"] is Shade.DARK
    return found


_SENTENCES = {
    "common": ("StateError", "megatron/common/object/value", "ckpt.register_encoder"),
    "uncovered": ("StateError", "w"),
    "name": ("StateError", "must not be 'megatron'"),
    "flat": ("StateError", "flattened ranges are not supported", "fully_reshardable or dp_reshardable"),
    "array": ("StateError", "megatron/common/text", "numpy arrays of dtype <U1 cannot be stored"),
    "bytes": ("StateError", "megatron/common/big/0: numpy arrays of dtype", "another byte order) cannot be stored"),
    "mask": (
        "StateError",
        "megatron/common/part/0: numpy arrays with a mask cannot be stored",
        "its data and its mask",
    ),
    "names": ("StateError", "megatron/common/pairs/None", "two tensors or arrays have this name"),
    "queue": ("CheckpointError", "schedule its request on the `queue` of the strategy"),
    "missing": ("CheckpointingException", "x is not there", "y is not there"),
    "shape": ("CheckpointingException", "Global shape mismatch for loaded ((2,)) and expected ((3,))"),
    "dimensions": ("CheckpointingException", "Global shape mismatch"),
    "object": ("CheckpointingException", "the object p/shard_0_1 is not there"),
    "enum": ("StateMismatchError", "Shade", "ckpt.register_encoder"),
    "remove": ("CheckpointingException", "has a published step, which is never changed"),
    "backend": ("CheckpointingException", "has the backend 'torch_dist'", "load it without sharded_strategy"),
    "version": ("CheckpointingException", "has version 2"),
}


def test_what_is_refused_is_refused_by_a_sentence(tmp_path: Path) -> None:
    for result in run_ranks(_refusals, 2, tmp_path, timeout=120, imports=IMPORTS):
        assert result.value.keys() == _SENTENCES.keys()
        for name, (kind, *parts) in _SENTENCES.items():
            text = result.value[name]
            assert text.startswith(f"{kind}: "), (name, text)
            assert all(part in text for part in parts), (name, text)


@pytest.mark.parametrize("place", [("torch", ("y",)), ("torch", 3), ("torch", ([],)), ("other", ("x",))])
def test_a_place_without_a_tensor_is_damage(place: tuple[str, Any], tmp_path: Path) -> None:
    _strategies()
    from ckpt.integrations.megatron_leaves import TensorAt, leaves_of

    ckpt.register_encoder(TensorAt)
    common = {"value": TensorAt(*place), "tensors": {"x": torch.ones(2)}}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"megatron": {"common": {"name": common}}}, 1)
    with (
        ckpt.open(tmp_path) as checkpoint,
        pytest.raises(ckpt.CheckpointCorruptError, match="megatron/common/name/value"),
    ):
        leaves_of(checkpoint).common()
