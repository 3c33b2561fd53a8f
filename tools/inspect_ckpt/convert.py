"""`convert`: another format into a step of ours, or a step of ours into a torch.distributed.checkpoint directory.

Streams both ways, publishes as every save does, and then compares both sides bit by bit.
"""

from __future__ import annotations

import argparse
import os
import stat
import time

from ckpt.paths import Path, display
from ckpt.storage.root import CheckpointRoot

from .foreign.command import check_outside, counting
from .foreign.compare import different_tensors, names_differ, report, same_value
from .foreign.ours import LeafReader, tensor_leaves
from .foreign.safetensors_reader import is_safetensors_directory, looks_like_safetensors, open_directory, open_file
from .foreign.state import ForeignState
from .foreign.to_dcp import step_to_dcp
from .foreign.to_step import write_step
from .opening import CannotReadError, open_step, root_of, step_path
from .output import Exit, Output, duration, plural, size

__all__ = ["HELP", "add_arguments", "run"]

HELP = "make a step out of torch.distributed.checkpoint, torch.save or safetensors, or a DCP directory out of a step"

_SAFETENSORS = ".safetensors"
_STEPS = 10**18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="FROM",
        help="a torch.distributed.checkpoint directory, a torch.save file, a safetensors file or directory; with "
        "--to dcp a step of ours, or a root: then its newest step",
    )
    parser.add_argument("target", metavar="TO", help="a checkpoint root, new or not; with --to dcp a new directory")
    parser.add_argument("--to", choices=("ckpt", "dcp"), default="ckpt", help="what TO becomes (default ckpt)")
    parser.add_argument("--step", type=_step, default=0, metavar="N", help="the number of the new step (default 0)")
    parser.add_argument("--under", default="", metavar="KEY", help="put the state under this key: model, or a/b")
    parser.add_argument("--string-keys", action="store_true", help="DCP: keys that read like numbers stay strings")
    parser.add_argument("--skip-unsafe", action="store_true", help="leave out what only running code could load")
    parser.add_argument("--follow-links", action="store_true", help="read files that are links out of FROM")
    parser.add_argument("--no-verify", action="store_true", help="do not read both sides again to compare them")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    if arguments.to == "dcp":
        if _kind(arguments.source) != "ckpt":
            raise CannotReadError(f"{arguments.source} is no step of ours; --to dcp converts these only")
        with open_step(arguments.source) as step:
            check_outside(arguments.target, step.path)
            return step_to_dcp(step, arguments, output)
    return _to_step(arguments, output)


def _kind(path: str) -> str:
    """What is at `path`: dcp, torch, safetensors, safetensors-directory, or ckpt.

    CannotReadError, NotPublishedError.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CannotReadError(f"{path}: there is no such file or directory") from None
    except ValueError as error:
        raise CannotReadError(f"{path!r}: {error}") from None
    if stat.S_ISDIR(status.st_mode):
        if os.path.lexists(os.path.join(path, ".metadata")):
            return "dcp"
        if is_safetensors_directory(path) and not os.path.lexists(os.path.join(path, "zarr.json")):
            return "safetensors-directory"
        step_path(path)
        return "ckpt"
    if not stat.S_ISREG(status.st_mode):
        raise CannotReadError(f"{path} is neither a file nor a directory")
    with open(path, "rb") as stream:
        start = stream.read(16)
    if path.endswith(_SAFETENSORS) or looks_like_safetensors(start):
        return "safetensors"
    if start[:4] == b"PK\3\4" or start[:1] == b"\x80":
        return "torch"
    hint = "; give the directory that it is in" if path.endswith((".index.json", ".metadata", ".distcp")) else ""
    raise CannotReadError(f"{path} is neither a safetensors file nor one of torch.save{hint}")


def _open(arguments: argparse.Namespace) -> ForeignState:
    path = arguments.source
    match _kind(path):
        case "safetensors":
            return open_file(path)
        case "safetensors-directory":
            return open_directory(path, arguments.follow_links)
        case "torch":
            from .foreign.torch_file import open_torch_file

            return open_torch_file(path, arguments.skip_unsafe)
        case "dcp":
            from .foreign.dcp_reader import open_dcp, state_of_dcp

            opened = open_dcp(path, arguments.follow_links)
            return state_of_dcp(opened, string_keys=arguments.string_keys, skip_unsafe=arguments.skip_unsafe)
    raise CannotReadError(f"{path} is a checkpoint of ours; --to dcp converts it, `export` writes safetensors")


def _to_step(arguments: argparse.Namespace, output: Output) -> Exit:
    begin = time.perf_counter()
    state = _open(arguments)
    check_outside(arguments.target, arguments.source)
    root = _root(arguments.target, arguments.step)
    if arguments.under:
        state = state.under(_prefix(arguments.under))
    with output.meter("convert") as meter:
        path = write_step(state, root, arguments.step, counting(meter, state.nbytes))
    seconds = time.perf_counter() - begin
    what = f"{plural(len(state.tensors), 'tensor')}, {plural(len(state.values), 'value')}, {size(state.nbytes)}"
    output.line(f"converted {what} from {state.kind} to {path} ({duration(seconds)})", "bold")
    for note in state.notes:
        output.line(note)
    problems = None if arguments.no_verify else _verify_step(path, state, output)
    return report(arguments, path, problems, state.notes, output)


def _root(path: str, step: int) -> str:
    """CannotReadError if there is no place at `path` for the step."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise CannotReadError(f"{path} is a file; give a checkpoint root, or a new directory")
    if os.path.isdir(path) and os.listdir(path):
        root_of(path)
    if os.path.lexists(CheckpointRoot(path).step_path(step)):
        raise CannotReadError(f"step {step} is already in {path}; give another --step")
    return path


def _prefix(text: str) -> Path:
    if "" in (keys := text.split("/")):
        raise CannotReadError(f"--under {text!r}: a key is empty")
    return tuple(keys)


def _verify_step(path: str, state: ForeignState, output: Output) -> list[str]:
    with open_step(path) as step, output.meter("verify") as meter:
        leaves = {leaf.path: leaf for leaf in tensor_leaves(step) if leaf.alias_of is None}
        problems = names_differ({*leaves, *step.index.values}, {*state.tensors, *state.values})
        if step.index.aliases != state.aliases:
            problems.append("the tied names are not the same")
        for name, value in state.values.items():
            if name in step.index.values and not same_value(step.index.values[name], value):
                problems.append(f"{display(name)} is {step.index.values[name]!r} here, {value!r} there")
        pairs = [(leaf, state.tensors[name]) for name, leaf in leaves.items() if name in state.tensors]
        reader = LeafReader(step, [leaf for leaf, _ in pairs])
        return problems + different_tensors(reader, pairs, counting(meter, state.nbytes))


def _step(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1
    if not 0 <= number < _STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step number")
    return number
