"""The half of `convert` that makes a torch.distributed.checkpoint directory out of a step of ours."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from ..opening import CannotReadError, Step
from ..output import Exit, Output, duration, plural, size
from .command import counting, listed
from .compare import different_tensors, names_differ, report, same_value
from .nesting import dcp_leaves
from .ours import Leaf, LeafReader, dotted, tensor_leaves, unique_names, value_leaves
from .state import UnsafeError

__all__ = ["step_to_dcp"]

Values = dict[str, tuple[tuple[str | int, ...], Any]]
"""By dotted name: the keys that lead to a value, and the value."""


def step_to_dcp(step: Step, arguments: argparse.Namespace, output: Output) -> Exit:
    """Write the step to `arguments.target`, say what was done, and compare. CannotReadError, StorageError."""
    from .dcp_writer import write_dcp

    begin = time.perf_counter()
    leaves = tensor_leaves(step)
    tensors = unique_names(((leaf.dotted, leaf) for leaf in leaves), step.path)
    values, notes = _dcp_values(step, tensors)
    tied = [leaf.label for leaf in leaves if leaf.alias_of is not None]
    if tied:
        notes.append(f"tied tensors were written once for each name: {listed(tied)}")
    reader = LeafReader(step, leaves)
    total = sum(leaf.nbytes for leaf in leaves)
    with output.meter("convert") as meter:
        write_dcp(arguments.target, tensors, values, reader, counting(meter, total))
    seconds = time.perf_counter() - begin
    what = f"{plural(len(tensors), 'tensor')}, {plural(len(values), 'value')}, {size(total)}"
    output.line(f"converted {what} from {step.path} to {arguments.target} ({duration(seconds)})", "bold")
    for note in notes:
        output.line(note)
    problems = None
    if not arguments.no_verify:
        with output.meter("verify") as meter:
            problems = _verify_dcp(arguments.target, tensors, values, reader, counting(meter, total))
    return report(arguments, arguments.target, problems, notes, output)


def _dcp_values(step: Step, tensors: dict[str, Leaf]) -> tuple[Values, list[str]]:
    """The values by dotted name, flattened as torch does it, with their keys; and what to say about the others."""
    from .torch_state import loads_without_code

    values: Values = {}
    empty, own, unsafe = [], [], []
    for leaf in value_leaves(step):
        if leaf.rank is not None:
            own.append(leaf.label)
            found: list[tuple[tuple[str | int, ...], Any]] = [((leaf.dotted,), leaf.value)]
        else:
            found = list(dcp_leaves(tuple(map(str, leaf.path)), leaf.value))
            if not found:
                empty.append(leaf.label)
        for keys, value in found:
            name = dotted(keys)
            if not loads_without_code(value):
                unsafe.append(f"{leaf.label} ({type(value).__name__})")
                continue
            if name in values or name in tensors:
                raise CannotReadError(f"{step.path}: two leaves would both be named {name!r}")
            values[name] = (keys, value)
    notes = [f"left out, because DCP has no form of an empty dict: {listed(empty)}"] if empty else []
    if unsafe:
        notes.append(f"left out, because torch.load(weights_only=True) does not load them: {listed(unsafe)}")
    own += [leaf.label for leaf in tensors.values() if leaf.rank is not None]
    if own:
        notes.append(f"what belongs to single ranks is under the names that `show` lists: {listed(own)}")
    return values, notes


def _verify_dcp(
    path: str,
    tensors: dict[str, Leaf],
    values: Values,
    reader: LeafReader,
    progress: Callable[[int], None],
) -> list[str]:
    from .dcp_reader import open_dcp

    opened = open_dcp(path, False)
    problems = names_differ({*tensors, *values}, {*opened.tensors, *opened.objects})
    for name, (_, value) in values.items():
        try:
            if name in opened.objects and not same_value(value, opened.load_object(name)):
                problems.append(f"{name} is {value!r} here, another value there")
        except UnsafeError as error:
            problems.append(f"{name}: {error}")
    pairs = [(leaf, opened.tensors[name]) for name, leaf in tensors.items() if name in opened.tensors]
    return problems + different_tensors(reader, pairs, progress)
