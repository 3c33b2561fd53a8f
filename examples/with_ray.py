"""Training under Ray Train, saved in the background. A worker that fails is started again by Ray, at the newest step.

    python examples/with_ray.py /data/ray --name run7 --fail-at 25

Start it again with the same name and more --steps: it goes on.
"""

import argparse
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import ckpt
from ckpt.integrations.ray import report, run_root


def train(config: dict[str, int]) -> None:
    """Train on each worker, in a thread of it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    parallel = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.RngState()}

    with ckpt.Checkpointer(run_root()) as checkpointer:
        start = checkpointer.restore(state) or 0  # the newest published step, whether Ray has heard of it or not
        for step in range(start + 1, config["steps"] + 1):
            optimizer.zero_grad()
            loss = parallel(torch.randn(16, 256)).square().mean()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                checkpointer.maybe_finalize(blocking=True)  # the last save, which has had ten steps of time
                report(checkpointer, {"loss": loss.item()})  # all workers, at the same steps
                checkpointer.async_save(state, step, metrics={"step": step, "loss": loss.item()})
            checkpointer.maybe_finalize()  # if a save failed, every worker gets the error here
            if step == config["fail_at"] and start == 0 and ray.train.get_context().get_world_rank() == 1:
                raise RuntimeError("a fault of one worker")
        checkpointer.maybe_finalize(blocking=True)
        report(checkpointer, {"start": start})


def fit(storage: str, name: str, workers: int, config: dict[str, int]) -> ray.train.Result:
    """Train on Ray's cluster, which this starts if there is none."""
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),  # Ray removes the steps that it was told of
        ),
    )
    return trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser(description="training under Ray Train")
    parser.add_argument("storage", help="a directory that all nodes see")
    parser.add_argument("--name", default="run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fail-at", type=int, default=0, help="the step after which a worker fails, once")
    options = parser.parse_args()
    result: Any = fit(
        options.storage, options.name, options.workers, {"steps": options.steps, "fail_at": options.fail_at}
    )
    with result.checkpoint.as_directory() as folder, ckpt.open(folder) as checkpoint:  # in place: nothing is copied
        print(f"began after step {result.metrics['start']}; trained to step {checkpoint.step}")


if __name__ == "__main__":
    main()
