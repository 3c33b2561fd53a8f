"""Saves with and without compression, in turns: size, processor time of all processes, stall, and restores.

The state is that of a small language model which this trains first, as random numbers compress otherwise. One rank.
"""

import argparse
import gc
import json
import sysconfig
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch

from ckpt import Checkpointer, Compression, Staging
from tools.bench.harness import (
    Row,
    add_disk_option,
    add_size_options,
    at_least,
    print_report,
    rounds,
    temporary_folder,
    write_json,
)
from tools.bench.workload import PARTS, State, size_of, tensors

_OPTIONS: dict[str, Compression | None] = {
    "none": None,
    "zstd": Compression("zstd"),
    "lz4": Compression("lz4"),
    "zstd, no shuffle": Compression("zstd", shuffle="none"),
}
_TARGETS = {"zstd": {"cpu to save": 1.8, "cpu to restore": 1.0}}
_SETTLE_S = 0.5  # what was removed is deleted beside training
_CONTEXT, _BATCH, _WIDTH = 64, 4, 512
_BYTES_PER_PARAMETER = 2 + 3 * 4

_Figures = dict[tuple[str, str], list[float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add_size_options(parser, rounds=5)
    add_disk_option(parser)
    help_text = "training steps before it is saved (default: 30)"
    parser.add_argument("--steps", type=at_least(1), default=30, metavar="N", help=help_text)


def run(options: argparse.Namespace) -> None:
    """Train, measure in rounds, and print a table."""
    state = _trained_state(1e9 * options.gb, options.steps)
    nbytes = size_of(tensors(state))
    figures: _Figures = defaultdict(list)
    with temporary_folder(options.folder) as folder, ExitStack() as stack:
        savers = {
            name: stack.enter_context(Checkpointer(folder / name, keep=2, staging=Staging(compression=how)))
            for name, how in _OPTIONS.items()
        }
        for saver in savers.values():
            saver.warmup(state)
        for number, counts in enumerate(rounds(options.rounds)):
            for name in reversed(savers) if number % 2 else savers:
                for what, value in _turn(savers[name], folder / name, state, nbytes, 5 * number).items():
                    figures[name, what] += [value] if counts else []
    title = f"{nbytes / 1e9:.2f} GB of a model after {options.steps} steps of AdamW, {options.rounds} rounds"
    rows = _rows(figures)
    print_report(f"{title}; ratio: to no compression in the same round; targets of processor time: absolute", rows)
    write_json(options.json, {"rows": rows, "bytes": nbytes})


def _turn(checkpointer: Checkpointer, root: Path, state: State, nbytes: int, step: int) -> dict[str, float]:
    """Return the figures of one option: processor seconds per GB, seconds, and the size."""
    figures: dict[str, float] = {}
    gc.collect()
    before, begin = _processor_seconds(), time.perf_counter()
    checkpointer.async_save(state, step + 1)
    figures["stall, no save in flight"] = time.perf_counter() - begin
    checkpointer.maybe_finalize(blocking=True)
    figures["durable"] = time.perf_counter() - begin
    time.sleep(_SETTLE_S)
    figures["cpu to save"] = (_processor_seconds() - before) / nbytes * 1e9
    figures["size"] = sum(file.stat().st_size for file in root.glob(f"step_{step + 1:08d}/packs/*/*")) / nbytes
    for later in (2, 3, 4):  # there are two slots, so the third one waits for the first
        checkpointer.async_save(state, step + later)
    checkpointer.maybe_finalize(blocking=True)
    figures["stall, a save in flight"] = _times(root, step + 3)["stage_s"]
    figures["wait for a slot, two saves in flight"] = _times(root, step + 4)["wait_s"]
    time.sleep(_SETTLE_S)
    with Checkpointer(root, read_only=True) as reader:
        before, begin = _processor_seconds(), time.perf_counter()
        reader.restore(state)
        figures["restore"] = time.perf_counter() - begin
        figures["cpu to restore"] = (_processor_seconds() - before) / nbytes * 1e9
    return figures


def _times(root: Path, step: int) -> dict[str, float]:
    part = root / f"step_{step:08d}" / "parts" / "000" / "rank_00000.json"
    times: dict[str, float] = json.loads(part.read_bytes())["times"]
    return times


def _processor_seconds() -> float:
    """Return the processor time of this process and all below it, ended threads included."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _rows(figures: _Figures) -> list[Row]:
    rows = []
    for (name, what), values in figures.items():
        base = figures["none", what]
        show = (lambda value: f"{value:.3f}") if what == "size" else (lambda value: f"{value:.2f} s")
        if what.startswith("stall"):
            target, limits = 1.1 if name != "none" else None, base
        else:
            target = _TARGETS.get(name, {}).get(what)
            limits = base if target is None else [1.0] * len(values)
        unit = " per GB" if what.startswith("cpu") else ""
        rows.append(Row(f"{name}: {what}{unit}", values, limits, target, show))
    return rows


# -- the state ---------------------------------------------------------------------------------------------------------


class _LanguageModel(torch.nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, _WIDTH)
        self.places = torch.nn.Parameter(0.02 * torch.randn(_CONTEXT, _WIDTH))
        layer = torch.nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(_WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(_CONTEXT)
        logits: torch.Tensor = self.head(self.layers(self.bytes(text) + self.places, mask, is_causal=True))
        return logits


def _trained_state(total_bytes: float, steps: int) -> State:
    """Return the state of mixed-precision training of about `total_bytes`, on the sources of Python's library."""
    torch.manual_seed(0)
    per_layer = 12 * _WIDTH**2 * _BYTES_PER_PARAMETER
    model = _LanguageModel(max(1, round(total_bytes / per_layer)))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - _CONTEXT - 1, (_BATCH,)).tolist()
        text = torch.stack([data[start : start + _CONTEXT + 1] for start in starts]).long()
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state: State = {part: {} for part in PARTS}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        state["model"][name] = parameter.detach().to(PARTS["model"])
        state["master"][name] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment][name] = moments[moment]
    return state
