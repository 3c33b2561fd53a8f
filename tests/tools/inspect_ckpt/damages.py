"""Ways to damage a step: changes of its files that can be undone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Tree = Mapping[str, bytes]
"""Content of the files of a step, by relative path."""


@dataclass(frozen=True)
class Damage:
    """New content of files, or None for a file that is removed."""

    kind: str
    changes: Mapping[str, bytes | None]


def read_tree(path: Path) -> Tree:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@contextmanager
def applied(path: Path, tree: Tree, damage: Damage) -> Iterator[None]:
    made = []
    try:
        for name, content in damage.changes.items():
            file = path / name
            if content is None:
                file.unlink()
                continue
            if not file.parent.is_dir():
                file.parent.mkdir()
                made.append(file.parent)
            file.write_bytes(content)
        yield
    finally:
        for name in damage.changes:
            if name in tree:
                (path / name).write_bytes(tree[name])
            else:
                (path / name).unlink()
        for directory in made:
            directory.rmdir()


def damages(tree: Tree, other_step: Tree, other_world: Tree, seed: int, flips: int, each: int) -> Iterator[Damage]:
    """Yield `flips` flips of single bits over all files, one more in every file, and `each` of the other kinds."""
    rng = random.Random(seed)
    names = sorted(tree)
    total = sum(map(len, tree.values()))
    for name in names:
        yield _flip(tree, name, rng.randrange(8 * len(tree[name])))
    for bit in rng.sample(range(8 * total), flips):
        yield _flip(tree, *_located(tree, names, bit))
    for make in KINDS.values():
        for _ in range(each):
            changes = make(tree, other_step, other_world, rng)
            if any(tree.get(name) != content for name, content in changes.items()):
                yield Damage(make.__name__.strip("_"), changes)


def _located(tree: Tree, names: list[str], bit: int) -> tuple[str, int]:
    for name in names:
        if bit < 8 * len(tree[name]):
            return name, bit
        bit -= 8 * len(tree[name])
    raise AssertionError


def _flip(tree: Tree, name: str, bit: int) -> Damage:
    content = bytearray(tree[name])
    content[bit // 8] ^= 1 << bit % 8
    return Damage("flip", {name: bytes(content)})


Changes = dict[str, bytes | None]


def packs(tree: Tree) -> list[str]:
    return [name for name in sorted(tree) if name.startswith("packs/")]


def _truncate(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    name = rng.choice(sorted(tree))
    return {name: tree[name][: rng.choice((0, rng.randrange(len(tree[name])), len(tree[name]) - 1))]}


def _lengthen(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    name = rng.choice(sorted(tree))
    return {name: tree[name] + rng.choice((b"\0", b"\n", b" ", rng.randbytes(rng.randrange(1, 5000))))}


def _delete(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    return {rng.choice(sorted(tree)): None}


def _extra(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    name = rng.choice(sorted(tree))
    folder = name.rpartition("/")[0] + "/" if "/" in name else ""
    new = folder + rng.choice(
        ("extra", "rank_00000_099", "rank_00009.json", ".hidden.tmp", "new/zarr.json", "zarr.json.bak")
    )
    return {new: rng.choice((b"", tree[name], rng.randbytes(100)))}


def _swap(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    one, two = rng.sample(packs(tree), 2)
    return {one: tree[two], two: tree[one]}


def _swap_alike(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    one = rng.choice(packs(tree))
    alike = [name for name in packs(tree) if name != one and len(tree[name]) == len(tree[one])]
    if not alike:
        return _swap(tree, other_step, other_world, rng)
    two = rng.choice(alike)
    return {one: tree[two], two: tree[one]}


def _replay_pack(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    name = rng.choice([name for name in packs(tree) if name in other_step])
    return {name: other_step[name]}


def _other_save(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    """A document from another save of the same structure."""
    documents = [name for name in sorted(tree) if name.endswith(".json") and tree[name] != other_step.get(name)]
    name = rng.choice(documents)
    return {name: other_step[name]}


def _other_world(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    """A part of a save with another number of ranks, replacing a part or in addition."""
    name = rng.choice([name for name in sorted(other_world) if name.startswith("parts/")])
    return {name: other_world[name]}


def _garbage(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    name = rng.choice(sorted(tree))
    return {name: rng.randbytes(len(tree[name]))}


def _zeros(tree: Tree, other_step: Tree, other_world: Tree, rng: random.Random) -> Changes:
    """A block that was never written to the disk."""
    name = rng.choice(sorted(tree))
    start = rng.randrange(0, len(tree[name]), 512)
    end = min(start + 512, len(tree[name]))
    return {name: tree[name][:start] + bytes(end - start) + tree[name][end:]}


KINDS: dict[str, Callable[[Tree, Tree, Tree, random.Random], Changes]] = {
    make.__name__.strip("_"): make
    for make in (
        _truncate,
        _lengthen,
        _delete,
        _extra,
        _swap,
        _swap_alike,
        _replay_pack,
        _other_save,
        _other_world,
        _garbage,
        _zeros,
    )
}
