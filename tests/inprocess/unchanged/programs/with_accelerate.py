"""A loop with `Accelerator`, as its documentation has it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from tests.inprocess.unchanged.programs.journal import begin, digest, note, run, strike


def train() -> str:
    begin()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inputs = torch.randn(48, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    note("ranks", rank=accelerator.process_index, world_size=accelerator.num_processes)
    for step, (x, y) in enumerate(data, start=1):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        strike(step)
        accelerator.backward(loss)
        optimizer.step()
        if step == 1:
            note("first step", weights=digest(accelerator.unwrap_model(model).state_dict()))
    accelerator.wait_for_everyone()
    weights = digest(accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()
    return weights


if __name__ == "__main__":
    run(train)
