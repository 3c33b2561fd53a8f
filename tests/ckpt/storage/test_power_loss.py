"""After a loss of power at any system call of a save, published steps restore bit for bit, and the next start works.

TESTS=full pytest tests/ckpt/storage/test_power_loss.py     all states; else some, spread over the save
"""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage.root import CheckpointRoot
from tests.ckpt.storage.crash_states import Change, Recorder, Tree, crash, materialise
from tests.ckpt.storage.small_saves import SCENARIOS, assert_whole, opened, save
from tests.ckpt.storage.syscalls import Call, Syscalls
from tests.support import run_ranks
from tests.support.selection import FULL

_RANDOM_STATES = 2 if FULL else 1
_EVERY = 1 if FULL else 29


def _record(rank: int, world_size: int, root: Path, name: str) -> tuple[Tree, list[Change]]:
    """Record a save in a separate process, which has ended before its files are inspected."""
    scenario, recorder = SCENARIOS[name], Recorder()
    scenario.prepare(root)
    before = Tree.of(root)
    with opened(root, **scenario.options) as checkpointer:
        with Syscalls().hooked(recorder):
            save(checkpointer, scenario.step)
        return before, recorder.changes


def _without_syncs(call: Call, perform: Callable[..., Any]) -> Any:
    """Skip syncs: power is lost only once, and they would take most of the time."""
    return None if call.name == "fsync" else perform(*call.args)


def _states(before: Tree, changes: list[Change]) -> Iterator[tuple[int, str, Tree]]:
    """Yield the distinct trees that a loss of power can leave, with the number of changes before it."""
    seen = set()
    for count in range(len(changes) + 1):
        if count % _EVERY and count < len(changes):
            continue
        done = changes[:count]
        states = {"is lost": crash(before, done, False), "is there": crash(before, done, True)}
        for seed in range(_RANDOM_STATES):
            states[f"is there in part (seed {seed})"] = crash(before, done, random.Random(1000 * count + seed))
        for what, tree in states.items():
            content = tree.content()
            if content not in seen or count == len(changes):
                seen.add(content)
                yield count, f"{count} changes, of which what is not durable {what}", tree


@pytest.mark.timeout(900 if FULL else 120)
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_was_published_survives_and_the_next_start_works(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    root = tmp_path / "recorded"
    root.mkdir()
    before, changes = run_ranks(_record, 1, root, name)[0].value
    earlier = {scenario.earlier} - {0}
    count = 0
    for done, where, tree in _states(before, changes):
        count += 1
        copy = tmp_path / f"state_{count}"
        materialise(tree, copy)
        try:
            steps = set(assert_whole(copy))
            assert done < len(changes) or scenario.step in steps, f"the step is lost; there are {steps}"
            assert scenario.step in steps or steps >= earlier, f"no step is left but {steps}"
            with opened(copy, **scenario.options) as checkpointer:
                save(checkpointer, 9)
            assert 9 in assert_whole(copy)
            assert CheckpointRoot(str(copy)).pending() == []
        except Exception as error:
            raise AssertionError(f"{name}, after {where}: {type(error).__name__}: {error}") from error
        shutil.rmtree(copy)
    print(f"{name}: {len(changes)} changes, {count} states after a crash")
