"""Two ranks on one GPU compare what they have. Skipped, cleanly, where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import SaveAbandonedError
from tests.support import run_ranks

pytestmark = pytest.mark.gpu


def _one_parameter_differs(rank: int, world_size: int, root: Path, overlap: bool) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)).cuda()
    strided = torch.zeros(300, 300, device="cuda").t()
    outcomes = []
    with ckpt.Checkpointer(root, staging=ckpt.Staging(overlap=overlap)) as checkpointer:
        for step in (1, 2):
            try:
                checkpointer.save({"model": model, "strided": strided}, step)
                outcomes.append("published")
            except SaveAbandonedError as error:
                outcomes.append(str(error))
            with torch.no_grad():
                model[1].weight.fill_(rank)
                strided.fill_(rank)
    return outcomes


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_that_differ_on_a_gpu_are_an_error(tmp_path: Path, overlap: bool) -> None:
    for result in run_ranks(_one_parameter_differs, 2, tmp_path, overlap):
        before, after = result.value
        assert before == "published"
        assert "model/1.weight (rank 1 unlike rank 0)" in after
        assert "strided (rank 1 unlike rank 0)" in after
        assert "0.weight" not in after
