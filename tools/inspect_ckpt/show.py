"""`show`: list the tensors, values and aliases of a step."""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.formats.foreign_state import open_foreign
from ckpt.formats.lazy_state import LazyState
from ckpt.loading.index import StoredTensor
from ckpt.paths import display
from ckpt.storage.dtypes import stored
from ckpt.storage.roots import is_object_url
from ckpt.validation import Problem, read_step_files

from .output import CannotReadError, Exit, Output, count, plural, short_repr, size
from .step import Step, add_step, at_step, open_step
from .validate import problem_line

HELP = "list the tensors, values and aliases of a step, or of a checkpoint of another format"


_LINEAGE = ("save", "owner", "continues", "restart", "metrics", "versions")
"""The members of a root summary that say where the step comes from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a step, or a checkpoint root: then its newest step; or what `convert` takes",
    )
    add_step(parser)
    parser.add_argument("--tree", action="store_true", help="print a tree of keys")
    parser.add_argument("--follow-links", action="store_true", help="of another format: read links out of PATH")
    parser.add_argument("--filter", metavar="GLOB", help="list only names that match (*, ? and [...])")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    if arguments.step is None and (foreign := _foreign(arguments.path, arguments.follow_links)) is not None:
        return _show_foreign(foreign, arguments, output)
    with open_step(at_step(arguments.path, arguments.step)) as step:
        return _run(step, arguments, output)


def _foreign(path: str, follow_links: bool) -> LazyState | None:
    """Open a checkpoint of another format; None if there is none, or if it needs options of `convert`."""
    if is_object_url(path):
        return None
    try:
        return open_foreign(path, skip_unsafe=True, follow_links=follow_links)
    except (OSError, ValueError):
        return None  # the reader of steps says what is wrong


def _show_foreign(state: LazyState, arguments: argparse.Namespace, output: Output) -> Exit:
    def is_shown(name: str) -> bool:
        return arguments.filter is None or fnmatch.fnmatchcase(name, arguments.filter)

    tensors = {display(path): tensor for path, tensor in state.tensors.items() if is_shown(display(path))}
    values = {display(path): value for path, value in state.values.items() if is_shown(display(path))}
    if arguments.filter is not None and not tensors and not values:
        raise CannotReadError(f"{arguments.path}: no name matches {arguments.filter!r}")
    output.line(f"{state.kind}, {plural(len(state.tensors), 'tensor')}, {size(state.nbytes)}: {arguments.path}", "bold")
    rows = [(name, tensor.dtype, str(list(tensor.shape)), size(tensor.nbytes)) for name, tensor in tensors.items()]
    output.table(("tensor", "dtype", "shape", ">size"), rows)
    if values:
        output.line()
        output.table(("value", "type", "is"), [(n, type(v).__name__, short_repr(v)) for n, v in values.items()])
    for note in state.notes:
        output.line(note)
    shown = [{"name": name, "dtype": each.dtype, "shape": each.shape} for name, each in tensors.items()]
    output.json(
        {"path": arguments.path, "format": state.kind, "tensors": shown, "values": values, "notes": state.notes}
    )
    return Exit.WHOLE


def _run(step: Step, arguments: argparse.Namespace, output: Output) -> Exit:
    problems: list[Problem] = []
    read_step_files(step.index.source, problems)
    entries = _entries(step)
    values = dict(step.values)
    if arguments.filter is not None:
        entries = [entry for entry in entries if fnmatch.fnmatchcase(entry.name, arguments.filter)]
        values = {name: value for name, value in values.items() if fnmatch.fnmatchcase(name, arguments.filter)}
        if not entries and not values:
            raise CannotReadError(f"{step.path}: no name matches {arguments.filter!r}")
    _print(step, entries, values, arguments.tree, output)
    for problem in problems:
        output.line(f"DAMAGED: {problem_line(problem)}", "bold red")
    output.json(
        {
            "path": step.path,
            "step": step.index.step,
            "world_size": step.index.world_size,
            "tensors": [entry.document() for entry in entries],
            "values": values,
            "lineage": {key: step.index.summary[key] for key in _LINEAGE},
            "summary": {key: vars(group) for key, group in _groups(entries).items()},
            "problems": [problem_line(problem) for problem in problems],
        }
    )
    return Exit.DAMAGED if problems else Exit.WHOLE


@dataclass(frozen=True)
class _Entry:
    """A tensor, or an alias of one: the number of its chunks, and the ranks that wrote them."""

    name: str
    tensor: StoredTensor
    alias_of: str | None
    chunks: int
    ranks: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.tensor.shape) * stored(self.tensor.dtype).itemsize

    @property
    def shards(self) -> str:
        return f"= {self.alias_of}" if self.alias_of else plural(self.chunks, "chunk")

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.tensor.dtype,
            "shape": self.tensor.shape,
            "bytes": self.bytes,
            "chunks": self.chunks,
            "ranks": self.ranks,
            "alias_of": self.alias_of,
        }


@dataclass
class _Group:
    """Sums over the tensors below one key. Aliases are not counted."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


