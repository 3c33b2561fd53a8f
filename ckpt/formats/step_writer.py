"""Write a step from an opened checkpoint of another format.

It is written with the plan, the writer and the commit of every save:

    plan -> slot of shared memory: filled with a batch from the other format, written, again -> publish

That takes about `_SLOT_BYTES` of memory, whatever the size of the tensors, and happens in this process, without torch.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError, ConversionError, SaveAbandonedError
from ckpt.formats.state import LazyState
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.save_plan import make_save_plan
from ckpt.saving.layout import RankLayout, make_layout
from ckpt.saving.task import BatchWritten, Report, SaveOptions, WriteTask
from ckpt.saving.write import write_share
from ckpt.staging.copy_table import CopyOp
from ckpt.storage.interface import Pending, Root
from ckpt.storage.names import SaveId
from ckpt.storage.outcomes import Abandoned, Reason
from ckpt.storage.pack_writers import WrittenFile
from ckpt.values.codec import encode_value
from inprocess.ipc.process import Process
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["write_step"]

_SLOT_BYTES = (128 << 20) + (1 << 20)  # more than the largest file
_FLAG_BYTES = 4096
_GENERATION = 1


def write_step(state: LazyState, root: Root, step: int, token: int, progress: Callable[[int], None]) -> str:
    """Write and publish a step, for the owner of `root`, whose token is `token`; return its place.

    The step is published as a whole or not at all, even if the process is killed or the other format is damaged.
    `progress` is called with the bytes read since its last call. Raises CheckpointExistsError and StorageError, and
    what reading the other format raises.
    """
    begin = time.time()
    layout = _layout(state)
    with SharedMemory.create("ckpt-convert", layout.plan.slot_bytes + _FLAG_BYTES) as region:
        pending = root.pending_save(SaveId(step, token, secrets.token_hex(8)))
        try:
            _write_batches(state, layout, pending, region, begin, progress)
        except SaveAbandonedError as error:
            outcome = pending.outcome()
            raise CheckpointError(outcome.reason.message if isinstance(outcome, Abandoned) else str(error)) from None
        except BaseException as error:
            if pending.intent() is not None:
                pending.abandon(Reason(0, type(error).__name__, str(error)))
                pending.root.clean()
            raise
    return root.source_of(step).path


def _layout(state: LazyState) -> RankLayout:
    specs = {path: TensorSpec(t.dtype, t.itemsize, t.shape) for path, t in state.tensors.items()}
    containers = {path: (container, False) for path, container in state.containers.items()}
    description = StateDescription(specs, dict.fromkeys(state.values, False), state.aliases, containers)
    plan = make_save_plan([description], GridOptions())
    boxes = {path: [(Box.whole(t.shape), (0,) * len(t.shape))] for path, t in state.tensors.items()}
    return make_layout(plan, 0, boxes, _SLOT_BYTES)


def _write_batches(
    state: LazyState,
    layout: RankLayout,
    pending: Pending,
    region: SharedMemory,
    begin: float,
    progress: Callable[[int], None],
) -> None:
    values = [[list(path), None, _encoded(path, value)] for path, value in state.values.items()]
    plan_bytes = pickle.dumps(layout.plan, protocol=pickle.HIGHEST_PROTOCOL)
    flag_offset = region.size - _FLAG_BYTES
    region.buffer[flag_offset : flag_offset + 8] = _GENERATION.to_bytes(8, "little")
    earlier: list[WrittenFile] = []

    def take(report: Report) -> None:
        if isinstance(report, BatchWritten):
            earlier.extend(report.files)

    for batch in range(layout.plan.batches):
        _fill(state, layout, batch, region, progress)
        last = batch == layout.plan.batches - 1
        staged_s = time.time() - begin
        task = WriteTask(
            root=pending.root.path,
            storage=pending.root.options,
            save=pending.save,
            rank=0,
            plan=plan_bytes,
            region=region,
            flag_offset=flag_offset,
            generation=_GENERATION,
            batch=batch,
            last=last,
            values=values if last else [],
            times={"begin": begin, "wait_s": 0.0, "stage_s": staged_s, "stall_s": staged_s},
            options=SaveOptions(),
            trainer=Process.here(),
            earlier=tuple(earlier) if last else (),
        )
        write_share(task, take)


def _encoded(path: Path, value: Any) -> Any:
    try:
        return encode_value(value)
    except TypeError as error:
        raise ConversionError(f"{display(path)}: {error}") from None


def _fill(
    state: LazyState, layout: RankLayout, batch: int, region: SharedMemory, progress: Callable[[int], None]
) -> None:
    slot = np.frombuffer(region.buffer, np.uint8)
    slot[:-_FLAG_BYTES] = 0
    layout.prepare(batch, region.buffer)
    for op in layout.copies[batch].ops:
        box = _box(op)
        if op.chunk_bytes is None:
            full = (*op.full_shape, op.itemsize)
            count = int(np.prod(full, dtype=np.int64))
            corner = tuple(slice(0, size) for size in box.shape)
            target = slot[op.offset : op.offset + count].reshape(full)[corner]
            state.tensors[op.path].read(box, target)
        else:
            target = np.empty((*box.shape, op.itemsize), np.uint8)
            state.tensors[op.path].read(box, target)
            for offset, first, size in op.runs():
                slot[offset : offset + size] = target.reshape(-1)[first : first + size]
        progress(target.nbytes)


def _box(op: CopyOp) -> Box:
    offset = tuple(part.start for part in op.source)
    return Box(offset, tuple(part.stop - part.start for part in op.source))
