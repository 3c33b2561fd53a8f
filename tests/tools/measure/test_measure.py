"""The figures of a small tree that can be counted by hand, and those of this one beside what the running code says."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.replication import replica
from ckpt.storage.stores.interface import Store
from tests.support.selection import full_only
from tools.measure import sources
from tools.measure.__main__ import REPOSITORY, figures, main, processes, traces

_FILES = {
    "ckpt/__init__.py": '__all__ = ["Checkpointer", "load"]\n',
    "ckpt/checkpointer.py": '''"""A module."""  # 2 words in each

class Checkpointer:
    def __init__(self, root, *, keep=None, timeout=60): ...
    def save(self, state):
        """Save the state."""
    @property
    def root(self): ...
    def _close(self): ...
''',
    "ckpt/store/interface.py": """from abc import ABC, abstractmethod

class Store(ABC):
    @abstractmethod
    def create(self): ...
    @abstractmethod
    def read(self): ...
    def get(self): ...
""",
    "ckpt/store/memory.py": "class Memory(Store):\n    pass\n",
    "ckpt/reading/zarr.py": "class ZarrStore(Store):\n    pass\n",
    "ckpt/calls/messages.py": """from dataclasses import dataclass
@dataclass(frozen=True)
class Run: ...
class Channel: ...
""",
    "ckpt/peers/control.py": """Message = Take | Give
@dataclass
class Take: ...
@dataclass
class Give: ...
@dataclass
class Options: ...
CODEC: Codec[Message] = Codec(*get_args(Message))
""",
    "ckpt/saving/messages.py": "class Memory: ...\n",
    "ckpt/integrations/one.py": """from ckpt import load
from .two import name
from ckpt.saving.messages import Memory
""",
    "ckpt/integrations/two.py": "def name():\n    from ckpt import Checkpointer\n",
    "inprocess/__init__.py": "",
    "inprocess/long.py": "# a line\n" * 451,
    "tests/test_it.py": "one = 1\ntwo = 2\n",
    "docs/architecture.md": """# A

## Words

| word | meaning |
|---|---|
| box | a |
| arena, slot | b |

## B

| no word | c |
""",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _values(rows: list[Any]) -> dict[str, Any]:
    return {row.name: row.value for row in rows}


def test_a_tree_is_counted(tree: Path) -> None:
    found = {row.name: row for row in figures(tree)}
    expected = {
        "files of ckpt": 10,
        "classes of ckpt": 10,
        "abstract methods of ckpt": 2,
        "message classes of ckpt": 3,
        "arguments of Checkpointer": 3,
        "public names of a Checkpointer": 2,
        "operations of a store": 2,
        "lines of the longest backend": 2,
        "files above 450 lines, ckpt and inprocess": 1,
        "adapters with internal imports": 1,
        "words in architecture.md": 3,
        "module names of several modules": 1,
        "class names of several classes": 1,
        "lines of tests": 2,
    }
    assert {name: found[name].value for name in expected} == expected
    assert found["operations of a store"].items == ("create", "read")
    assert found["lines of the longest backend"].items == ("memory 2",)
    assert found["module names of several modules"].items == ("messages",)
    assert found["class names of several classes"].items == ("Memory",)


def test_prose_is_docstrings_and_comments(tree: Path) -> None:
    module = next(m for m in sources.modules_of(tree, "ckpt") if m.path.stem == "checkpointer")
    assert module.prose_and_code() == (2 + 4 + 3, 6)


def test_adapters_are_told_with_the_modules_that_they_import(tree: Path) -> None:
    assert sources.adapter_imports(sources.modules_of(tree, "ckpt")) == {"one": ["ckpt.saving.messages"]}


def test_the_sources_tell_what_the_running_code_does() -> None:
    found = _values(figures(REPOSITORY))
    assert found["arguments of Checkpointer"] == len(inspect.signature(ckpt.Checkpointer).parameters)
    assert found["operations of a store"] == len(Store.__abstractmethods__)
    assert found["public names of a Checkpointer"] == len(
        [name for name in vars(ckpt.Checkpointer) if not name.startswith("_")]
    )
    modules = {module.name: module for module in sources.modules_of(REPOSITORY, "ckpt")}
    kinds = replica.CONTROL._kinds | replica.PEERS._kinds
    of_others = {"DropRegion", "GiveUp", "Notice"}
    assert sources.message_classes(modules["ckpt.replication.replica"]) == set(kinds) - of_others


def test_the_command_prints_a_table_or_json(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 0
    table = capsys.readouterr().out
    assert any(line.split() == ["lines", "of", "tests", "2", "<=", "48,000"] for line in table.splitlines())
    assert main([str(tree), "--json"]) == 0
    assert {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)} == _values(figures(tree))


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"{tmp_path} is no checkout of this repository" in capsys.readouterr().err


def test_a_save_and_a_restore_are_traced() -> None:
    found = _values(traces(REPOSITORY))
    assert 20 < found["functions of async_save"] < found["functions of whole save"]
    assert found["functions of restore"] > 20
    assert all(found[f"files of {call}"] < found[f"functions of {call}"] for call in ("async_save", "restore"))


@full_only
def test_the_keeper_and_the_monitor_are_started_and_workers_are_forked() -> None:
    found = {row.name: row for row in processes(REPOSITORY)}
    assert found["kinds of process started by exec"].value == 2
    names = {item.rsplit(" ", 1)[0] for item in found["private memory of the helpers in MiB"].items}
    assert {"ckpt-keeper (exec)", "ckpt-writer"} < names
