"""Write a step from an opened checkpoint of another format.

It is written with the plan, the writer and the commit of every save:

    plan -> shared memory: filled with a file from the other format, written, again -> publish

That takes memory for the largest file, about 100 MiB, whatever the size of the tensors, and happens in this process,
without torch.
"""

from __future__ import annotations

import bisect
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError, ConversionError, SaveAbandonedError
from ckpt.formats.lazy_state import LazyState
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.save_plan import make_save_plan
from ckpt.ranks.failure import Failure
from ckpt.saving.layout import RankLayout, make_layout
from ckpt.saving.task import PlannedFile, SaveOptions, WritePlan, WriteTask, pickled_plan
from ckpt.saving.write import ShareWriter
from ckpt.staging.copy_table import CopyOp
from ckpt.storage.chunk_layout import in_pages
from ckpt.storage.interface import Root
from ckpt.storage.names import SaveId
from ckpt.storage.outcomes import Abandoned
from ckpt.values.codec import encode_value
from inprocess.ipc.process import Process
from inprocess.ipc.shared_memory import SharedMemory

_FLAG_BYTES = 4096
_GENERATION = 1


def write_step(state: LazyState, root: Root, step: int, token: int, progress: Callable[[int], None]) -> str:
    """Write and publish a step, for the owner of `root`, whose token is `token`; return its place.

    The step is published as a whole or not at all, even if the process is killed or the other format is damaged.
    `progress` is called with the bytes read since its last call. Raises CheckpointExistsError and StorageError, and
    what reading the other format raises.
    """
    begin = time.time()
    values = [[list(path), None, _encoded(path, value)] for path, value in state.values.items()]
    layout = _layout(state)
    file_bytes = max((in_pages(file.nbytes) for file in layout.plan.files), default=0)
    with SharedMemory.create("ckpt-convert", file_bytes + _FLAG_BYTES) as region:
        pending = root.pending_save(SaveId(step, token, secrets.token_hex(8)))
        task = _task(layout.plan, root, pending.save, region, values, begin)
        files = _Files(state, layout, region.buffer[:file_bytes], progress)
        try:
            ShareWriter(task, memory_of=files.fill).run()
        except SaveAbandonedError as error:
            if files.error is not None:
                raise files.error from None
            outcome = pending.outcome()
            raise CheckpointError(outcome.reason.message if isinstance(outcome, Abandoned) else str(error)) from None
        except BaseException as error:
            if pending.intent() is not None:
                pending.abandon(Failure.of(error, 0))
                pending.root.clean()
            raise
    return root.source_of(step).path


def _layout(state: LazyState) -> RankLayout:
    specs = {path: TensorSpec(t.dtype, t.itemsize, t.shape) for path, t in state.tensors.items()}
    containers = {path: (container, False) for path, container in state.containers.items()}
    description = StateDescription(specs, dict.fromkeys(state.values, False), state.aliases, containers)
    plan = make_save_plan([description], GridOptions())
    boxes = {path: [(Box.whole(t.shape), (0,) * len(t.shape))] for path, t in state.tensors.items()}
    return make_layout(plan, 0, boxes)


def _task(
    plan: WritePlan, root: Root, save: SaveId, region: SharedMemory, values: list[Any], begin: float
) -> WriteTask:
    flag_offset = region.size - _FLAG_BYTES
    region.buffer[flag_offset : flag_offset + 8] = _GENERATION.to_bytes(8, "little")
    staged_s = time.time() - begin
    return WriteTask(
        root=root.path,
        storage=root.options,
        save=save,
        rank=0,
        plan=pickled_plan(plan),
        region=region,
        flag_offset=flag_offset,
        generation=_GENERATION,
        values=values,
        times={"begin": begin, "wait_s": 0.0, "stage_s": staged_s, "stall_s": staged_s},
        options=SaveOptions(threads=1),  # as there is memory for one file at a time
        trainer=Process.here(),
    )


def _encoded(path: Path, value: Any) -> Any:
    try:
        return encode_value(value)
    except TypeError as error:
        raise ConversionError(f"{display(path)}: {error}") from None


class _Files:
    """The files of the pack, each filled from the other format when it is to be written, in the same memory.

    `error` is the one that filling a file has raised.
    """

    def __init__(
        self, state: LazyState, layout: RankLayout, memory: memoryview, progress: Callable[[int], None]
    ) -> None:
        self.error: Exception | None = None
        self._state = state
        self._layout = layout
        self._memory = memory
        self._progress = progress
        self._ops = layout.copies.ops  # in the order of the pack, as the constants
        self._op_offsets = [op.offset for op in self._ops]
        self._constant_offsets = [offset for offset, _ in layout.constants]

    def fill(self, file: PlannedFile) -> memoryview:
        """Return the memory with a file, for one thread at a time."""
        try:
            self._fill(file)
        except Exception as error:
            self.error = error
            raise
        return self._memory[: in_pages(file.nbytes)]

    def _fill(self, file: PlannedFile) -> None:
        slot = np.frombuffer(self._memory, np.uint8)
        slot[:] = 0
        for offset, data in self._layout.constants[_within(self._constant_offsets, file)]:
            at = offset - file.offset
            self._memory[at : at + len(data)] = data
        for op in self._ops[_within(self._op_offsets, file)]:
            self._copy(replace(op, offset=op.offset - file.offset), slot)

    def _copy(self, op: CopyOp, slot: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        box, tensor = _box(op), self._state.tensors[op.path]
        if op.chunk_bytes is None:
            full = (*op.full_shape, op.itemsize)
            count = int(np.prod(full, dtype=np.int64))
            corner = tuple(slice(0, size) for size in box.shape)
            target = slot[op.offset : op.offset + count].reshape(full)[corner]
            tensor.read(box, target)
        else:
            target = np.empty((*box.shape, op.itemsize), np.uint8)
            tensor.read(box, target)
            for offset, first, size in op.runs():
                slot[offset : offset + size] = target.reshape(-1)[first : first + size]
        self._progress(target.nbytes)


def _within(offsets: list[int], file: PlannedFile) -> slice:
    """Return which of some ascending offsets in the slot are in a file."""
    return slice(bisect.bisect_left(offsets, file.offset), bisect.bisect_left(offsets, file.offset + file.nbytes))


def _box(op: CopyOp) -> Box:
    offset = tuple(part.start for part in op.source)
    return Box(offset, tuple(part.stop - part.start for part in op.source))
