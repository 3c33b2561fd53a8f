"""Checkpoints for the training function of Ray Train: a published step is a `ray.train.Checkpoint`, without a copy.

    storage_path/NAME/            RunConfig(storage_path=, name=)
    ├── steps/step_00000100/      run_root(): the root of the Checkpointer; Ray gets the path of a step
    └── checkpoint_manager_snapshot.json

Runs in Ray's workers, in the thread that trains.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ckpt

try:
    import ray.train
    from ray.train import CheckpointUploadMode
except ImportError as error:
    raise ImportError("ckpt.integrations.ray needs Ray 2.50 or newer: pip install 'ckpt-inprocess[ray]'") from error

__all__ = ["report", "run_root"]


def run_root(folder: str = "steps") -> str:
    """Return the directory `folder` in the storage of this run: a root whose steps Ray takes where they are.

    ValueError if the storage of the run is no file system of the nodes: there a step is no directory.
    """
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ValueError(
            f"the storage of this run is of the kind {storage.storage_filesystem.type_name!r}, where a step is no "
            "directory that Ray could take: give RunConfig a storage_path on a file system that all nodes see, or "
            "give the Checkpointer a root of its own, and call ray.train.report with metrics only"
        )
    return os.path.join(storage.experiment_fs_path, folder)


def report(checkpointer: ckpt.Checkpointer, metrics: Mapping[str, Any]) -> int | None:
    """Call `ray.train.report` with the newest step that was published or restored, unless Ray has it already.

    All workers call it at the same steps of the training: it waits for all of them. It does not wait for saves in
    flight, which the next call reports; call `checkpointer.maybe_finalize(blocking=True)` before the last one. The root
    has to be in the storage of the run, see `run_root`. The metrics that were saved with the step come with it, and
    count more than `metrics`, so that Ray's `checkpoint_score_attribute` is about the step. Nothing is copied.

    Return the step that Ray got, on rank 0; None on other ranks, and if there is no new one.
    """
    checkpoint, step, values = None, checkpointer.current_step, dict(metrics)
    if step is not None and ray.train.get_context().get_world_rank() == 0:  # that of one worker is that of the run
        with ckpt.open(checkpointer.root, step) as opened:
            path, saved = opened.path, opened.summary["metrics"]
        known = ray.train.get_checkpoint()
        if known is None or known.path != path:
            checkpoint = ray.train.Checkpoint(path, ray.train.get_context().get_storage().storage_filesystem)
            values |= saved
    ray.train.report(values, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    return None if checkpoint is None else step
