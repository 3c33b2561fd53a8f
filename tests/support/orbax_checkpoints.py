"""Checkpoints that Orbax writes in a process of its own, and what torch should make of them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_PROGRAM = Path(__file__).with_name("orbax_program.py")


def is_orbax_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("orbax", "jax"))


def write_with_orbax(folder: Path) -> Path:
    """Write the checkpoints of `orbax_program` into a folder; return it. Skips the test if Orbax is not installed."""
    if not is_orbax_installed():
        pytest.skip("orbax-checkpoint is not installed")
    command = [sys.executable, str(_PROGRAM), str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert answer.returncode == 0, answer.stderr[-4000:]
    return folder


def expected_state(folder: Path, name: str) -> Any:
    """Return the state that a checkpoint should become."""
    return _state(json.loads((folder / "expected.json").read_text())[name])


def _state(node: dict[str, Any]) -> Any:
    match node:
        case {"dict": items}:
            return {key: _state(item) for key, item in items.items()}
        case {"list": items}:
            return [_state(item) for item in items]
        case {"bytes": data, "dtype": dtype, "shape": shape}:
            elements = torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8)
            return elements.view(getattr(torch, dtype)).view(shape)
        case {"empty": "tuple"}:
            return ()
    return node["value"]
