"""Files that shrink while they are read from a map: an error that names the place, and not the death of the process."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer, native
from tests.support.saves import save_here

COMPILER = shutil.which("gcc") or shutil.which("clang")

_SHRINKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *mmap(void *at, size_t bytes, int access, int flags, int fd, off_t offset) {
    void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    void *memory = real(at, bytes, access, flags, fd, offset);
    char link[64], path[4096] = {0}, *shrinks = getenv("SHRINKS");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (fd >= 0 && access == PROT_READ && readlink(link, path, sizeof path - 1) > 0 && strstr(path, shrinks)) {
        fprintf(stderr, "mapped\\n");
        if (truncate(path, atol(getenv("TO")))) abort();
    }
    return memory;
}

static void writes(int number, siginfo_t *info, void *context) {
    static int calls;
    if (write(1, "handler\\n", 8) < 0 || ++calls == 3) _exit(1);
}

static void fails(int number, siginfo_t *info, void *context) { *(volatile char *)info->si_addr; }

void install(int number, const char *handler) {
    struct sigaction action = {.sa_flags = SA_SIGINFO};
    if (!strcmp(handler, "called once")) action.sa_sigaction = writes, action.sa_flags |= SA_RESETHAND;
    if (!strcmp(handler, "fails itself")) action.sa_sigaction = fails;
    if (!strcmp(handler, "ignored")) action.sa_handler = SIG_IGN;
    sigaction(number, &action, NULL);
}

void lose_memory(int number) { /* as the kernel tells of memory that is lost, and not in use by an instruction */
    siginfo_t info = {.si_signo = number, .si_code = BUS_MCEERR_AO};
    syscall(SYS_rt_sigqueueinfo, getpid(), number, &info);
}
"""

_RESTORE = """
import sys
from pathlib import Path
import torch
from ckpt import Checkpointer, CheckpointCorruptError

packs, root = sys.argv[1:]
for path in Path(packs).rglob("rank_*"):
    path.read_bytes()  # so that the page cache has all of it
with Checkpointer(root, read_only=True) as checkpointer:
    try:
        checkpointer.restore({"weight": torch.zeros(1 << 20)}, 1)
    except CheckpointCorruptError as error:
        print(error)
"""

_READ = """
import ctypes, mmap, signal, sys
import numpy as np
from ckpt import native

path, before, then = sys.argv[1:]
target = np.empty(1 << 20, np.uint8)
segments = [(0, len(target), 0, target.__array_interface__["data"][0], len(target), 1, 0, 0)]

def read():
    with open(path, "rb") as file:
        print(native.read_checked(file.fileno(), np.array(segments, native.SEGMENT)), flush=True)

if before:
    ctypes.CDLL(None).install(signal.SIGBUS, before.encode())
read()
if then == "another handler":
    signal.signal(signal.SIGBUS, print)
    read()
if then == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
    read()
if then == "own map":  # of the program, which ckpt does not read
    with open(path + "-other", "w+b") as file:
        file.truncate(1 << 20)
        memory = mmap.mmap(file.fileno(), 1 << 20)
        file.truncate(0)
        memory[0]
if then == "raised":
    signal.raise_signal(signal.SIGBUS)
if then == "memory is lost":
    ctypes.CDLL(None).lose_memory(signal.SIGBUS)
print("end")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a library by which a file shrinks as soon as it is mapped."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shrinks.c").write_text(_SHRINKS)
    built = [COMPILER, "-O1", "-shared", "-fPIC", "-o", folder / "shrinks.so", folder / "shrinks.c", "-ldl"]
    subprocess.run(built, check=True, timeout=50)
    return folder / "shrinks.so"


def _run(
    program: str, shim: Path, path: Path, to: int, *options: str, arguments: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    """Run a program, in which files below `path` have `to` bytes from when they are mapped on."""
    environment = {"LD_PRELOAD": str(shim), "SHRINKS": str(path), "TO": str(to), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, *options, "-c", program, str(path), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    if "mapped" not in done.stderr:
        pytest.skip("this kernel, file system or processor is one where no file is mapped")
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a block with its checksum, which the page cache then has."""
    content = b"0123" * (256 << 10)
    path = tmp_path / "file"
    path.write_bytes(content + native.crc32c(content).to_bytes(4, "little"))
    return path


def test_a_restore_names_what_is_missing(tmp_path: Path, shim: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"weight": torch.arange(1 << 20, dtype=torch.float32)}, 1)
    packs = tmp_path / "step_00000001" / "packs"
    code, out, _ = _run(_RESTORE, shim, packs, 1 << 20, arguments=(str(tmp_path),))
    assert code == 0
    assert "tensor weight, chunk (0,)" in out
    assert "rank_00000_000" in out
    assert "offset 1048576" in out


@pytest.mark.parametrize("to", [0, 512 << 10])
def test_a_file_that_shrinks_while_it_is_read(file: Path, shim: Path, to: int) -> None:
    code, out, errors = _run(_READ, shim, file, to, "-X", "faulthandler", arguments=("", ""))
    assert (code, out) == (0, "False\nend\n")
    assert "Fatal" not in errors


@pytest.mark.parametrize("then", ["own map", "raised"])
@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")], ids=["no handler", "faulthandler"])
def test_other_bus_errors_are_those_of_the_program(file: Path, shim: Path, then: str, options: tuple[str, ...]) -> None:
    """They end the process, and the handler that was there before is called."""
    code, out, errors = _run(_READ, shim, file, file.stat().st_size, *options, arguments=("", then))
    assert (code, out) == (-signal.SIGBUS, "True\n")
    assert ("Fatal Python error: Bus error" in errors) == bool(options)


@pytest.mark.parametrize(
    ("before", "then", "expected"),
    [
        ("none", "raised", (-signal.SIGBUS, "True\n")),
        ("none", "memory is lost", (-signal.SIGBUS, "True\n")),
        ("ignored", "raised", (0, "True\nend\n")),
        ("called once", "own map", (-signal.SIGBUS, "True\nhandler\n")),
        ("fails itself", "own map", (-signal.SIGBUS, "True\n")),
    ],
)
def test_a_handler_is_called_as_the_kernel_would(
    file: Path, shim: Path, before: str, then: str, expected: tuple[int, str]
) -> None:
    """All have the flag SA_SIGINFO, also those that are no function."""
    code, out, _ = _run(_READ, shim, file, file.stat().st_size, arguments=(before, then))
    assert (code, out) == expected


@pytest.mark.parametrize("then", ["another handler", "blocked"])
def test_no_file_is_mapped_where_the_signal_would_not_come(file: Path, shim: Path, then: str) -> None:
    """Another handler would get it for a page that cannot be read; where it is blocked, it ends the process."""
    code, out, errors = _run(_READ, shim, file, file.stat().st_size, arguments=("", then))
    assert (code, out) == (0, "True\nTrue\nend\n")
    assert errors.count("mapped") == 1