def _entries(step: Step) -> list[_Entry]:
    regions = step.index.packs.regions
    ranks_of = [tuple(np.unique(region.ranks).tolist()) for region in regions]
    entries = []
    for name, tensor in step.tensors.items():
        used = [array.region for array in tensor.boxes if array.region is not None]
        chunks = sum(len(regions[region].ranks) for region in used)
        ranks = ranks_of[used[0]] if len(used) == 1 else tuple(sorted({r for region in used for r in ranks_of[region]}))
        entries.append(_Entry(name, tensor, step.aliases.get(name), chunks, ranks))
    return entries


def _print(step: Step, entries: list[_Entry], values: Mapping[str, Any], tree: bool, output: Output) -> None:
    output.line(f"step {step.index.step}, written by {plural(step.index.world_size, 'rank')}: {step.path}", "bold")
    output.line(_lineage(step.index.summary))
    if tree:
        _print_tree(entries, values, output)
    elif entries:
        rows = [
            (e.name, e.tensor.dtype, str(list(e.tensor.shape)), size(e.bytes), e.shards, _ranks(e.ranks))
            for e in entries
        ]
        output.table(("tensor", "dtype", "shape", ">size", "stored in", "ranks"), rows)
    if values and not tree:
        output.line()
        output.table(("value", "type", "is"), [(n, type(v).__name__, short_repr(v)) for n, v in values.items()])
    if entries:
        output.line()
        groups = [(key, count(g.tensors), count(g.elements), size(g.bytes)) for key, g in _groups(entries).items()]
        total = [entry for entry in entries if entry.alias_of is None]
        elements = sum(math.prod(entry.tensor.shape) for entry in total)
        all_of_them = ("all", count(len(total)), count(elements), size(sum(entry.bytes for entry in total)))
        output.table(("top-level key", ">tensors", ">elements", ">size"), [*groups, all_of_them])


def _lineage(summary: Mapping[str, Any]) -> str:
    """Return where a step comes from, in one line."""
    before, restart = summary["continues"], summary["restart"]
    parts = ["continues nothing" if before is None else f"continues step {before['step']}"]
    parts += [] if restart is None else [f"restart index {restart}"]
    parts += [f"fencing token {summary['owner']}"]
    parts += [f"{name} {version:.80}" for name, version in sorted(summary["versions"].items())]
    parts += [f"{name} = {short_repr(value)}" for name, value in sorted(summary["metrics"].items())]
    return "; ".join(parts)


def _groups(entries: list[_Entry]) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for entry in entries:
        group = groups.setdefault(entry.name.split("/", 1)[0], _Group())
        if entry.alias_of is None:
            group.tensors += 1
            group.elements += math.prod(entry.tensor.shape)
            group.bytes += entry.bytes
    return groups


def _print_tree(entries: list[_Entry], values: Mapping[str, Any], output: Output) -> None:
    labels = {e.name: f"{e.tensor.dtype} {list(e.tensor.shape)} {size(e.bytes)}, {e.shards}" for e in entries}
    labels |= {name: short_repr(value) for name, value in values.items()}
    root: dict[str, Any] = {}
    for name in sorted(labels):
        node = root
        for key in name.split("/"):
            node = node.setdefault(key, {})
        node[""] = labels[name]
    _print_node(root, "", output)


def _print_node(node: Mapping[str, Any], indent: str, output: Output) -> None:
    keys = [key for key in node if key]
    for key in keys:
        last = key == keys[-1]
        below, label = node[key], node[key].get("")
        output.line(f"{indent}{'└─ ' if last else '├─ '}{key}" + ("" if label is None else f": {label}"))
        _print_node(below, indent + ("   " if last else "│  "), output)


def _ranks(ranks: tuple[int, ...]) -> str:
    """Format ranks as runs: 0-3, 6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "-"
