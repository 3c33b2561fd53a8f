"""How each format is written, and read again to be compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.errors import ConversionError
from ckpt.exporting.options import ExportForm, Format
from ckpt.exporting.selection import NewValue, Selection, dotted, same_value
from ckpt.formats.lazy_state import FileTensor, NewTensor
from ckpt.formats.safetensors import DTYPES, METADATA, open_directory, write_safetensors
from ckpt.paths import Path

if TYPE_CHECKING:
    from ckpt.formats.dcp_writer import Values


Count = Callable[[int], None]
"""Called with the bytes done since the last call."""


@dataclass(frozen=True)
class Written:
    """The files of an export. `differences` reads them again, and returns a line for each leaf that differs."""

    files: list[str]
    left_out: list[str]
    notes: list[str]
    differences: Callable[[Count], list[str]]


# -- safetensors -------------------------------------------------------------------------------------------------------


def _write_safetensors(target: str, selection: Selection, form: ExportForm, count: Count) -> Written:
    if not selection.tensors:
        raise ConversionError(f"there is no tensor to export to {target}")
    _check_unique(selection.tensors)
    for tensor in selection.tensors:
        if tensor.dtype not in DTYPES:
            raise ConversionError(
                f"{tensor.label} is of dtype {tensor.dtype}, which safetensors do not have; exclude "
                f"{tensor.label!r}, or save it in another dtype"
            )
        if tensor.name in ("", METADATA):
            raise ConversionError(
                f"{tensor.label} would be named {tensor.name!r}, which safetensors do not allow; exclude it"
            )
    beside = {} if form.config is None else form.config.read()
    files = write_safetensors(target, selection.tensors, int(form.max_shard_size), count, beside)

    def differences(count: Count) -> list[str]:
        state = open_directory(target, follow_links=False)
        return _different_tensors(selection.tensors, lambda tensor: state.tensors.get((tensor.name,)), count)

    return Written(files, [value.label for value in selection.values], _rank_note(selection), differences)


# -- torch's formats ---------------------------------------------------------------------------------------------------


def _write_torch(target: str, selection: Selection, form: ExportForm, count: Count) -> Written:
    from ckpt.formats.torch_file import loads_without_code, open_torch_file
    from ckpt.formats.torch_writer import loadable, write_torch_file

    unsafe = [value for value in selection.values if not loads_without_code(value.value)]
    values = {value.keys: value.value for value in selection.values if value not in unsafe}
    containers = loadable(selection.containers)
    replaced = sorted({each.kind for path, each in selection.containers.items() if containers.get(path) != each})
    if selection.ranked:
        containers.pop((), None)  # a dict has room for their names
    write_torch_file(target, selection.tensors, values, containers, count)
    notes = _rank_note(selection) + _left_out_note(unsafe)
    if replaced:
        notes.append(f"torch.load(weights_only=True) does not load containers of these kinds: {', '.join(replaced)}")

    def differences(count: Count) -> list[str]:
        state = open_torch_file(target, skip_unsafe=False)
        problems = _different_values({dotted(keys): (keys, value) for keys, value in values.items()}, state.values)
        return problems + _different_tensors(
            selection.tensors, lambda tensor: state.tensors.get(state.aliases.get(tensor.keys, tensor.keys)), count
        )

    return Written([os.path.basename(target)], [value.label for value in unsafe], notes, differences)


def _write_dcp(target: str, selection: Selection, form: ExportForm, count: Count) -> Written:
    from ckpt.formats.dcp_reader import open_dcp
    from ckpt.formats.dcp_writer import write_dcp

    _check_unique(selection.tensors)
    values, left_out, notes = _dcp_values(selection)
    files = write_dcp(target, selection.tensors, values, count)

    def differences(count: Count) -> list[str]:
        opened = open_dcp(target, follow_links=False)
        loaded = {values[name][0]: opened.load_object(name) for name in opened.objects if name in values}
        return _different_values(values, loaded) + _different_tensors(
            selection.tensors, lambda tensor: opened.tensors.get(tensor.name), count
        )

    return Written(files, left_out, notes + _rank_note(selection), differences)


def _dcp_values(selection: Selection) -> tuple[Values, list[str], list[str]]:
    """Return the values to write, flattened as DCP does it; the names of those left out; and notes about them."""
    from ckpt.formats.dcp_writer import flat_values
    from ckpt.formats.torch_file import loads_without_code

    names = {tensor.name for tensor in selection.tensors}
    values: Values = {}
    empty: list[str] = []
    unsafe: list[NewValue] = []
    for leaf in selection.values:
        found: Iterator[tuple[Path, Any]] = iter([(leaf.keys, leaf.value)])
        if leaf.rank is None:
            found = flat_values(tuple(map(str, leaf.keys)), leaf.value)
        items = list(found)
        if not items:
            empty.append(leaf.label)
        for keys, value in items:
            name = dotted(keys)
            if not loads_without_code(value):
                unsafe += [leaf] if leaf not in unsafe else []
                continue
            if name in values or name in names:
                raise ConversionError(f"two leaves would both be named {name!r}; exclude one, or rename it in the job")
            values[name] = (keys, value)
    notes = [f"left out, because DCP cannot represent an empty dict: {first_few(empty)}"] if empty else []
    return values, empty + [leaf.label for leaf in unsafe], notes + _left_out_note(unsafe)


WRITERS: Mapping[Format, Callable[[str, Selection, ExportForm, Count], Written]] = MappingProxyType(
    {"safetensors": _write_safetensors, "hf": _write_safetensors, "torch": _write_torch, "dcp": _write_dcp}
)
"""Write a selection to a target, in each format. ConversionError, StorageError, and what reading the step raises."""


# -- shared ------------------------------------------------------------------------------------------------------------


def _check_unique(tensors: list[NewTensor]) -> None:
    """ConversionError if two tensors have the same name."""
    taken: dict[str, NewTensor] = {}
    for tensor in tensors:
        other = taken.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise ConversionError(
                f"{other.label} {other.keys} and {tensor.label} {tensor.keys} would both be named {tensor.name!r}; "
                "exclude one, or rename it in the job"
            )


def _rank_note(selection: Selection) -> list[str]:
    if not selection.ranked:
        return []
    return [f"what belongs to single ranks has their number in its name: {first_few(selection.ranked)}"]


def _left_out_note(values: list[NewValue]) -> list[str]:
    shown = [f"{value.label} ({type(value.value).__name__})" for value in values]
    return [f"left out, because torch.load(weights_only=True) does not load them: {first_few(shown)}"] if shown else []


def first_few(names: list[str]) -> str:
    """List the first names, and say how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _different_values(values: Values, there: Mapping[Path, Any]) -> list[str]:
    return [
        f"{name} is another value there"
        for name, (keys, value) in values.items()
        if keys not in there or not same_value(value, there[keys])
    ]


def _different_tensors(
    tensors: list[NewTensor], find: Callable[[NewTensor], FileTensor | None], count: Count
) -> list[str]:
    """Compare tensors with those that were written, in blocks."""
    problems = []
    for tensor in tensors:
        other = find(tensor)
        if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            problems.append(f"{tensor.label} is not there, or of another dtype or shape")
            continue
        for box, block in tensor.blocks():
            there = np.empty((*box.shape, other.itemsize), np.uint8)
            other.read(box, there)
            count(there.nbytes)
            here = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            if not np.array_equal(here, there.reshape(-1)):
                problems.append(f"{tensor.label} differs in the box at {list(box.offset)} of {list(box.shape)}")
                break
    return problems
