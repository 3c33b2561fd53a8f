from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.ckpt.interop import states
from tests.support import run_ranks


@dataclass(frozen=True)
class Saved:
    """Published steps by name, and the content of the one named ``layouts``."""

    steps: dict[str, Path]
    layouts: dict[tuple[str | int, ...], tuple[str, list[int], bytes]]


def extract(step: Path, folder: Path) -> Path:
    """Write a step as Zarr with a file for each chunk to `folder`, for readers that have stores of their own."""

    async def copy() -> None:
        async for key in store.list():
            value = await store.get(key)
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value.to_bytes())

    with ckpt.zarr_store(step) as store:
        asyncio.run(copy())
    return folder


@pytest.fixture(scope="package")
def extracted(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return some of the steps as Zarr with a file for each chunk."""
    folder = tmp_path_factory.mktemp("extracted")
    return {name: extract(saved.steps[name], folder / name) for name in ("plain", "zstd", "layouts")}


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return steps that no test changes."""
    folder = tmp_path_factory.mktemp("interop")
    run_ranks(states.save_many_dtypes, 2, folder)
    results: Any = run_ranks(states.save_layouts, 4, folder)
    steps = {name: folder / name / "step_00000005" for name in ("plain", "zstd", "large")}
    steps["layouts"] = folder / "layouts" / "step_00000012"
    return Saved(steps, results[0].value)
