"""`export`: write tensors of a step as safetensors, in blocks of bounded memory."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ckpt.loading.fetch import Fetch
from ckpt.loading.index import StoredTensor
from ckpt.planning.boxes import Box
from ckpt.storage.chunk_layout import indices
from ckpt.storage.dtypes import stored

from .formats.ckpt_step import TensorLeaf, tensor_leaves, unique_names, value_leaves
from .formats.files import check_outside
from .formats.safetensors import DTYPES, METADATA, NewTensor, write_safetensors
from .output import CannotReadError, Exit, Output, byte_counter, duration, first_few, plural, size
from .step import Step, open_step

__all__ = ["HELP", "add_arguments", "run"]

HELP = "write the tensors of a step as safetensors, in the layout of Hugging Face"

_BLOCK_BYTES = 16 << 20
_SHARD_SIZE = "5GB"
_UNITS = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a step, or a checkpoint root: then its newest step")
    parser.add_argument("directory", metavar="DIR", help="the directory to write to; new or empty")
    parser.add_argument(
        "--to", choices=("safetensors",), default="safetensors", help="the format (default safetensors)"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="convert floating-point tensors, except float8, to this dtype")
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=_size(_SHARD_SIZE),
        metavar="SIZE",
        help=f"largest size of a file (default {_SHARD_SIZE})",
    )
    globs: dict[str, Any] = {"action": "append", "default": [], "metavar": "GLOB"}
    parser.add_argument(
        "--filter", help="write only tensors whose name (as `show` lists it) matches; repeatable", **globs
    )
    parser.add_argument("--exclude", help="leave out tensors whose name matches; repeatable", **globs)
    parser.add_argument(
        "--strip", default="", metavar="PREFIX", help="remove this from the beginning of exported names: 'model.'"
    )
    parser.add_argument(
        "--drop-tied", action="store_true", help="write a tensor that has several names only under the first"
    )


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    with open_step(arguments.path) as step:
        check_outside(arguments.directory, step.path)
        return _run(step, arguments, output)


def _run(step: Step, arguments: argparse.Namespace, output: Output) -> Exit:
    begin = time.perf_counter()
    leaves = _chosen(step, arguments)
    tied = [leaf for leaf in leaves if leaf.alias_of is not None and _first_name_of(leaf, leaves) is not leaf]
    if arguments.drop_tied:
        leaves = [leaf for leaf in leaves if leaf not in tied]
    fetch = Fetch(step.index)
    changes: dict[str, int] = {}
    tensors = [_new(name, leaf, fetch, arguments.dtype, changes) for name, leaf in _named(leaves, step, arguments)]
    total = sum(tensor.nbytes for tensor in tensors)
    with output.meter("export") as meter:
        files = write_safetensors(arguments.directory, tensors, arguments.max_shard_size, byte_counter(meter, total))
    seconds = time.perf_counter() - begin
    what = f"{plural(len(tensors), 'tensor')}, {size(total)}, in {plural(len(files), 'file')}"
    output.line(f"exported {what} to {arguments.directory} ({duration(seconds)})", "bold")
    dropped = [leaf.label for leaf in value_leaves(step.index)]
    if dropped:
        output.line(f"left out {plural(len(dropped), 'value')} that safetensors cannot hold: {first_few(dropped)}")
    if tied:
        how = "left out" if arguments.drop_tied else "written with their own data (--drop-tied leaves them out)"
        output.line(f"further names of tied tensors were {how}: {first_few([leaf.label for leaf in tied])}")
    for name, count in changes.items():
        output.line(f"{name}: {plural(count, 'finite element')} became Inf in {_DTYPES[arguments.dtype]}", "yellow")
    output.json(
        {
            "path": step.path,
            "directory": arguments.directory,
            "files": files,
            "tensors": len(tensors),
            "bytes": total,
            "left_out": dropped,
            "tied": [leaf.label for leaf in tied],
            "became_inf": changes,
        }
    )
    return Exit.WHOLE


def _chosen(step: Step, arguments: argparse.Namespace) -> list[TensorLeaf]:
    """Return the chosen leaves by name, with numbers in names in numerical order."""
    leaves = tensor_leaves(step.index)
    by_label = replace(step, tensors={leaf.label: leaf.tensor for leaf in leaves})
    wanted = set(by_label.select(arguments.filter)) if arguments.filter else set(by_label.tensors)
    wanted -= set(by_label.select(arguments.exclude)) if arguments.exclude else set()
    chosen = [leaf for leaf in leaves if leaf.label in wanted]
    if not chosen:
        raise CannotReadError(f"{step.path}: there is no tensor to export")
    return sorted(chosen, key=lambda leaf: [(int(p), "") if p.isdecimal() else (-1, p) for p in _parts(leaf.label)])


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


def _first_name_of(leaf: TensorLeaf, leaves: list[TensorLeaf]) -> TensorLeaf:
    """Of the chosen leaves with the data of `leaf`, return the original, or else the first."""
    group = [other for other in leaves if other.tensor is leaf.tensor]
    return next((other for other in group if other.alias_of is None), group[0])


def _named(leaves: list[TensorLeaf], step: Step, arguments: argparse.Namespace) -> list[tuple[str, TensorLeaf]]:
    """Return the leaves with their new names. CannotReadError for a name or dtype that safetensors do not allow."""
    named = unique_names(((leaf.dotted.removeprefix(arguments.strip), leaf) for leaf in leaves), step.path)
    if arguments.strip and not any(leaf.dotted.startswith(arguments.strip) for leaf in leaves):
        raise CannotReadError(f"no name begins with {arguments.strip!r}; the first is {leaves[0].dotted!r}")
    for name, leaf in named.items():
        if leaf.tensor.dtype not in DTYPES:
            raise CannotReadError(
                f"{leaf.label} is of dtype {leaf.tensor.dtype}, which safetensors do not have; leave it out with "
                f"--exclude {leaf.label!r}, or save it in another dtype"
            )
        if name in ("", METADATA):
            raise CannotReadError(f"{leaf.label} would be named {name!r}, which safetensors do not allow; --exclude it")
    return list(named.items())


def _new(name: str, leaf: TensorLeaf, fetch: Fetch, dtype: str | None, changes: dict[str, int]) -> NewTensor:
    source = leaf.tensor.dtype
    target = _DTYPES[dtype] if dtype and source in _FLOATS else source
    return NewTensor(name, target, leaf.tensor.shape, partial(_blocks, leaf, fetch, source, target, changes))


def _blocks(
    leaf: TensorLeaf, fetch: Fetch, source: str, target: str, changes: dict[str, int]
) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    for box in _runs(leaf.tensor):
        block = fetch.array(leaf.label, leaf.tensor, box)
        if source == target:
            yield block
            continue
        with np.errstate(all="ignore"):
            converted = block.astype(_numpy_dtype(target))
        if target != "float32" or source == "float64":
            lost = int(np.count_nonzero(np.isfinite(block) & ~np.isfinite(converted)))
            if lost:
                changes[leaf.label] = changes.get(leaf.label, 0) + lost
        yield converted


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def _runs(tensor: StoredTensor) -> Iterator[Box]:
    """Cut a tensor into boxes of some MB at most, one after the other in C order.

    They end between the chunks of the stored tensor where that is possible, so that no chunk is read twice.
    """
    shape = tensor.shape
    itemsize = stored(tensor.dtype).itemsize
    if 0 in shape:
        return
    row_bytes = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    cut = next((dim for dim, size in enumerate(row_bytes) if size <= _BLOCK_BYTES), len(shape))
    if cut == len(shape):
        yield Box.whole(shape)
        return
    rows = max(1, _BLOCK_BYTES // row_bytes[cut])
    meta = tensor.boxes[0].meta
    unit = (meta.inner_chunk_shape or meta.chunk_shape)[cut]
    rows = rows // unit * unit or rows
    for lead in indices(list(map(range, shape[:cut]))):
        for start in range(0, shape[cut], rows):
            count = min(rows, shape[cut] - start)
            yield Box((*lead, start, *(0 for _ in shape[cut + 1 :])), (*(1 for _ in lead), count, *shape[cut + 1 :]))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B|)", text.strip().upper())
    number = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MiB")
    return number
