"""The trainer's half of a save: name the leaves, plan once, copy this rank's share into a slot, and describe what is
left to do.

    flatten state -> (structure known? else plan: one collective) -> free slot -> copy -> AsyncRequest(PartWriter)

Nothing here touches storage. Runs in the trainer's thread that trains.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckpt.async_calls import AsyncCallsQueue, AsyncRequest
from ckpt.errors import CheckpointError, CheckpointTimeoutError, StateError
from ckpt.paths import display
from ckpt.planning.description import StateDescription, exchange
from ckpt.planning.grid import GridOptions
from ckpt.planning.save_plan import make_save_plan
from ckpt.planning.state_dict import FlatState, flatten
from ckpt.ranks import Ranks
from ckpt.saving.part import Part, make_part
from ckpt.saving.write import PartWriter, SaveOptions
from ckpt.staging.arena import Arena, Slot, SlotState
from ckpt.staging.copy import Staged, stage
from ckpt.storage.commit import CheckpointRoot, PendingSave, Reason, SaveId
from ckpt.storage.documents import encode_value

__all__ = ["Saver", "StagingOptions"]

_log = logging.getLogger("ckpt")
_WAIT_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """How state gets into shared memory. `slot_timeout_s` bounds the wait for a free slot."""

    slots: int = 2
    max_host_bytes: int | None = None
    overlap: bool = False
    slot_timeout_s: float = 600.0
    compression: str | None = None
    grid: GridOptions = field(default_factory=GridOptions)


@dataclass(slots=True)
class _Planned:
    """Everything that stays the same from save to save while the structure of the state does."""

    description: StateDescription
    part: Part
    plan_bytes: bytes
    value_owners: dict[tuple[str | int, ...], bool]
    nonce: bytes


class Saver:
    """Plans and stages. One for each Checkpointer, used by one thread."""

    def __init__(
        self,
        root: str,
        ranks: Ranks,
        queue: AsyncCallsQueue,
        staging: StagingOptions,
        options: SaveOptions,
        epoch: int = 0,
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._queue = queue
        self._staging = staging
        self._options = options
        self._epoch = epoch
        self._arena = Arena(staging.slots, staging.max_host_bytes, pin=True)
        self._pieces_queue: AsyncCallsQueue | None = None
        self._planned: _Planned | None = None
        self._generation = 0
        self._last_step = -1
        self._attempt = 0  # how often in a row the last step was to be saved
        self._stream: torch.cuda.Stream | None = None
        self._hooked: set[int] = set()
        self._overlapping: Staged | None = None

    @property
    def recovers_first(self) -> bool:
        """Whether the coordinator's next save first decides what an earlier run left; false once there was a save."""
        return self._options.recover

    def recovered(self) -> None:
        """What an earlier run left is decided."""
        self._options = replace(self._options, recover=False)

    def warmup(self, state: Any) -> None:
        """Plan, map and fault in the arena, and have the writers started. Collective, like the first save of a
        structure."""
        self._queue.start()
        _, _, planned = self._prepare(state)
        self._fit_arena(planned)

    def request(self, state: Any, step: int, begin: float) -> AsyncRequest:
        """Stage `state`; the request writes it. See `Checkpointer.save_request`."""
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
            raise ValueError(f"step must be an int from 0 to 10**18 - 1, not {step!r}")
        self._attempt = self._attempt + 1 if step == self._last_step else 0
        self._last_step = step
        try:
            flat, encoded, planned = self._prepare(state)
            self._fit_arena(planned)
            save = SaveId(step, self._epoch, self._token(planned, step))
            values = [
                [list(path), _rank_of(own, self._ranks.rank), encoded[path]]
                for path, own in planned.value_owners.items()
            ]
            writer = self._stage_all(planned, flat, save, values, begin)
        except Exception as error:
            self._tell_others(step, error)
            raise
        self.recovered()
        return AsyncRequest(writer, (), [])

    def not_scheduled(self, request: AsyncRequest, step: int, error: Exception) -> None:
        """The queue refused `request`: nobody will run it."""
        if isinstance(request.async_fn, PartWriter):
            request.async_fn.free_slot()
        self._tell_others(step, error)

    def close(self) -> None:
        """Give the arena back. The queue is the Checkpointer's."""
        if self._pieces_queue is not None:
            self._pieces_queue.close(abort=True)
        self._arena.close()

    def _tell_others(self, step: int, error: Exception) -> None:
        """This rank will have no part in a save the others may have scheduled: abandon it, so that they learn why."""
        if self._planned is None or self._ranks.world_size == 1:
            return
        save = SaveId(step, self._epoch, self._token(self._planned, step))
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(CheckpointError):  # then they learn it from their own wait
            reason = Reason(self._ranks.rank, type(error).__name__, str(error), text)
            PendingSave(CheckpointRoot(self._root), save).abandon(reason)

    # -- planning ------------------------------------------------------------------------------------------------------

    def _prepare(self, state: Any) -> tuple[FlatState, dict[tuple[str | int, ...], Any], _Planned]:
        """The leaves, the encoded values, and the plan. The first time all ranks learn what was wrong on any."""
        try:
            flat = flatten(state)
            encoded = _encode_values(flat)
        except Exception as error:
            if self._planned is None:
                self._ranks(_FAILED + f"{type(error).__name__}: {error}".encode())
            raise
        return flat, encoded, self._plan(flat)

    def _plan(self, flat: FlatState) -> _Planned:
        description = flat.describe()
        if self._planned is not None and self._planned.description == description:
            return self._planned
        seeds = self._ranks(_FINE + os.urandom(8))
        for rank, seed in enumerate(seeds):
            if seed.startswith(_FAILED):
                problem = seed.removeprefix(_FAILED).decode(errors="replace")
                raise StateError(
                    f"the state of rank {rank} cannot be stored, nothing was written: {problem}", rank=rank
                )
        nonce = hashlib.blake2b(b"".join(seeds), digest_size=16).digest()
        descriptions = exchange(description, self._ranks)
        plan = make_save_plan(descriptions, self._staging.grid)
        rank = self._ranks.rank
        boxes = {path: leaf.boxes for path, leaf in flat.tensors.items()}
        part = make_part(plan, rank, boxes, self._arena.max_slot_bytes, self._staging.compression)
        owned = {path: False for path, owner in plan.value_owners.items() if owner == rank}
        owned |= {path: True for path, ranks in plan.per_rank_values.items() if rank in ranks}
        plan_bytes = pickle.dumps(part.plan, protocol=pickle.HIGHEST_PROTOCOL)
        self._planned = _Planned(description, part, plan_bytes, owned, nonce)
        if part.plan.pieces > 1:
            _log.warning(
                "rank %d: the state does not fit max_host_bytes=%s and is staged in %d pieces, which makes saves block "
                "training; "
                "raise max_host_bytes to %d to avoid this",
                rank,
                self._staging.max_host_bytes,
                part.plan.pieces,
                self._staging.slots * sum(image.image_bytes for image in part.plan.images),
            )
        return self._planned

    def _token(self, planned: _Planned, step: int) -> str:
        """Different for every save, and the same on all ranks without communication.

        It depends on the nonce they agreed on and on how often this step was tried, and on nothing that a failed call
        on one rank could leave different.
        """
        text = f"{self._epoch}.{step}.{self._attempt}".encode()
        return hashlib.blake2b(text, key=planned.nonce, digest_size=8).hexdigest()

    # -- staging -------------------------------------------------------------------------------------------------------

    def _fit_arena(self, planned: _Planned) -> None:
        needed = planned.part.plan.slot_bytes + _FLAG_BYTES
        if needed > self._arena.slot_bytes:
            while self._arena.in_use():
                self._wait_for_slot(time.monotonic() + self._staging.slot_timeout_s)
            self._arena.resize(-(-needed // _FLAG_BYTES) * _FLAG_BYTES)

    def _stage_all(
        self, planned: _Planned, flat: FlatState, save: SaveId, values: list[Any], begin: float
    ) -> PartWriter:
        """Stage this rank's part. Of one that does not fit a slot, all pieces but the last are written when this
        returns."""
        earlier: list[tuple[str, str, int, int]] = []
        last = planned.part.plan.pieces - 1
        for piece in range(last):
            writer = self._stage_piece(planned, flat, save, piece, [], begin)
            writer.on_written = earlier.extend
            self._write_piece_now(writer)
        writer = self._stage_piece(planned, flat, save, last, values, begin)
        try:
            self._finish_pieces()
        except BaseException:
            writer.free_slot()
            raise
        writer.earlier = earlier
        return writer

    def _stage_piece(
        self, planned: _Planned, flat: FlatState, save: SaveId, piece: int, values: list[Any], begin: float
    ) -> PartWriter:
        deadline = time.monotonic() + self._staging.slot_timeout_s
        slot = self._arena.acquire(save.step, lambda: self._wait_for_slot(deadline))
        try:
            waited = time.perf_counter()
            self._generation += 1
            staged = self._copy(planned.part, flat, slot, piece)
            done = time.perf_counter()
        except BaseException:
            slot.state = SlotState.FREE
            raise
        slot.state = SlotState.WRITING
        times = {
            "begin": time.time() - (done - begin),
            "wait_s": waited - begin,
            "stage_s": done - waited,
            "stall_s": done - begin,
        }
        self._overlapping = None if staged.done else staged
        return PartWriter(
            root=self._root,
            save=save,
            rank=self._ranks.rank,
            plan=planned.plan_bytes,
            region=slot.region,
            flag_offset=self._arena.slot_bytes - _FLAG_BYTES,
            generation=self._generation,
            piece=piece,
            last=piece == planned.part.plan.pieces - 1,
            values=values,
            times=times,
            options=self._options,
            on_slot_free=lambda: setattr(slot, "state", SlotState.FREE),
        )

    def _copy(self, part: Part, flat: FlatState, slot: Slot, piece: int) -> Staged:
        tensors = {path: leaf.local for path, leaf in flat.tensors.items()}
        stream = self._side_stream(flat)
        if part.pack is not None and part.pack.piece == piece and slot.cleared_for is not part:
            slot.tensor[part.pack.offset : part.pack.offset + part.pack.image_bytes].zero_()
            slot.cleared_for = part
        staged = stage(part.copies[piece], tensors, slot.tensor, stream)
        flag = slot.tensor[self._arena.slot_bytes - _FLAG_BYTES :][:8].view(torch.int64)
        if stream is None:
            flag.fill_(self._generation)
            return staged
        staged.then_set(flag, self._generation)
        if self._staging.overlap:
            self._hook_optimizers(flat)
        else:
            staged.wait()
        return staged

    def _side_stream(self, flat: FlatState) -> torch.cuda.Stream | None:
        """The stream for copies when the state is on one GPU; from several they are copied one after the other."""
        devices = {leaf.local.device for leaf in flat.tensors.values() if leaf.local.is_cuda}
        if len(devices) != 1:
            return None
        (device,) = devices
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _hook_optimizers(self, flat: FlatState) -> None:
        """Have every optimizer of the state wait, on its stream, for copies still under way before it changes
        anything."""
        for _, owner, _ in flat.owners:
            if isinstance(owner, torch.optim.Optimizer) and id(owner) not in self._hooked:
                self._hooked.add(id(owner))
                owner.register_step_pre_hook(self._before_optimizer_step)

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._overlapping is not None:
            self._overlapping.order_before(torch.cuda.current_stream())
            self._overlapping = None

    def _wait_for_slot(self, deadline: float) -> None:
        """Let the writers' answers come in; the queue's and, for a save in pieces, the extra writer's."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            steps = sorted({slot.step for slot in self._arena.in_use() if slot.step is not None})
            raise CheckpointTimeoutError(
                f"rank {self._ranks.rank}: no staging slot became free in {self._staging.slot_timeout_s:g} s; the "
                f"saves of steps "
                f"{steps} hold them. Is a request not scheduled, or storage stuck?",
                rank=self._ranks.rank,
            )
        queue = (
            self._pieces_queue if self._pieces_queue and self._pieces_queue.get_num_unfinalized_calls() else self._queue
        )
        queue.wait_for_events(min(_WAIT_SLICE_S, remaining_s))

    # -- saves that do not fit -----------------------------------------------------------------------------------------

    def _write_piece_now(self, writer: PartWriter) -> None:
        """Have an extra writer process write a piece while the next one is staged."""
        if self._pieces_queue is None:
            self._pieces_queue = AsyncCallsQueue(timeout_s=self._staging.slot_timeout_s)
        self._pieces_queue.schedule_async_request(AsyncRequest(writer, (), []))

    def _finish_pieces(self) -> None:
        while self._pieces_queue is not None and self._pieces_queue.get_num_unfinalized_calls():
            try:
                self._pieces_queue.maybe_finalize_async_calls(blocking=True)
            except CheckpointTimeoutError:
                raise
            except CheckpointError as error:  # the save is abandoned: its last piece finds out and fails like any other
                _log.debug("a piece was not written: %s", error)


_FINE, _FAILED = b"+", b"-"
_FLAG_BYTES = 4096  # a page behind the images, for the flag


def _rank_of(per_rank: bool, rank: int) -> int | None:
    return rank if per_rank else None


def _encode_values(flat: FlatState) -> dict[tuple[str | int, ...], Any]:
    encoded = {}
    for path, leaf in flat.values.items():
        try:
            encoded[path] = encode_value(leaf.value)
        except TypeError as error:
            raise StateError(f"{display(path)}: cannot be stored: {error}") from None
    return encoded
