import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Return a function that mounts a file system of a type in a new directory; skip the test if not allowed."""
    mounted: list[Path] = []

    def mount(kind: str, options: str = "rw") -> Path:
        path = tmp_path / kind
        path.mkdir()
        command = ["mount", "-t", kind, "-o", options, kind, str(path)]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if answer.returncode:
            pytest.skip(f"cannot mount a {kind}: {answer.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True, timeout=10)
