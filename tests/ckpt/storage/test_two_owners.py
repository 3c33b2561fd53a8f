"""Two jobs on one root: the second must never lose a step, in orders of events found by a model.

See tests/ckpt/crash/ownership_model.py. Both jobs run in this process; one acts at a chosen point of the other.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import CheckpointError
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.storage.small_saves import assert_whole, opened, save, state_of
from tests.ckpt.storage.syscalls import Call, Syscalls


def _restore(root: Path) -> int | None:
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        return checkpointer.restore(state_of(-1.0))


def test_a_first_save_that_fails_leaves_a_step_to_restore(tmp_path: Path) -> None:
    """The earlier owner has continued, and removed the step that the later one restored."""

    def fails(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "pwrite":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return perform(*call.args)

    with opened(tmp_path, keep_last=1) as earlier, opened(tmp_path, keep_last=1) as later:
        save(earlier, 1)
        assert later.restore(state_of(-1.0)) == 1
        save(earlier, 2)
        assert CheckpointRoot(str(tmp_path)).steps() == [2]
        with pytest.raises(CheckpointError), Syscalls().hooked(fails):
            save(later, 2)
        assert _restore(tmp_path) == 2
        save(later, 2)
        assert assert_whole(tmp_path) == [2]
        assert len(list((tmp_path / ".superseded").iterdir())) == 1
        save(later, 3)
        assert assert_whole(tmp_path) == [3]


@pytest.mark.parametrize("reuse_files", [False, True], ids=["remove", "reuse"])
def test_retention_of_an_earlier_owner_leaves_the_steps_of_the_later_one(tmp_path: Path, reuse_files: bool) -> None:
    """It has checked the token, and waits so long before the rename that another job saves the same step."""
    options = {"keep_last": 1, "reuse_files": reuse_files}
    intervened = False

    with opened(tmp_path, **options) as earlier, opened(tmp_path, **options) as later:
        save(earlier, 1)
        assert later.restore(state_of(-1.0)) == 1
        save(earlier, 2)

        def waits(call: Call, perform: Callable[..., Any]) -> Any:
            nonlocal intervened
            if call.name == "renameat2" and call.args[0].endswith("step_00000002") and not intervened:
                intervened = True
                save(later, 2)
            return perform(*call.args)

        with pytest.raises(ckpt.FencedError), Syscalls().hooked(waits):
            save(earlier, 3)
        assert intervened
        assert assert_whole(tmp_path) == [2]
        save(later, 3)
        assert assert_whole(tmp_path) == [3]
