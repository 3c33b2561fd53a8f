"""`export`: write a step as safetensors, for transformers, as a file of torch.save, or as a DCP directory."""

from __future__ import annotations

import argparse
import time
from typing import Any, get_args

from ckpt.exporting.export import Exported, export
from ckpt.exporting.options import DTYPES, Format, byte_count
from ckpt.storage.roots import is_object_url

from .output import Exit, Output, duration, first_few, plural, size
from .step import add_step, at_step, step_number, step_path

HELP = "write a step as safetensors, for transformers, torch.load, or torch.distributed.checkpoint"

_SHARD_SIZE = "5GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a step, or a checkpoint root: then its newest step")
    parser.add_argument("target", metavar="TARGET", help="a new or empty directory; with --to torch a new file")
    add_step(parser, option=True)
    parser.add_argument(
        "--to",
        choices=get_args(Format),
        default="safetensors",
        help="safetensors (default); hf: for from_pretrained of transformers; torch: a file for torch.load; dcp: for "
        "torch.distributed.checkpoint",
    )
    parser.add_argument(
        "--prefix",
        metavar="KEY",
        help="export only what is below this key, and name it without it: model (the default of hf)",
    )
    globs: dict[str, Any] = {"action": "append", "default": [], "metavar": "GLOB"}
    parser.add_argument(
        "--filter", help="write only what has a name (as `show` lists it) that matches; repeatable", **globs
    )
    parser.add_argument("--exclude", help="leave out what has a name that matches; repeatable", **globs)
    parser.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors, except float8, to this dtype")
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=_size(_SHARD_SIZE),
        metavar="SIZE",
        help=f"largest size of a file (default {_SHARD_SIZE})",
    )
    parser.add_argument(
        "--drop-tied",
        action=argparse.BooleanOptionalAction,
        help="write a tensor that has several names only under the first (the default of hf)",
    )
    parser.add_argument("--config", metavar="DIR", help="hf: copy the files of configuration and tokenizer from here")
    parser.add_argument("--no-verify", action="store_true", help="do not read both sides again to compare them")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    begin = time.perf_counter()
    step = arguments.step
    if step is not None:
        at_step(arguments.path, step)  # or an error says which steps there are
    elif not is_object_url(arguments.path) and (where := step_path(arguments.path)) != arguments.path:
        step = step_number(where)
    with output.meter("export") as meter:
        exported = export(
            arguments.path,
            arguments.target,
            arguments.to,
            step=step,
            prefix=arguments.prefix,
            filter=arguments.filter,
            exclude=arguments.exclude,
            dtype=arguments.dtype,
            drop_tied=arguments.drop_tied,
            max_shard_size=arguments.max_shard_size,
            config=arguments.config,
            verify=not arguments.no_verify,
            progress=meter,
        )
    _print(exported, arguments, time.perf_counter() - begin, output)
    return Exit.WHOLE


def _print(exported: Exported, arguments: argparse.Namespace, seconds: float, output: Output) -> None:
    parts = [plural(exported.tensors, "tensor"), size(exported.bytes)]
    parts[1:1] = [plural(exported.values, "value")] if exported.values else []
    what = f"{', '.join(parts)}, in {plural(len(exported.files), 'file')}"
    output.line(f"exported {what} to {exported.target} ({duration(seconds)})", "bold")
    if exported.left_out:
        left_out = plural(len(exported.left_out), "value")
        output.line(f"left out {left_out} that {arguments.to} cannot hold: {first_few(exported.left_out)}")
    if exported.tied:
        dropped = arguments.to == "hf" if arguments.drop_tied is None else arguments.drop_tied
        how = "left out" if dropped else "written, too (--drop-tied leaves them out)"
        output.line(f"further names of tied tensors were {how}: {first_few(exported.tied)}")
    for name, count in exported.became_inf.items():
        output.line(f"{name}: {plural(count, 'finite element')} became Inf in {DTYPES[arguments.dtype]}", "yellow")
    for note in exported.notes:
        output.line(note)
    if not arguments.no_verify:
        output.line("verified: both sides were read again, all bits are equal", "green")
    output.json(
        {
            "path": exported.path,
            "target": exported.target,
            "format": arguments.to,
            "files": exported.files,
            "tensors": exported.tensors,
            "values": exported.values,
            "bytes": exported.bytes,
            "left_out": exported.left_out,
            "tied": exported.tied,
            "became_inf": exported.became_inf,
            "notes": exported.notes,
            "verified": not arguments.no_verify,
        }
    )


def _size(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
