"""Put huge numbers, long texts and deep values into every place of every document, and read it at a bounded cost.

    python -m tests.ckpt.fuzz.amplify SEED CASES

prints one JSON object. A document of N bytes may cost `_MEMORY_BYTES` and `_BYTES_PER_BYTE` times N, and `_CPU_S` and
`_CPU_S_PER_BYTE` times N. A case that takes longer than `_DEADLINE_S` ends the process with the stacks of all threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ckpt
from ckpt.errors import CheckpointError
from ckpt.mirroring.step_copy import StepCopy, Throttle
from ckpt.native import crc32c
from ckpt.ranks.failure import Failure
from ckpt.storage.documents import canonical_json
from ckpt.storage.interface import Pending, Root
from ckpt.storage.names import SaveId
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.step_source import LocalStep
from ckpt.storage.store_root import StoreRoot
from ckpt.storage.stores.interface import StorageOptions, Store
from ckpt.storage.stores.memory import MemoryStore
from ckpt.validation import validate
from tests.ckpt.fuzz.mutations import put, without_checksum
from tests.ckpt.fuzz.states import every_type
from tests.support.saves import save_here
from tools.inspect_ckpt.__main__ import main as inspect_ckpt

_DEADLINE_S = 60.0  # wall time, on a machine that may be busy
_CPU_S, _CPU_S_PER_BYTE = 3.0, 50e-6
_MEMORY_BYTES, _BYTES_PER_BYTE = 192 << 20, 300
_ADDRESS_SPACE = 1 << 30

_HUGE: dict[str, bytes] = {
    "2**31": b"%d" % (1 << 31),
    "2**24": b"%d" % (1 << 24),
    "2**62": b"%d" % (1 << 62),
    "-2**62": b"%d" % -(1 << 62),
    "10**18": b"%d" % 10**18,
    "10**4000": b"1" + b"0" * 4000,
    "1e400": b"1e400",
    "1e308": b"1e308",
    "a number as text": b'"1e3000000000"',
    "many digits": b'"' + b"9" * 100_000 + b'"',
    "many sizes": b"[" + b",".join([b"9223372036854775807"] * 20_000) + b"]",
    "a region": b'{"ranks":[[0,16777216,0]],"files":[[0,16777216,0]],"starts":[[0,16777216,16]]}',
    "a run": b"[[0,16777216,1]]",
    "runs": b"[" + b",".join([b"[0,1048576,0]"] * 16) + b"]",
    "deep lists": b"[" * 90 + b"1" + b"]" * 90,
    "deeper lists": b"[" * 200_000 + b"]" * 200_000,
    "a large integer": b'{"$":"int","hex":"' + b"f" * 100_000 + b'"}',
    "a fraction": b'{"$":"Fraction","value":["1e3000000000"]}',
    "a decimal": b'{"$":"Decimal","value":"1e999999999"}',
    "a range": b'{"$":"range","value":[0,4611686018427387904,1]}',
    "an empty array of a huge shape": b'{"$":"array","value":["torch","float32",[0,4611686018427387904],'
    b'{"$":"bytes","base64":""}]}',
}
_ALWAYS = {("regions",): {"a region"}, ("values", 0): {"a fraction", "a large integer"}}
"""What is always tried, by the container of the place."""

_PLACEHOLDER = "here goes what json cannot write"


class File(Protocol):
    """A file, or an object of a store."""

    def read_bytes(self) -> bytes: ...
    def write_bytes(self, data: bytes, /) -> object: ...


@dataclass(frozen=True)
class _Object:
    store: Store
    key: str

    def read_bytes(self) -> bytes:
        found = self.store.get(self.key, 1 << 30)
        assert found is not None
        return found

    def write_bytes(self, data: bytes, /) -> None:
        self.store.put(self.key, data)


@dataclass(frozen=True)
class Document:
    """A file that is changed: how it is written, what reads it, and the files that have its checksum."""

    name: str
    file: File
    write: Callable[[bytes], None]
    readers: tuple[Callable[[], object], ...]
    vouching: tuple[File, ...] = ()
    lines: bool = False

    def parsed(self) -> Any:
        data = self.file.read_bytes()
        if self.lines:
            return [json.loads(line) for line in data.splitlines()]
        document = json.loads(data)
        without_checksum(document)
        return document


def main(seed: int, cases: int) -> None:
    logging.disable()
    folder = Path(tempfile.mkdtemp())
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    documents = list(_documents(folder))
    for document in documents:
        for read in document.readers:
            read()  # also starts threads and imports
    with open("/proc/self/statm") as stream:
        limit = int(stream.read().split()[0]) * resource.getpagesize() + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    rng = random.Random(seed)
    chosen = [case for document in documents for case in _chosen(document, rng, cases // len(documents))]
    for number, (document, place, name) in enumerate(chosen):
        what = f"{document.name}: {'/'.join(map(str, place))} = {name}"
        sys.stderr.write(f"case {number}: {what}\n")
        for outcome in _case(document, place, _HUGE[name]):
            outcomes[outcome.split(":")[0]] += 1
            if outcome.startswith("FAILED"):
                failures.append(f"{what}: {outcome}")
    faulthandler.cancel_dump_traceback_later()
    shutil.rmtree(folder)
    print(json.dumps({"cases": len(chosen), "outcomes": outcomes, "failures": failures}))


def _chosen(document: Document, rng: random.Random, most: int) -> list[tuple[Document, tuple[Any, ...], str]]:
    """Return some changes of a document: each is a place and the name of what is put there."""
    every = [(document, place, name) for place in _places(document.parsed()) for name in _HUGE]
    always = [case for case in every if case[2] in _ALWAYS.get(case[1][:-1], ())]
    return always + (every if most >= len(every) else rng.sample(every, most))


def _case(document: Document, place: tuple[Any, ...], huge: bytes) -> Iterator[str]:
    before = {file: file.read_bytes() for file in (document.file, *document.vouching)}
    changed = document.parsed()
    node = changed
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = _PLACEHOLDER
    quoted = json.dumps(_PLACEHOLDER).encode()
    if document.lines:
        data = b"".join(json.dumps(line).encode().replace(quoted, huge) + b"\n" for line in changed)
    else:
        data = canonical_json(changed).replace(quoted, huge)
    document.write(data)
    try:
        for read in document.readers:
            yield _measured(read, len(data))
    finally:
        for file, content in before.items():
            file.write_bytes(content)


def _measured(read: Callable[[], object], size: int) -> str:
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)
    before, start = _peak_bytes(fresh=True), time.process_time()
    try:
        read()
        outcome = "read"
    except CheckpointError as error:
        outcome = f"refused ({type(error).__name__})"
    except BaseException as error:
        outcome = f"FAILED: {type(error).__name__}: {str(error)[:500]}"
    cpu_s, memory = time.process_time() - start, _peak_bytes() - before
    if cpu_s > _CPU_S + _CPU_S_PER_BYTE * size:
        return f"FAILED: took {cpu_s:.1f} s for {size} bytes"
    if memory > _MEMORY_BYTES + _BYTES_PER_BYTE * size:
        return f"FAILED: took {memory >> 20} MiB for {size} bytes"
    return outcome


def _peak_bytes(fresh: bool = False) -> int:
    if fresh:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _places(node: Any) -> list[tuple[Any, ...]]:
    """Return the places of a document with different roles: of a list, its first and its last two items count."""
    if isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, list):
        items = [
            (number, node[number]) for number in sorted({0, 1, len(node) - 2, len(node) - 1}) if 0 <= number < len(node)
        ]
        if any(isinstance(item, list | dict) for item in node):
            items = list(enumerate(node))  # entries, each of its own kind
    else:
        return []
    return [(key, *place) for key, item in items for place in [(), *_places(item)]]


# -- documents ---------------------------------------------------------------------------------------------------------


def _documents(folder: Path) -> Iterator[Document]:
    for layout, compression in (("plain", None), ("zstd", "zstd")):
        root = folder / layout
        staging = ckpt.Staging(file_bytes=2048, inner_bytes=512, compression=compression)
        with ckpt.Checkpointer(root, staging=staging) as checkpointer:
            save_here(checkpointer, every_type(), 3, metrics={"loss": 0.5})
        step = root / "step_00000003"
        for name in ("zarr.json", "index.json", "state.json", "parts/000/rank_00000.json", "intent.json"):
            if layout == "plain" or name in ("index.json", "parts/000/rank_00000.json"):
                yield _of_step(step, name)
    yield from _of_root(folder / "plain")
    yield from _of_store()
    packs = NodePacks(str(folder / "node_local"), CheckpointRoot(str(folder / "plain")))
    packs.claim()
    yield _sealed_document(folder / "node_local" / "root.json", (packs.claim, lambda: packs.clean(lambda: None)))


def _of_step(step: Path, name: str) -> Document:
    readers: list[Callable[[], object]] = [
        lambda: _read(step),
        lambda: ckpt.load(step),
        lambda: validate(str(step), jobs=2),
        lambda: _command("show", str(step)),
        lambda: _command("show", str(step), "--json"),
        lambda: _command("ls", str(step.parent)),
    ]
    if name != "state.json":
        readers.append(lambda: _copied(step))
    root = step / "zarr.json"
    return Document(
        f"{step.parent.name}/{name}", step / name, lambda data: put(step, name, data), tuple(readers), (root,)
    )


def _of_root(root: Path) -> Iterator[Document]:
    """Yield the documents of a root beside those of its step, with a pending save and an abandoned one."""
    checkpoints = CheckpointRoot(str(root))
    pending = _begun(checkpoints, 9)
    _begun(checkpoints, 8).abandon(Failure(0, "StorageError", "full"))
    readers = (
        lambda: _command("ls", "--all", str(root)),
        lambda: _command("watch", "--once", str(root)),
        lambda: _command("show", pending.path),
        lambda: _command("validate", pending.path),
        lambda: _look(checkpoints),
    )
    for file in sorted(root.rglob("*")):
        if not file.is_file() or root / "step_00000003" in file.parents:
            continue
        if file.suffix == ".json":
            yield _sealed_document(file, readers)
        elif file.read_bytes().startswith(b"{"):  # leases, one object in each line
            yield Document(str(file.relative_to(root)), file, file.write_bytes, readers, lines=True)


def _of_store() -> Iterator[Document]:
    """Yield the documents of a root in an object store, beside those of a step."""
    store = MemoryStore("memory:///hostile")
    root = StoreRoot(store, StorageOptions.of(None, 60.0), None, store)
    root.make()
    token = root.ownership.claim(0)
    pending, abandoned = _begun(root, 9), _begun(root, 8)
    abandoned.abandon(Failure(0, "StorageError", "full"))
    record, intent = f"records/{abandoned.save.name}/000.json", f"saves/{pending.save.name}/intent.json"
    readers = (lambda: _look(root), lambda: abandoned.outcome(), lambda: pending.parts_present())
    for key in (record, f"owner/{token}.json", intent):
        yield _sealed_document(_Object(store, key), readers)


def _begun(root: Root, step: int) -> Pending:
    pending = root.pending_save(SaveId(step, root.ownership.newest(), "0123456789abcdef"))
    pending.begin(1, "plan")
    pending.write_part(0, {"rank": 0, "files": [[0, 10, 5]], "values": [], "times": {"write": 0.5}})
    return pending


def _sealed_document(file: Path | _Object, readers: tuple[Callable[[], object], ...]) -> Document:
    def write(data: bytes) -> None:
        file.write_bytes(b'{"crc32c":%d,' % crc32c(data) + data[1:])

    return Document(file.key if isinstance(file, _Object) else "/".join(file.parts[-3:]), file, write, readers)


# -- readers -----------------------------------------------------------------------------------------------------------


def _copied(step: Path) -> None:
    """Copy a step to a mirror, as the process of a mirror does."""
    mirror = CheckpointRoot(tempfile.mkdtemp())
    token = mirror.ownership.claim(0)
    try:
        StepCopy(LocalStep(str(step)), mirror, token, Throttle(None, threading.Event())).run(lambda: None)
    finally:
        shutil.rmtree(mirror.path)


def _read(step: Path) -> None:
    with ckpt.open(step) as opened:
        for tensor in opened.values():
            tensor.read()
        repr(opened.summary)


def _look(root: Root) -> None:
    """Look at the owner, the saves and the steps of a root, as a job does that starts there."""
    token = root.ownership.newest()
    root.ownership.describe(token)
    root.ownership.state(token)
    root.ownership.overview(time.time())
    for save in root.pending():
        root.pending_save(save).intent()
        root.pending_save(save).read_part(0)
    root.steps()
    root.saves()
    root.abandoned()


def _command(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        inspect_ckpt(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
