"""This repository: every step in new files, and in those of the step that is removed."""

from typing import Any, ClassVar

from ckpt import Checkpointer
from tools.bench.systems import Place
from tools.bench.workload import State


class Ours:
    """A `Checkpointer` that saves, and another one that loads, without the staged memory of the first."""

    _options: ClassVar[dict[str, Any]] = {}

    def __init__(self, place: Place) -> None:
        self._folder = place.folder
        self._checkpointer: Checkpointer | None = None
        self._loader: Checkpointer | None = None
        self.read_s = 0.0

    def prepare(self, state: State) -> None:
        self._checkpointer = Checkpointer(self._folder, **self._options)
        self._checkpointer.warmup(state)

    def save(self, state: State, step: int) -> None:
        assert self._checkpointer is not None
        self._checkpointer.async_save(state, step)

    def poll(self) -> bool:
        assert self._checkpointer is not None
        return bool(self._checkpointer.maybe_finalize())

    def load(self, state: State, step: int) -> None:
        """Restore; reading takes `read_s` of it, then preparations for the next save begin."""
        self._loader = Checkpointer(self._folder, **self._options)
        assert self._loader.restore(state, step) == step
        report = self._loader.last_restore
        assert report is not None
        assert not report.own_memory_bytes
        self.read_s = report.seconds

    def unload(self) -> None:
        """Close what the load has prepared, and a training program would keep."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def load_from_memory(self, state: State, step: int) -> None:
        """Restore from staging memory, which still holds the newest step."""
        assert self._checkpointer is not None
        assert self._checkpointer.restore(state, step) == step
        report = self._checkpointer.last_restore
        assert report is not None
        assert not report.storage_bytes, "staging memory did not have all of the step"

    def close(self) -> None:
        self.unload()
        if self._checkpointer is not None:
            self._checkpointer.close()


class Reused(Ours):
    """The same, writing over the files of the step before the last, as soon as there is one."""

    _options: ClassVar[dict[str, Any]] = {"keep": 1}
