"""Progress of a restore: on a terminal of rank 0 only, after a while, and never in a restart hook."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.support.template import REPOSITORY, quick_python

# A restore that ends when its progress was shown, or soon where none is expected.
_PROGRAM = """
import sys, threading
from datetime import timedelta
import torch
import ckpt
from ckpt import progress
from ckpt.loading.fetch import Fetch

root, expected, how = sys.argv[1], sys.argv[2] == "yes", sys.argv[3]
state = {"w": torch.ones(1000)}
with ckpt.Checkpointer(root) as checkpointer:
    checkpointer.save(state, 1)

shown = threading.Event()
write, read = progress._write, Fetch.read
def note(text):
    write(text)
    if "100% of" in text:  # the line may be drawn before anything is read, too
        shown.set()
def wait(self, *wanted):
    read(self, *wanted)
    assert shown.wait(20 if expected else 0.3) == expected
progress._write, Fetch.read = note, wait
progress._QUIET_S, progress._REDRAW_S = 0.0, 0.01

with ckpt.Checkpointer(root) as checkpointer:
    other = {"w": torch.zeros(1000)}
    if how == "restart":
        checkpointer.register(**other)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=5))
    else:
        checkpointer.restore(other)
    assert other["w"].sum() == 1000
print("shown" if shown.is_set() else "silent")
"""


def run(root: Path, expected: bool, how: str = "restore", **environment: str) -> tuple[str, str]:
    """Run a restore with stderr on a terminal; return what was on stdout, and on the terminal."""
    master, slave = pty.openpty()
    line = [quick_python(), "-c", _PROGRAM, str(root), "yes" if expected else "no", how]
    process = subprocess.Popen(
        line, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=slave, env={**os.environ, **environment}, text=True
    )
    os.close(slave)
    out, _ = process.communicate(timeout=50)
    text = b""
    try:
        while chunk := os.read(master, 65536):
            text += chunk
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.returncode == 0, text.decode()
    return out.strip(), text.decode()


def test_a_long_restore_shows_its_progress_and_leaves_nothing(tmp_path: Path) -> None:
    out, terminal = run(tmp_path, True)
    assert out == "shown"
    assert "restoring step 1 (rank 0): 100% of 0.00 GB" in terminal
    assert terminal.endswith(" \r")
    assert "\n" not in terminal


@pytest.mark.parametrize(("how", "off"), [("restore", "0"), ("restart", "1")])
def test_no_progress_where_it_is_turned_off_or_in_a_restart(tmp_path: Path, how: str, off: str) -> None:
    assert run(tmp_path, False, how, CKPT_PROGRESS=off) == ("silent", "")


def test_no_progress_without_a_terminal(tmp_path: Path) -> None:
    line = [quick_python(), "-c", _PROGRAM, str(tmp_path), "no", "restore"]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "silent\n", "")
