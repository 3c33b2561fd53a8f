"""Acts of the model of the steps (`steps_model`), as the product performs them: system calls, or requests to a store.

`Acts` notes them under the names that they have in the model, and lets another process act before one of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage import directory_root
from ckpt.storage.directory_root import DirectoryRoot
from ckpt.storage.documents import decode_document
from ckpt.storage.stores.directory import DirectoryStore
from tests.ckpt.crash.steps_state import Kind
from tests.ckpt.storage.syscalls import Call, Syscalls

TOKEN, READERS, PINS, INTENT = "looks at the token", "looks at the readers", "looks at the pins", "looks at the intent"
LOOKS = (TOKEN, READERS, PINS, INTENT)
"""Acts that change nothing: the product may perform more of them than the model."""

_RECORD = re.compile(r"records/(?P<save>[^/]+)/(?P<number>\d+)\.json")
_SAVE = re.compile(r"step_\d{8}-o\d+-[0-9a-f]{16}")
_STEP = re.compile(r"step_(\d{8})")


class Acts:
    """Notes the acts of the calling thread on roots of one kind.

    `numbers` are the saves of the model, by the name of a save or the number of its step: 2 is that of any save of step
    2 without an entry of its own.
    """

    def __init__(self, kind: Kind, numbers: dict[str | int, int]) -> None:
        self.noted: list[str] = []
        self._kind = kind
        self._numbers = numbers
        self._before: tuple[str, int, Callable[[], None]] | None = None

    def before(self, act: str, do: Callable[[], None], *, number: int = 0) -> None:
        """Call `do`, once, right before an act: the one with this number of those with this name."""
        self._before = act, number, do

    @property
    def has_intervened(self) -> bool:
        """Whether the other process has acted."""
        return self._before is None

    @contextmanager
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Note the acts of a block."""
        with ExitStack() as stack, monkeypatch.context() as patch:
            if self._kind is Kind.STORE:
                for name in ("create", "put", "about", "below", "names"):
                    patch.setattr(DirectoryStore, name, self._request(getattr(DirectoryStore, name)))
            else:
                patch.setattr(directory_root, "has_readers", self._look(READERS, directory_root.has_readers))
                patch.setattr(DirectoryRoot, "pinned_steps", self._look(PINS, DirectoryRoot.pinned_steps))
                stack.enter_context(Syscalls().hooked(self._call))
            yield

    # -- what was done -------------------------------------------------------------------------------------------------

    def _perform(self, act: str | None, perform: Callable[[], Any], failed: Callable[[Any], bool]) -> Any:
        if act is None:
            return perform()
        if self._before is not None and self._before[0] == act:
            _, number, do = self._before
            self._before = (act, number - 1, do) if number else None
            if not number:
                do()
        place = len(self.noted)
        self.noted.append(act)
        result = perform()
        if failed(result):
            self.noted[place] = f"fails: {act}"
        return result

    def _number(self, save: str) -> int:
        match = _STEP.match(save)
        assert match is not None, save
        return self._numbers[save] if save in self._numbers else self._numbers[int(match[1])]

    def _look(self, act: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any, **kwargs: Any) -> Any:
            return self._perform(act, lambda: function(*args, **kwargs), lambda _: False)

        return look

    # -- requests ------------------------------------------------------------------------------------------------------

    def _request(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def request(store: DirectoryStore, key: str, *args: Any) -> Any:
            act = self._act_of(method.__name__, key, *args)
            creates = method.__name__ == "create"
            return self._perform(act, lambda: method(store, key, *args), lambda result: creates and result is None)

        return request

    def _act_of(self, method: str, key: str, data: Any = b"") -> str | None:
        match method, key.split("/"):
            case ("names", ["owner", ""]):
                return TOKEN
            case ("below", ["readers", *_]):
                return READERS
            case ("names", ["pins", ""]):
                return PINS
            case ("create", ["owner", name]) if name[0].isdigit():
                return "claims the root"
            case ("create", ["saves", save, "intent.json"]):
                return f"makes the intent of save {self._number(save)}"
            case ("about", [_, save, "intent.json"]) | ("about", [save, "intent.json"]) if save.startswith("step_"):
                return INTENT
            case ("put", ["saves", save, "parts", _, "rank_00000.json"]):
                return f"writes save {self._number(save)}"
            case ("create", ["records", *_]):
                return self._act_of_record(key, bytes(data))
        return None

    def _act_of_record(self, key: str, data: bytes) -> str:
        match = _RECORD.fullmatch(key)
        assert match is not None
        document = decode_document(data, key)
        save = f"save {self._number(match['save'])}"
        if int(match["number"]) == 0:
            if "at" in document:
                return f"takes {save} in"
            return f"{'publishes' if document['state'] == 'published' else 'abandons'} {save}"
        if document["state"] == "published":
            return f"publishes {save} again"
        return f"{'changes' if document.get('by') is None else 'marks'} {save}"

    # -- system calls --------------------------------------------------------------------------------------------------

    def _call(self, call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "fsync":
            return None  # power is not lost here
        return self._perform(self._act_of_call(call), lambda: perform(*call.args), lambda _: False)

    def _act_of_call(self, call: Call) -> str | None:
        paths = [Path(arg) for arg in call.args if isinstance(arg, str)]
        if call.name == "open" and paths[0].name.startswith(".probe.") and paths[0].parent.name == ".owner":
            return TOKEN
        if call.name == "mkdir" and paths[0].parent.name == ".pending":
            made = f"makes the directory of save {self._number(paths[0].name)}"
            return None if made in self.noted else made
        if call.name == "link" and paths[1].parent.name == ".owner" and paths[1].name[0].isdigit():
            return "claims the root"
        if call.name == "link" and paths[1].name == "intent.json":
            return f"makes the intent of save {self._number(paths[1].parent.name)}"
        if call.name == "rename" and paths[1].name == "rank_00000.json":
            return f"writes save {self._number(paths[1].parents[2].name)}"
        return self._act_of_move(*paths) if call.name == "renameat2" else None

    def _act_of_move(self, source: Path, target: Path) -> str | None:
        to_step = _STEP.fullmatch(target.name) is not None
        if source.parent.name == ".pending" and _SAVE.fullmatch(source.name):
            return f"{'publishes' if to_step else 'abandons'} save {self._number(source.name)}"
        if source.parent.name == "saves":
            return f"takes save {self._number(source.name)} in"
        if not source.name.startswith("step_") or "-removed-" in source.name or source.parent.name == ".retired":
            return None
        save = f"save {self._number(self._save_at(source))}"
        if "-moving-" in source.name:
            return f"publishes {save} again" if to_step else f"changes {save}"
        return f"marks {save}" if "-moving-" in target.name else f"puts {save} aside"

    def _save_at(self, path: Path) -> str:
        return str(decode_document((path / "intent.json").read_bytes(), str(path))["save"])
