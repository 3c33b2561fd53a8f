"""The tests of the C code, and random tables, with AddressSanitizer and UndefinedBehaviorSanitizer.

`TESTS=full` (see `make test-faults`) runs all of them; otherwise only some tables. `FUZZ_SEED` sets
the seed, which is printed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.seeds import seed_of
from tests.support.selection import FULL, full_only

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = sorted((REPOSITORY / "ckpt" / "native").glob("*.c"))
TABLES = 10_000 if FULL else 100

_TESTS = """
import sys
from tests.ckpt.native.fuzz import instead_of_the_installed
instead_of_the_installed(sys.argv[1])
import hypothesis
# As in the conftest, which would import torch.
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("random")
import pytest
options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist"]
options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported already
sys.exit(pytest.main([*options, f"tests/ckpt/native/test_{sys.argv[2]}.py"]))
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """Compile the library; return it with the environment of a process that can load it."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build the C code with sanitizers")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, timeout=50)
    if not os.path.isabs(runtime.stdout.strip()):
        pytest.skip("gcc has no runtime of AddressSanitizer")
    library = tmp_path_factory.mktemp("sanitized") / "_library.so"
    flags = ["-std=gnu11", "-O1", "-g", "-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    built = subprocess.run([compiler, *flags, "-o", library, *SOURCES], capture_output=True, text=True, timeout=50)
    if built.returncode != 0 and "sanitize" in built.stderr:
        pytest.skip(f"gcc cannot build with sanitizers: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    options = {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc", "LD_PRELOAD": runtime.stdout.strip()}
    return str(library), {**os.environ, **options}


def _run(command: list[str], environment: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *command]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.timeout(180)
def test_random_tables(sanitized: tuple[str, dict[str, str]]) -> None:
    library, environment = sanitized
    seed = seed_of("FUZZ_SEED")
    done = _run(["-m", "tests.ckpt.native.fuzz", library, str(seed), str(TABLES)], environment, 170)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)


def test_the_sanitizer_sees_a_write_outside(sanitized: tuple[str, dict[str, str]]) -> None:
    """Otherwise the other tests would prove nothing."""
    library, environment = sanitized
    program = (
        "import sys; from tests.ckpt.native.fuzz import instead_of_the_installed as use; use(sys.argv[1])\n"
        "import numpy as np; from ckpt import native\n"
        "small, large = np.zeros(100, np.uint8), np.zeros(101, np.uint8)\n"
        "address = lambda array: array.__array_interface__['data'][0]\n"
        "native.copy_runs(np.array([(address(small), address(large), 101, 0, 0, 0)], native.RUN))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, library],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.timeout(400)
@full_only
@pytest.mark.parametrize("name", ["native", "update_runs", "mapped"])
def test_all_tests_of_the_c_code(sanitized: tuple[str, dict[str, str]], name: str) -> None:
    library, environment = sanitized
    done = _run(["-c", _TESTS, library, name], environment, 390)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
