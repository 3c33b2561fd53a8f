"""The dask example reads saved tensors, and only the chunks that it needs."""

import subprocess
from pathlib import Path

import numpy as np
import torch

from ckpt import Checkpointer, Staging
from tests.support.template import quick_python

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "read_with_dask.py"


def test_one_tensor(tmp_path: Path) -> None:
    from examples.read_with_dask import open_tensor

    weight = torch.arange(24_000).reshape(240, 100)
    with Checkpointer(tmp_path, staging=Staging(file_bytes=40_000)) as checkpointer:
        checkpointer.save({"model": {"weight": weight, "half": weight.bfloat16()}}, 1)
    step = tmp_path / "step_00000001"

    command = [quick_python(), str(SCRIPT), str(step), "model/weight"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    tensor = open_tensor(str(step), "model/weight")
    assert tensor.npartitions > 2
    assert result.stdout == f"int64 (240, 100) in {tensor.npartitions} chunks, largest 23999\n"

    half = open_tensor(str(step), "model/half")
    assert half.compute().tobytes() == weight.bfloat16().view(torch.uint8).numpy().tobytes()

    sorted((step / "packs" / "000").iterdir())[-1].write_bytes(b"damaged")
    assert np.array_equal(tensor[:5].compute(), weight[:5])
