"""A job with a mirror, in this process, and what its mirror process does."""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

import ckpt
from ckpt.events import Event, MirrorDone, MirrorFailed
from tests.support.quick_keepers import descendants

STALLED = 1e-6
"""A bandwidth with which a copy begins, and gets no further than its first bytes."""


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.arange(200_000.0) * step, "v": torch.full((90_000,), float(step)), "step": step}


def assert_state(state: dict[str, Any], step: int) -> None:
    expected = state_of(step)
    assert torch.equal(state["w"], expected["w"])
    assert torch.equal(state["v"], expected["v"])
    assert state["step"] == step


class Job:
    """A Checkpointer, and the events of its mirror."""

    def __init__(self, checkpointer: ckpt.Checkpointer, seen: list[Event]) -> None:
        self.checkpointer = checkpointer
        self.seen = seen

    def save(self, *steps: int) -> None:
        for step in steps:
            self.checkpointer.save(state_of(step), step)

    def restore(self, step: int | None = None) -> tuple[int | None, str]:
        """Restore, check every element, and return the step and the root it came from."""
        state = state_of(0)
        found = self.checkpointer.restore(state, step)
        report = self.checkpointer.last_restore
        if found is None or report is None:
            return None, ""
        assert_state(state, found)
        return found, report.root

    @property
    def copied(self) -> list[int]:
        return [event.step for event in self.seen if isinstance(event, MirrorDone)]

    @property
    def failures(self) -> list[MirrorFailed]:
        return [event for event in self.seen if isinstance(event, MirrorFailed)]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 40
        while not condition():
            assert time.monotonic() < deadline, self.seen
            self.checkpointer.maybe_finalize()
            time.sleep(0.02)

    def copy(self, *steps: int) -> None:
        """Save steps, each of which is due, and wait until each is in the mirror."""
        for step in steps:
            self.save(step)
            self.wait(lambda step=step: step in self.copied)  # type: ignore[misc]


Jobs = Callable[..., contextlib.AbstractContextManager[Job]]
"""`job`, or with some of its options."""


@contextlib.contextmanager
def job(root: Path | str, mirror: ckpt.Mirror, **options: Any) -> Iterator[Job]:
    """Run a job. The events are those of this process, so jobs that overlap see those of both."""
    seen: list[Event] = []
    staging = ckpt.Staging(file_bytes=300_000, compression=options.pop("compression", None))
    with ckpt.observe(seen.append) as observation:
        with ckpt.Checkpointer(root, staging=staging, mirror=mirror, **options) as checkpointer:
            yield Job(checkpointer, seen)
        observation.close()


def mirror_of(root: Path | str, **options: Any) -> ckpt.Mirror:
    return ckpt.Mirror(root, **({"close_timeout": timedelta(seconds=30)} | options))


def mirror_processes() -> list[psutil.Process]:
    """Return the mirror workers of this process."""
    found = []
    for child in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "ckpt-mirror":
                found.append(child)
    return found


def mirror_process() -> psutil.Process:
    """Return the one mirror worker of this process, as soon as it has been forked."""
    deadline = time.monotonic() + 40
    while not (found := mirror_processes()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (process,) = found
    return process


def files_of(step: Path) -> dict[str, bytes]:
    return {str(path.relative_to(step)): path.read_bytes() for path in sorted(step.rglob("*")) if path.is_file()}


def damage(step: Path) -> str:
    """Change a byte of a pack file, and return its name."""
    pack = min((step / "packs").rglob("rank_*"))
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.write_bytes(data)
    return pack.name
