"""One rank of a job that torchrun starts again after a fault, with torch.distributed.checkpoint; see `recover`.

    torchrun ... -m tools.bench.recover_relaunched --gb 1 --folder DIR --notes FILE

All ranks end with the fault; those that are started again import, join, allocate, load and train. Each rank of each
attempt appends one line of notes.
"""

import time

_STARTED = time.monotonic()  # before the imports, which are part of a relaunch

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import async_save  # noqa: E402

from tools.bench.workload import State, make_state  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.recover_relaunched")
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--save", action="store_true", help="first write what the relaunched ranks load")
    parser.add_argument("--notes", type=Path, required=True)
    options = parser.parse_args()
    notes: dict[str, Any] = {"started": _STARTED, "imported": time.monotonic()}
    dist.init_process_group("gloo")
    notes["joined"] = time.monotonic()
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    saved = options.folder / "saved"
    if not attempt and options.save:
        _save(make_state(1e9 * options.gb), saved)
    state = _allocate(json.loads((options.folder / "shapes.json").read_text()))
    notes["allocated"] = time.monotonic()
    if attempt:
        load(state, checkpoint_id=saved)
        notes["loaded"] = time.monotonic()
    _train_step()
    notes["stepped"] = time.monotonic()
    if not attempt and rank == 1:
        notes["fault"] = time.monotonic()
    with options.notes.open("a") as file:
        file.write(json.dumps({"rank": rank, "attempt": attempt, **notes}) + "\n")
    if not attempt:
        if rank == 1:
            raise RuntimeError("injected")
        _train_step()
    dist.destroy_process_group()


def _save(state: State, folder: Path) -> None:
    """Write the checkpoint that is loaded later, and the shapes that its tensors are allocated with."""
    async_save(state, checkpoint_id=folder).result()  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        shapes = {part: {name: (list(t.shape), str(t.dtype)) for name, t in own.items()} for part, own in state.items()}
        (folder.parent / "shapes.json").write_text(json.dumps(shapes))
    dist.barrier()


def _allocate(shapes: dict[str, dict[str, tuple[list[int], str]]]) -> State:
    def made(shape: list[int], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))

    return {part: {name: made(*what) for name, what in own.items()} for part, own in shapes.items()}


def _train_step() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


if __name__ == "__main__":
    main()
