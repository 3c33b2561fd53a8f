"""The plan for a structure of state: made when the structure is first seen, then kept from save to save.

    flatten -> same structure as before: the cached plan
            -> else: agree that all ranks can store their state, exchange descriptions, plan, lay out this rank's files

Runs in the trainer. With the first plan of a run, and with each new plan, ranks agree on a session: the token that the
coordinator claimed the root with, and a nonce, from which all derive the same name for each save without communication.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTimeoutError,
    FencedError,
    StateError,
    StorageError,
)
from ckpt.paths import Path
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.description import StateDescription
from ckpt.planning.exchange import Exchange
from ckpt.planning.known_state import KnownStates
from ckpt.planning.replicated_tensors import Kind, replica_kinds
from ckpt.planning.save_plan import SavePlan, make_save_plan
from ckpt.planning.state_dict import FlatState
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.failure import Failure
from ckpt.saving.giving_up import abandoned
from ckpt.saving.host_memory import LIMIT_BYTES, HostLimit, check_host_memory
from ckpt.saving.layout import LocalBoxes, RankLayout, make_layout
from ckpt.saving.root_claim import RootClaim
from ckpt.saving.samples import Replicas
from ckpt.saving.task import pickled_plan
from ckpt.storage.compression import Compression
from ckpt.storage.names import SaveId
from inprocess.ipc.restart_index import current_restart_index
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.threads import JoinableThread

_log = logging.getLogger("ckpt")
_COORDINATOR = 0
_NONCE_BYTES = 8
_KEY_BYTES = 8
_ANSWER = struct.Struct(">Q?")  # the token of the owner, and whether it was claimed just now


@dataclass(frozen=True, slots=True)
class _Session:
    """What the saves of all ranks have in common until they agree again.

    `owner` is the token of the root's owner; 0 if it was not claimed, as for snapshots alone.
    """

    owner: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """The plan of all ranks for one structure of state, and what follows from it for this rank.

    `key` is a digest of the descriptions of all ranks, from which the plan follows. `boxes` are those that this rank
    holds, also where others write them. `pickled` is the plan of its writer, for tasks. `value_owners` are the paths of
    the values that it writes, and whether each is its own alone.
    """

    key: bytes
    description: StateDescription
    save_plan: SavePlan
    boxes: LocalBoxes
    layout: RankLayout
    pickled: SharedMemory
    value_owners: dict[Path, bool]
    replicas: Replicas


@dataclass(frozen=True, slots=True)
class PreparedState:
    """A state ready to be staged.

    `encoded` are all its values; `values` those that this rank writes, as entries of the part manifest: path, rank or
    None, encoded value.
    """

    flat: FlatState
    encoded: dict[Path, Any]
    values: list[Any]
    cached: CachedPlan


class Slots(Protocol):
    """The staging memory that a plan needs."""

    def meet(self) -> None:
        """Do the part of the `fit` for a new plan that waits for other ranks. Collective."""

    def fit(self, plan: CachedPlan) -> None:
        """Make them large enough, and exchange them with the ranks on this node."""

    def cancel_fit(self) -> None:
        """Exchange them with no rank for the last new plan: none waits for these, nor does `fit`, in any thread."""


class PlanCache:
    """Keeps the plan of the last structure seen. `limit` is that of this rank; a plan keeps to those of all ranks."""

    def __init__(self, ranks: Ranks, grid: GridOptions, limit: HostLimit, compression: Compression | None) -> None:
        self._ranks = ranks
        self._grid = grid
        self._limit = limit
        self._compression = compression
        self._states = KnownStates()
        self._cached: CachedPlan | None = None
        self._former: CachedPlan | None = None  # of before the last fault
        self._begun: _BegunPlan | None = None
        self._session: _Session | None = None
        self._last_step = -1
        self._attempt = 0  # how often in a row the last step was to be saved
        self._former_nonce = b""  # of the last session that was ended, since the last fault
        self._returns = 0  # how often steps went back in this session
        self._pickled: weakref.WeakSet[SharedMemory] = weakref.WeakSet()  # of all plans that there still are

    @property
    def session(self) -> str | None:
        """The name of the last agreement of all ranks, which no other agreement has; None before there is one."""
        return None if self._session is None else self._session.nonce.hex()

    @property
    def owner(self) -> int | None:
        """The token that this job saves with; None before the ranks have agreed on one."""
        return None if self._session is None else self._session.owner or None

    def prepare(
        self,
        state: Any,
        claims: RootClaim | None = None,
        *,
        slots: Slots,
        claim: bool = True,
        saves: bool = True,
    ) -> PreparedState:
        """Name the leaves, and find or make the plan, for `slots`. Collective if there is no plan or no session.

        With `claims`, the session is to have an owner: the coordinator claims the root if `claim` is true there. If it
        `saves`, this is for the save begun last; otherwise a used root is not claimed, and no error is raised for it.
        When ranks must agree, all raise what any raises: StateError, and errors of `claims`. An error that is no
        CheckpointError is of this rank alone, and the others know nothing of it.
        """
        try:
            flat = self._agree_on_plan(state, claims, slots, claim, self._last_step if saves else -1)
            self.finish()
            cached = self._cached
            assert cached is not None
            rank = self._ranks.rank
            encoded = {path: leaf.encoded for path, leaf in flat.values.items()}
            values = [[list(path), rank if own else None, encoded[path]] for path, own in cached.value_owners.items()]
            return PreparedState(flat, encoded, values, cached)
        except BaseException:
            slots.cancel_fit()  # the others may have met this rank, and be waiting for its slots
            raise

    def begin(self, state: Any, claims: RootClaim | None, slots: Slots, *, claim: bool) -> None:
        """Do the part of `prepare` that waits for other ranks. Collective."""
        with contextlib.suppress(StateError):  # of the state before, which is not to be saved any more
            self.finish()
        self._agree_on_plan(state, claims, slots, claim, -1)

    def go_on(self, slots: Slots) -> None:
        """Do the rest of what `begin` has begun in a thread, which then fits the slots to the plan."""
        if self._begun is not None:
            self._begun.start(slots)

    def finish(self) -> None:
        """Wait for what `begin` has begun. To be called before the slots are used."""
        if self._begun is None:
            return
        try:
            self._cached = self._begun.result()
        except CheckpointError:  # on all ranks
            self._begun = None
            raise
        # After another error, of this rank alone, the next save makes the plan: the others have it already.
        self._begun = None

    def settle(self) -> None:
        """Wait as `finish` does; that a state cannot be saved is told by the next save, and not by a restore."""
        begun = self._begun
        try:
            self.finish()
        except StateError:
            self._begun = begun

    def _agree_on_plan(self, state: Any, claims: RootClaim | None, slots: Slots, claim: bool, step: int) -> FlatState:
        """Agree on a session and exchange descriptions, where that is needed. The plan is to be made then: `_begun`.

        For a new plan the slots meet here, before anything that can fail on one rank alone: so they meet on all ranks.
        """
        self.finish()
        begins_session = self._session is None or (claims is not None and not self._session.owner)
        all_agree = self._cached is None or begins_session
        try:
            flat = self._states.flatten(state)
        except Exception as error:
            if all_agree:
                self._fail(error)
            if step >= 0 and self._ranks.world_size > 1:  # to ranks whose structure is new: they wait for this one
                self._ranks.tell_first(self.save_name, Failure.of(error, self._ranks.rank).to_bytes().decode())
            raise
        description = flat.describe()
        if self._cached is None or self._cached.description != description:
            kinds = replica_kinds(flat)
            from_lowest = frozenset(path for path, kind in kinds.items() if kind != "parameter")
            exchange = Exchange(replace(description, from_lowest=from_lowest))
            former = self._former
            if former is not None and former.layout.plan.rank != self._ranks.rank:
                former = None
            own_key = bytes(_KEY_BYTES) if former is None else former.key
            with contextlib.nullcontext() if all_agree or step < 0 else self._unless_told(step):
                answers = self._agree(claims, claim, step, self._limit.encoded() + exchange.told + own_key)
            key = hashlib.blake2b(b"".join(answer[:-_KEY_BYTES] for answer in answers), digest_size=_KEY_BYTES).digest()
            limits = [HostLimit.decode(answer[:LIMIT_BYTES]) for answer in answers]
            told = [answer[LIMIT_BYTES:-_KEY_BYTES] for answer in answers]
            if former is not None and former.key == key:
                if not all(answer.endswith(key) for answer in answers):  # as of a replacement
                    exchange.help(told, self._ranks)
                plan = partial(_renewed, former, flat, description, kinds)
            else:
                others = exchange.finish(told, self._ranks)
                plan = partial(self._plan, flat, description, kinds, key, others, limits)
            slots.meet()
            self._cached, self._begun = None, _BegunPlan(plan)
        elif begins_session:
            self._agree(claims, claim, step)
        return flat

    @contextlib.contextmanager
    def _unless_told(self, step: int) -> Iterator[None]:
        """Raise, within a block that waits for all ranks, the failure of one that has told it and does not come."""
        self._ranks.attempt = self.save_name
        try:
            yield
        except CheckpointTimeoutError:
            told = self._ranks.tell_first(self.save_name, None)
            if told is None:
                raise
            error = abandoned(step, Failure.from_bytes(told))
            raise error from error.__cause__
        finally:
            self._ranks.attempt = None

    def end_session(self) -> None:
        """Make the next save claim the root anew; the plan stays."""
        if self._session is not None:
            self._former_nonce = self._session.nonce
        self._session = None

    def forget(self) -> None:
        """Forget the plan, as ranks may change: the next save is planned anew, unless all ranks are as before."""
        if self._begun is not None:
            self._begun.cancel()
        self._states.forget()
        self._former = self._cached or self._former
        self._cached, self._begun = None, None
        self._session, self._former_nonce = None, b""  # a rank that replaces another has had no session
        self._last_step, self._attempt, self._returns = -1, 0, 0

    def close(self) -> None:
        """Forget all plans, and free their memory; saves in flight have sent it to their writers. Idempotent."""
        self.forget()
        for region in tuple(self._pickled):
            region.close()

    def begin_attempt(self, step: int) -> None:
        """Count the attempts to save a step. To be called once for each save, before anything can fail."""
        self._attempt = self._attempt + 1 if step == self._last_step else 0
        self._returns += step < self._last_step
        self._last_step = step

    @property
    def save_name(self) -> str:
        """The name of the save begun last: that of `save_id`, and without a session another name.

        Unique, and the same on all ranks, also if there is no session.
        """
        save = self.save_id()
        if save is not None:
            return save.name
        # The numbers of attempts recur in later sessions, and after restarts, in a store that is still there.
        return f"{current_restart_index()}.{self._former_nonce.hex()}.{self._numbers}"

    @property
    def _numbers(self) -> str:
        return f"{self._last_step}.{self._attempt}.{self._returns}"

    def save_id(self) -> SaveId | None:
        """Return the save begun last: unique, and the same on all ranks. None before there is a session.

        It depends on the nonce that the ranks agreed on, on how often this step was tried and on how often steps went
        back, and on nothing that a failed call on one rank could leave different. Its owner is 0 if the root was not
        claimed.
        """
        if self._session is None:
            return None
        nonce = hashlib.blake2b(self._numbers.encode(), key=self._session.nonce, digest_size=8).hexdigest()
        return SaveId(self._last_step, self._session.owner, nonce)

    def _plan(
        self,
        flat: FlatState,
        description: StateDescription,
        kinds: dict[Path, Kind],
        key: bytes,
        others: Sequence[StateDescription],
        limits: Sequence[HostLimit],
    ) -> CachedPlan:
        """Make the plan, given the descriptions and limits of all ranks. In the trainer's thread or another."""
        plan = make_save_plan(others, self._grid, self._compression)
        check_host_memory(plan, limits)
        rank = self._ranks.rank
        boxes = {path: leaf.boxes for path, leaf in flat.tensors.items()}
        layout = make_layout(plan, rank, boxes)
        owned = {path: False for path, owner in plan.value_owners.items() if owner == rank}
        owned |= {path: True for path, ranks in plan.per_rank_values.items() if rank in ranks}
        pickled = pickled_plan(layout.plan)
        self._pickled.add(pickled)
        return CachedPlan(key, description, plan, boxes, layout, pickled, owned, Replicas.of(flat, kinds))

    def _agree(self, claims: RootClaim | None, claim: bool, step: int, told: bytes = b"") -> list[bytes]:
        """Begin a session, or give an existing one a new nonce; claim the root if need be. Collective.

        Returns what all ranks have `told`. Raises StateError on all ranks when one of them cannot store its state, the
        error of a claim that failed or was refused, and StorageError when one of them cannot write where the
        coordinator can.
        """
        owner, claimed = 0 if self._session is None else self._session.owner, False
        try:
            if claims is not None and claim and not owner and self._ranks.rank == _COORDINATOR:
                owner = claims.claim_for(step)
                claimed = bool(owner)
        except Exception as error:
            self._fail(error)
        answers = self._all_fine(_ANSWER.pack(owner, claimed) + os.urandom(_NONCE_BYTES) + told)
        owner, claimed = _ANSWER.unpack_from(answers[_COORDINATOR])  # ranks may have assumed different ones
        nonce = hashlib.blake2b(b"".join(answers), digest_size=16).digest()
        if claims is not None and claimed and self._ranks.world_size > 1:
            self._confirm(claims, owner)
        self._session, self._returns = _Session(owner, nonce), 0
        return [answer[_ANSWER.size + _NONCE_BYTES :] for answer in answers]

    def _confirm(self, claims: RootClaim, owner: int) -> None:
        """Confirm the claim on all ranks; what one of them raises is raised on all. Collective."""
        answer: bytes | Failure = b""
        if self._ranks.rank != _COORDINATOR:
            try:
                claims.confirm(owner)
            except Exception as error:
                answer = Failure.of(error, self._ranks.rank)
        self._all_fine(answer)

    def _fail(self, error: Exception) -> NoReturn:
        """Tell the other ranks why this one fails, and raise the error, or one of the class they raise. Collective."""
        failure = Failure.of(error, self._ranks.rank)
        self._ranks.outcomes(failure)
        if isinstance(error, CheckpointError) or self._ranks.world_size == 1:
            raise error
        raise _error_for(failure) from error

    def _all_fine(self, own: bytes | Failure) -> list[bytes]:
        """Return what all ranks tell; raise the error of the first one that failed. Collective."""
        answers = []
        for answer in self._ranks.outcomes(own):
            if isinstance(answer, Failure):
                raise _error_for(answer)
            answers.append(answer)
        return answers


