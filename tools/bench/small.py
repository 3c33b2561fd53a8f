"""CPU that a save takes of the thread that trains: of many small tensors in several forms, beside one of their bytes.

One rank. All forms are saved in each round, and before each save the caches are filled with something else, as by a
training step. The first saves of a form, which name its tensors, do not count.
"""

import argparse
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ckpt import Checkpointer
from tools.bench.harness import (
    Row,
    add_disk_option,
    at_least,
    milliseconds,
    print_report,
    rounds,
    temporary_folder,
    write_json,
)
from tools.bench.workload import make_many_small, make_one_large

_CACHE_BYTES = 100_000_000  # more than a processor has
_WIDTH = 1024  # elements of a small tensor, in float32
_TARGET = 2.0
_SAVES_BEFORE = 3


def _in_threes(count: int) -> Any:
    tensors = iter(make_many_small(count)["model"].values())
    return {
        number: dict(zip("abc", each, strict=True)) for number, each in enumerate(zip(*[tensors] * 3, strict=False))
    }


def _module(count: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, 1, bias=False) for _ in range(count)))


def _sharded_module(count: int) -> torch.nn.Module:
    """Return a module of FSDP2, with ten tensors in a group."""
    layers = _module(count)
    model = torch.nn.Sequential(*(layers[at : at + 10] for at in range(0, count, 10)))
    for group in model:
        sharded = fully_shard(group)
        sharded.unshard()  # as a forward pass does: from then on there are hooks
        sharded.reshard()
    fully_shard(model)
    return model


def _with_optimizer(count: int, make: Callable[[int], torch.nn.Module]) -> Any:
    """Return a quarter as many parameters. Each has two moments, and a count of steps."""
    model = make(count // 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


_FORMS: MappingProxyType[str, Callable[[int], Any]] = MappingProxyType(
    {
        "one tensor": make_one_large,
        "one dict": make_many_small,
        "dicts of three": _in_threes,
        "a module for each": lambda count: {"model": _module(count)},
        "a module for every fourth, and AdamW": lambda count: _with_optimizer(count, _module),
        "the same, sharded by FSDP2": lambda count: _with_optimizer(count, _sharded_module),
    }
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    parser.add_argument("--count", type=at_least(8), default=10_000, help="tensors of 4 KiB (default: 10,000)")
    parser.add_argument("--rounds", type=at_least(1), default=9, metavar="N", help="rounds that count (default: 9)")
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure in rounds, and print a table."""
    torch.set_num_threads(1)  # so that all work is done by this thread
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        _measure(options)
    finally:
        dist.destroy_process_group()


def _measure(options: argparse.Namespace) -> None:
    states = {name: make(options.count) for name, make in _FORMS.items()}
    taken: dict[str, list[float]] = {name: [] for name in states}
    with temporary_folder(options.folder) as folder:
        savers = {name: Checkpointer(folder / str(number), keep=1) for number, name in enumerate(states)}
        caches = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
        for step, counts in enumerate(rounds(options.rounds + _SAVES_BEFORE - 1)):
            for name, state in states.items():
                caches.add_(1)
                seconds = _saved(savers[name], state, step)
                if counts and step >= _SAVES_BEFORE:
                    taken[name].append(seconds)
        for saver in savers.values():
            saver.close()
    one, *others = _FORMS
    rows = [Row(one, taken[one], show=_shown)]
    rows += [Row(name, taken[name], taken[one], _TARGET, _shown) for name in others]
    print_report(f"CPU of a save of {options.count} tensors of 4 KiB; ratio: to one tensor of the same bytes", rows)
    write_json(options.json, {"rows": rows})


def _saved(saver: Checkpointer, state: Any, step: int) -> float:
    """Return the CPU seconds of this thread until training goes on."""
    begin = time.thread_time()
    saver.async_save(state, step)
    seconds = time.thread_time() - begin
    saver.maybe_finalize(blocking=True)
    return seconds


def _shown(seconds: float) -> str:
    return milliseconds(seconds, 1)
