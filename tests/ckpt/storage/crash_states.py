"""The directory trees that a loss of power may leave, according to POSIX.

    file data     durable after an fsync of the file; before, any content since the last one
    a name        durable after an fsync of the directory; changes in one directory survive in order
    a rename      atomic, durable after an fsync of the directory of the new name

`Recorder` records what system calls change, `crash` makes a tree that may be left after any number of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.ckpt.storage.syscalls import Call


class Change(NamedTuple):
    """A change by one system call. `places` are the affected directories (by inode) and names."""

    kind: str  # file, directory, data, sync, link, rename, unlink
    inode: int
    places: tuple[tuple[int, str], ...] = ()
    data: bytes = b""


@dataclass
class Tree:
    """Directories and files by inode number."""

    root: int
    directories: dict[int, dict[str, int]] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Tree:
        """Return the tree at `path`, assumed to be durable."""
        tree = cls(path.stat().st_ino)
        tree._add(path)
        return tree

    def _add(self, path: Path) -> int:
        inode = path.stat().st_ino
        if path.is_dir():
            self.directories[inode] = {entry.name: self._add(entry) for entry in path.iterdir()}
        else:
            self.files[inode] = path.read_bytes()
        return inode

    def copy(self) -> Tree:
        return Tree(self.root, {number: dict(names) for number, names in self.directories.items()}, dict(self.files))

    def content(self, inode: int | None = None) -> Hashable:
        """Return all names and bytes, which are equal for equivalent trees."""
        inode = self.root if inode is None else inode
        if inode not in self.directories:
            return self.files[inode]
        return frozenset((name, self.content(entry)) for name, entry in self.directories[inode].items())

    def apply(self, change: Change) -> None:
        """Apply a change of names; ignore one of a name that was lost."""
        places = change.places
        names = [self.directories.get(directory, {}) for directory, _ in places]
        if change.kind in ("file", "directory", "link"):
            names[0][places[0][1]] = change.inode
            if change.kind == "file":
                self.files[change.inode] = b""
            elif change.kind == "directory":
                self.directories[change.inode] = {}
        elif change.kind == "unlink":
            names[0].pop(places[0][1], None)
        elif change.kind == "rename" and places[0][1] in names[0]:
            names[1][places[1][1]] = names[0].pop(places[0][1])


class Recorder:
    """A hook for `Syscalls` that makes every call and records what it changes.

    The system reuses inode numbers, so files made while recording get negative numbers instead.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._made: dict[int, int] = {}

    def __call__(self, call: Call, perform: Callable[..., Any]) -> Any:
        before = self._before(call)
        result = perform(*call.args)
        change = self._change(call, result, before)
        if change is not None:
            self.changes.append(change)
        return result

    def _before(self, call: Call) -> Any:
        """Return what can be found only before the call."""
        if call.name == "open":
            return not call.args[1] & os.O_CREAT or os.path.lexists(call.args[0])
        return self._inode(call.args[0]) if call.name in ("rename", "renameat2", "unlink", "rmdir") else None

    def _change(self, call: Call, result: Any, before: Any) -> Change | None:
        name, args = call.name, call.args
        if name == "open" and not before:
            return Change("file", self._new(args[0]), (self._place(args[0]),))
        if name == "open":
            return Change("data", self._inode(args[0])) if args[1] & os.O_TRUNC else None
        if name in ("write", "pwrite", "ftruncate"):
            descriptor = f"/proc/self/fd/{args[0]}"
            return Change("data", self._inode(descriptor), data=Path(descriptor).read_bytes())
        if name == "fsync":
            return Change("sync", self._inode(f"/proc/self/fd/{args[0]}"))
        if name == "mkdir":
            return Change("directory", self._new(args[0]), (self._place(args[0]),))
        if name == "link":
            return Change("link", self._inode(args[0]), (self._place(args[1]),))
        if name in ("rename", "renameat2"):
            return Change("rename", before, (self._place(args[0]), self._place(args[1])))
        return Change("unlink", before, (self._place(args[0]),)) if name in ("unlink", "rmdir") else None

    def _new(self, path: str) -> int:
        self._made[os.stat(path).st_ino] = -1 - len(self.changes)
        return self._inode(path)

    def _inode(self, path: str) -> int:
        number = os.stat(path).st_ino
        return self._made.get(number, number)

    def _place(self, path: str) -> tuple[int, str]:
        parent, name = os.path.split(path)
        return self._inode(parent), name


def crash(before: Tree, changes: list[Change], kept: random.Random | bool) -> Tree:
    """Return the tree after a loss of power that follows these changes.

    What is not durable survives (True), does not (False), or survives in part (a source of random numbers)."""
    tree = before.copy()
    for change in _surviving(changes, kept):
        tree.apply(change)
    versions: dict[int, list[bytes]] = {inode: [data] for inode, data in before.files.items()}
    for change in changes:
        if change.kind == "file":
            versions[change.inode] = [b""]
        elif change.kind == "data":
            versions.setdefault(change.inode, [b""]).append(change.data)
        elif change.kind == "sync" and change.inode in versions:
            versions[change.inode] = versions[change.inode][-1:]
    for inode in tree.files:
        options = versions[inode]
        tree.files[inode] = options[-1 if kept else 0] if isinstance(kept, bool) else kept.choice(options)
    return tree


def _surviving(changes: list[Change], kept: random.Random | bool) -> list[Change]:
    """Return the changes of names that survive the crash: durable ones, and the first few others of each directory."""
    named = [(at, change) for at, change in enumerate(changes) if change.places]
    synced = {(at, change.inode) for at, change in enumerate(changes) if change.kind == "sync"}
    last_sync: dict[int, int] = {}
    for at, inode in synced:
        last_sync[inode] = max(at, last_sync.get(inode, -1))
    durable_until: dict[int, int] = {}
    for at, change in named:
        if last_sync.get(change.places[-1][0], -1) > at:
            for directory, _ in change.places:  # earlier changes in the same directories survive, too
                durable_until[directory] = at
    limits: dict[int, int] = {}
    for directory in sorted({directory for _, change in named for directory, _ in change.places}):
        mine = [at for at, change in named if directory in dict(change.places)]
        undone = [at for at in mine if at > durable_until.get(directory, -1)]
        count = len(undone) * kept if isinstance(kept, bool) else kept.randint(0, len(undone))
        limits[directory] = undone[count] if count < len(undone) else len(changes)
    survivors = []
    for at, change in named:
        directories = [directory for directory, _ in change.places]
        if all(at < limits[directory] for directory in directories):
            survivors.append(change)
        else:  # no later change in these directories can survive without it
            for directory in directories:
                limits[directory] = min(limits[directory], at)
    return survivors


def materialise(tree: Tree, path: Path) -> None:
    """Make the tree at `path`, which does not exist."""
    _make(tree, tree.root, path)


def _make(tree: Tree, inode: int, path: Path) -> None:
    if inode not in tree.directories:
        path.write_bytes(tree.files[inode])
        return
    path.mkdir()
    for name, entry in tree.directories[inode].items():
        _make(tree, entry, path / name)
