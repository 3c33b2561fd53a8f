from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ckpt.interop import states
from tests.support import run_ranks


@dataclass(frozen=True)
class Saved:
    """Published steps by name, and the content of the one named ``layouts``."""

    steps: dict[str, Path]
    layouts: dict[tuple[str | int, ...], tuple[str, list[int], bytes]]


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return steps that no test changes."""
    folder = tmp_path_factory.mktemp("interop")
    run_ranks(states.save_many_dtypes, 2, folder)
    results: Any = run_ranks(states.save_layouts, 4, folder)
    steps = {name: folder / name / "step_00000005" for name in ("plain", "zstd", "large")}
    steps["layouts"] = folder / "layouts" / "step_00000012"
    return Saved(steps, results[0].value)
