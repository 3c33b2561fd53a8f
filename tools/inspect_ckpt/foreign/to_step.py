"""Write a checkpoint of another format as a step of ours: with the plan, the writer and the commit of every save.

    plan -> one slot of shared memory: fill a piece from the other format, write it, again -> publish

Takes about `_SLOT_BYTES` of memory, whatever the size of the tensors. All in this process, and without torch.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError, SaveAbandonedError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.grid import GridOptions
from ckpt.planning.save_plan import make_save_plan
from ckpt.saving.layout import RankLayout, make_layout
from ckpt.saving.task import BatchWritten, Report, SaveOptions, WriteTask
from ckpt.saving.write import write_share
from ckpt.staging.copy_table import CopyOp
from ckpt.storage.commit import Abandoned, CheckpointRoot, PendingSave, Reason, SaveId
from ckpt.storage.writers import WrittenChunk
from ckpt.values.codec import encode_value
from inprocess.ipc.process import Process
from inprocess.ipc.shared_memory import SharedMemory

from ..opening import CannotReadError
from ..owning import owning
from .state import ForeignState

__all__ = ["write_step"]

_SLOT_BYTES = (128 << 20) + (1 << 20)  # two files and what belongs to them
_PACK_BYTES = 64 << 20
_FLAG_BYTES = 4096
_GENERATION = 1


def write_step(state: ForeignState, root: str, step: int, progress: Callable[[int], None]) -> str:
    """Write and publish; returns the directory of the step. `progress` is called with the bytes read since.

    The step is published as a whole or not at all, also when this is killed or the other format turns out to be
    damaged. Raises CheckpointExistsError and StorageError, and what reading the other format raises.
    """
    begin = time.time()
    part = _part(state)
    owned = CheckpointRoot(root)
    with (
        owning(owned) as token,
        SharedMemory.create("inspect-ckpt-convert", part.plan.slot_bytes + _FLAG_BYTES) as region,
    ):
        pending = PendingSave(owned, SaveId(step, token, secrets.token_hex(8)))
        try:
            _write_pieces(state, part, pending, region, begin, progress)
        except SaveAbandonedError as error:
            outcome = pending.outcome()
            raise CheckpointError(outcome.reason.message if isinstance(outcome, Abandoned) else str(error)) from None
        except BaseException as error:
            if pending.intent() is not None:
                pending.abandon(Reason(0, type(error).__name__, str(error)))
                pending.root.clean()
            raise
    return owned.step_path(step)


def _part(state: ForeignState) -> RankLayout:
    specs = {path: TensorSpec(t.dtype, t.itemsize, t.shape) for path, t in state.tensors.items()}
    description = StateDescription(specs, dict.fromkeys(state.values, False), state.aliases)
    plan = make_save_plan([description], GridOptions(pack_below_bytes=_pack_below(state)))
    boxes = {path: [(Box.whole(t.shape), (0,) * len(t.shape))] for path, t in state.tensors.items()}
    return make_layout(plan, 0, boxes, _SLOT_BYTES, None)


def _pack_below(state: ForeignState) -> int:
    """Which tensors share one file. It is staged as a whole, so a million small tensors must not all be in it."""
    for below in (GridOptions().pack_below_bytes, 1 << 10, 1 << 6):
        small = [tensor.nbytes + 16 for tensor in state.tensors.values() if tensor.nbytes <= below]
        if sum(small) <= _PACK_BYTES:
            return below
    return 0


def _write_pieces(
    state: ForeignState,
    part: RankLayout,
    pending: PendingSave,
    region: SharedMemory,
    begin: float,
    progress: Callable[[int], None],
) -> None:
    values = [[list(path), None, _encoded(path, value)] for path, value in state.values.items()]
    plan_bytes = pickle.dumps(part.plan, protocol=pickle.HIGHEST_PROTOCOL)
    flag_offset = region.size - _FLAG_BYTES
    region.buffer[flag_offset : flag_offset + 8] = _GENERATION.to_bytes(8, "little")
    earlier: list[WrittenChunk] = []

    def take(report: Report) -> None:
        if isinstance(report, BatchWritten):
            earlier.extend(report.chunks)

    for piece in range(part.plan.batches):
        _fill(state, part, piece, region, progress)
        last = piece == part.plan.batches - 1
        staged_s = time.time() - begin
        task = WriteTask(
            root=pending.root.path,
            save=pending.save,
            rank=0,
            plan=plan_bytes,
            region=region,
            flag_offset=flag_offset,
            generation=_GENERATION,
            batch=piece,
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
        raise CannotReadError(f"{display(path)}: {error}") from None


def _fill(
    state: ForeignState, part: RankLayout, piece: int, region: SharedMemory, progress: Callable[[int], None]
) -> None:
    slot = np.frombuffer(region.buffer, np.uint8)
    part.clear_gaps(piece, region.buffer)
    for op in part.copies[piece].ops:
        box = _box(op)
        if op.piece_bytes is None:
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
