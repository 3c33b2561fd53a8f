"""The C code runs in a thread with the smallest stack that Python allows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "ckpt" / "native"
COMPILER = shutil.which("gcc") or shutil.which("clang")

_READ_AND_COPY = """
import sys, tempfile, threading
import numpy as np
from ckpt import native

content = np.random.default_rng(1).integers(0, 256, 700_000, np.uint8)
read, copied = np.zeros_like(content), np.zeros_like(content)
address = lambda array: array.__array_interface__["data"][0]
file = tempfile.TemporaryFile()
file.write(content.tobytes() + native.crc32c(content.data).to_bytes(4, "little"))
file.flush()

def work():
    segments = np.array([(0, len(content), 0, address(read), len(content), 1, 0, 0)], native.SEGMENT)
    assert native.read_checked(file.fileno(), segments)
    run = np.zeros(1, native.RUN)
    run["to"], run["from"], run["bytes"] = address(copied), address(content), len(content)
    native.copy_runs(run)

threading.stack_size(int(sys.argv[1]))
threads = [threading.Thread(target=work) for _ in range(8)]  # an overflow of one writes to another
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert np.array_equal(read, content) and np.array_equal(copied, content)
"""


@pytest.mark.parametrize("stack_bytes", [64 << 10, 128 << 10])
def test_threads_with_small_stacks(stack_bytes: int) -> None:
    command = [sys.executable, "-c", _READ_AND_COPY, str(stack_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.c")), ids=lambda source: source.name)
def test_no_function_needs_much_stack(source: Path, tmp_path: Path) -> None:
    assert COMPILER is not None
    flags = ["-std=gnu11", "-O3", "-Werror", "-Wframe-larger-than=4096"]
    done = subprocess.run(
        [COMPILER, *flags, "-c", source, "-o", tmp_path / "object"], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