def _renewed(former: CachedPlan, flat: FlatState, description: StateDescription, kinds: dict[Path, Kind]) -> CachedPlan:
    """Return a plan of the same structure for the tensors that there are now."""
    return replace(former, description=description, replicas=Replicas.of(flat, kinds))


class _BegunPlan:
    """A plan that is still to be made, in a thread or by who needs it first."""

    def __init__(self, make: Callable[[], CachedPlan]) -> None:
        self._make = make
        self._plan: CachedPlan | None = None
        self._slots: Slots | None = None
        self._thread: JoinableThread | None = None
        self._lock = threading.Lock()
        self._cancelled = False
        self._starting = threading.Lock()

    def start(self, slots: Slots) -> None:
        """Make it in a thread, which then fits the slots to it."""
        self._slots = slots
        self._thread = JoinableThread(self._run, "ckpt-plan", (slots,))
        with self._starting:
            self._thread.start()

    def cancel(self) -> None:
        """Leave the slots alone from now on. The thread ends by itself."""
        self._cancelled = True
        if self._slots is not None:
            self._slots.cancel_fit()
        with self._lock:
            pass  # the thread does not use the slots any more

    def result(self) -> CachedPlan:
        """Return the plan. If the thread failed, make it here: that raises why."""
        if self._thread is not None:
            self._thread.join()
        return self._make() if self._plan is None else self._plan

    def _run(self, slots: Slots) -> None:
        with self._starting:
            pass  # by waiting, give the interpreter's lock back to who waits for the start: else not before 5 ms
        try:
            self._plan = self._make()
            with self._lock:
                if not self._cancelled:
                    slots.fit(self._plan)
        except Exception:
            _log.debug("a plan was not made in the background", exc_info=True)
            with self._lock:
                if not self._cancelled:
                    slots.cancel_fit()


def _error_for(failure: Failure) -> CheckpointError:
    if failure.error_class in (CheckpointExistsError, FencedError, StorageError):
        return failure.error(f"rank {failure.rank} cannot use the root, nothing was written: {failure.text}")
    text = f"the state of rank {failure.rank} cannot be stored, nothing was written: {failure.text}"
    return failure.error(text, StateError)
