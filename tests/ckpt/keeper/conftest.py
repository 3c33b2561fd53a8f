from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ckpt.keeper.support import end_keepers


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder for temporary files, in which a test finds its own keepers; the path of a socket must be short."""
    folder = Path(tempfile.mkdtemp(prefix="lg"))
    yield folder
    end_keepers(folder)
    shutil.rmtree(folder)
