"""Every system call of a save fails once: nothing published is damaged or lost, and the next save works.

TESTS=full pytest tests/ckpt/storage/test_faults.py      every call, every fault; else some of them
... -k 'retention and 0'                                        every tenth of those of one scenario
"""

import contextlib
import errno
import gc
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CheckpointError
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.storage.small_saves import SCENARIOS, Scenario, assert_whole, opened, save
from tests.ckpt.storage.syscalls import Call, Syscalls
from tests.support.selection import FULL

_CASES = 5  # per scenario, unless all
_SHARES = range(8) if FULL else range(1)
_CHANGING = {"link", "mkdir", "rename", "renameat2", "rmdir", "unlink"}


class _Fault:
    """A hook that makes call number `at` fail, and records all calls. Syncs are skipped: power is not lost here."""

    def __init__(self, at: int = -1, kind: str = "") -> None:
        self.calls: list[Call] = []
        self._at = at
        self._kind = kind

    @property
    def happened(self) -> bool:
        return len(self.calls) > self._at

    def __call__(self, call: Call, perform: Callable[..., Any]) -> Any:
        self.calls.append(Call(call.name, tuple(arg for arg in call.args if isinstance(arg, (str, int)))))
        if len(self.calls) - 1 != self._at:
            return None if call.name == "fsync" else perform(*call.args)
        if self._kind == "short":
            descriptor, data, *offset = call.args
            return perform(descriptor, data[: len(data) // 2], *offset)
        if self._kind.startswith("done, "):
            perform(*call.args)
        number = getattr(errno, self._kind.removeprefix("done, "))
        raise OSError(number, os.strerror(number))


def _kinds(call: Call) -> list[str]:
    """Return how a call can fail; not EINTR, after which Python repeats the calls of `os`."""
    kinds = ["EIO", "ENOSPC"]
    if call.name in _CHANGING:
        kinds.append("done, EIO")
    if call.name in ("write", "pwrite"):
        kinds.append("short")
    if call.name == "renameat2":
        kinds += ["EINTR", "done, EINTR"]
    return kinds


def _cases(scenario: Scenario, template: Path, folder: Path) -> list[tuple[int, str]]:
    """Return all calls of the save, and how each can fail."""
    for attempt in range(2):  # fills caches, such as the name of this host
        copy = folder / f"counted_{attempt}"
        shutil.copytree(template, copy)
        counted = _Fault()
        with opened(copy, **scenario.options) as checkpointer, Syscalls().hooked(counted):
            save(checkpointer, scenario.step)
    return [(at, kind) for at, call in enumerate(counted.calls) for kind in _kinds(call)]


def _commit(calls: list[Call], step: int) -> int:
    """Return the number of the call that publishes the step."""
    name = f"step_{step:08d}"
    return next(
        (at for at, c in enumerate(calls) if c.name == "renameat2" and c.args[1].endswith(f"/{name}")), len(calls)
    )


def _descriptors() -> Counter[str]:
    """Return the targets of the open descriptors."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


def _run(root: Path, scenario: Scenario, at: int, kind: str) -> None:
    fault = _Fault(at, kind)
    descriptors = _descriptors()
    with opened(root, **scenario.options) as checkpointer:
        failure = ""
        try:
            with Syscalls().hooked(fault):
                save(checkpointer, scenario.step)
        except CheckpointError as error:
            failure = str(error)  # the traceback would keep objects alive
        assert fault.happened, "the call was not made"
        strays = fault.calls[at].name == "unlink"  # a temporary file cannot be removed then
        steps = assert_whole(root, strays=strays)
        assert scenario.step in steps or failure, "the save is no error, and the step is not there"
        assert scenario.step in steps or scenario.earlier in [*steps, 0], f"nothing is left but {steps}"
        commit = _commit(fault.calls, scenario.step)
        of_this_save = not scenario.complete_save_left or at > commit  # else perhaps of the one to adopt
        if fault.calls[at].name == "fsync" and of_this_save and at < commit + 5:
            assert failure, "a sync failed, and the save is no error"
            assert scenario.earlier in [*steps, 0], "the step before was removed, and this one is not durable"
        with Syscalls().hooked(_Fault()):
            save(checkpointer, 9)
        assert 9 in assert_whole(root, strays=strays), "the next save"
    assert CheckpointRoot(str(root)).pending() == [], "the next save has decided nothing"
    left = [str(path.relative_to(root)) for path in root.rglob(".*.tmp")]
    assert strays or not left, f"temporary files are left: {left}"
    for thread in threading.enumerate():
        if thread.name == "ckpt-arena-free":  # closing does not wait for it
            thread.join(20)
    gc.collect()
    assert not (lost := _descriptors() - descriptors), f"descriptors are left open: {lost}"


@pytest.mark.timeout(900 if FULL else 120)
@pytest.mark.parametrize("share", _SHARES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_call_that_fails_loses_nothing(tmp_path: Path, name: str, share: int) -> None:
    scenario, template = SCENARIOS[name], tmp_path / "template"
    template.mkdir()
    scenario.prepare(template)
    every = _cases(scenario, template, tmp_path)
    cases = every[share :: len(_SHARES)] if FULL else random.Random(name).sample(every, _CASES)
    problems = []
    for number, (at, kind) in enumerate(cases):
        root = tmp_path / f"case_{number}"
        shutil.copytree(template, root)
        try:
            _run(root, scenario, at, kind)
        except Exception as error:
            problems.append(f"call {at}, {kind}: {type(error).__name__}: {error}")
        shutil.rmtree(root)
    print(f"{name}: {len(cases)} of {len(every)} faults")
    assert not problems, f"{len(problems)} of {len(cases)}:\n" + "\n".join(problems)


@pytest.mark.parametrize("kind", ["EINTR", "done, EINTR"])
def test_a_commit_that_a_signal_interrupts_is_repeated(tmp_path: Path, kind: str) -> None:
    """Python does not repeat this call, which is not one of `os`. It is durable before the older step is removed."""
    scenario = SCENARIOS["retention"]
    for name in ("counted", "root"):
        (tmp_path / name).mkdir()
        scenario.prepare(tmp_path / name)
    counted = _Fault()
    with opened(tmp_path / "counted", **scenario.options) as checkpointer, Syscalls().hooked(counted):
        save(checkpointer, scenario.step)
    commit = _commit(counted.calls, scenario.step)
    fault = _Fault(commit, kind)
    with opened(tmp_path / "root", **scenario.options) as checkpointer, Syscalls().hooked(fault):
        save(checkpointer, scenario.step)
    assert assert_whole(tmp_path / "root") == [scenario.step]
    names = [call.name for call in fault.calls[commit:]]
    assert names[:2] == ["renameat2", "renameat2"]
    removal = names.index("renameat2", 2)
    assert "fsync" in names[:removal]
