"""Measures sections and steps of this rank, and has rank 0 compare the ranks. No collective, no wait in a step.

    program thread                  thread "inprocess-stragglers", each `interval`
    section, step, record           every rank     writes its summary into the store, over the last one
      │                             rank 0         reads those of all ranks, and makes a report
      └─ appends to a deque ─────▶

A detector belongs to one iteration of the in-process wrapper, and so do its keys. When another iteration has begun, it
measures into the void and publishes nothing.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from inprocess.ipc.forks import Origin
from inprocess.ipc.restart_index import current_restart_index
from inprocess.ipc.threads import JoinableThread, before_exit
from inprocess.rank_environment import ranks_of_environment
from inprocess.straggler.comparison import STEP, Contribution, Straggler, StragglerReport, checked_threshold
from inprocess.straggler.cuda_times import CudaTimes
from inprocess.straggler.durations import SectionSummary, SectionTimes

_log = logging.getLogger(__name__)
_MOST_SECTIONS = 64
_MOST_NAMED = 8  # in a message
_SILENT_AFTER = 3  # summaries of rank 0 without one of the other rank
_STORE_TIMEOUT = timedelta(seconds=30)
_CLOSE_S = 2.0

StragglersChanged = Callable[[StragglerReport, tuple[Straggler, ...]], None]


class Detector:
    """Finds ranks that are slower than the others, or than they were.

    Make one on every rank when `torch.distributed` is initialized, within the function if that is wrapped; it uses the
    store of the default process group. With a `store` (of torch, or of the wrapper) there need not be a group. `rank`
    and `world_size` are by default those of the group, else of the environment.

    Each `interval` a thread publishes a summary of each section that was executed at least 8 times since, and rank 0
    makes a report; with None there is no thread, and the program calls `publish` and `report`. When the stragglers
    (scores below the thresholds) are others than before, rank 0 logs them and calls `on_change` with the report and
    them, in that thread. Ranks of the same `group` are compared with each other, such as those of one pipeline stage.

    Memory is bounded: 64 sections, 512 durations each. The methods may be called from any thread. In a forked child
    nothing is published.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        interval: timedelta | None = timedelta(seconds=60),
        relative_threshold: float = 0.7,
        individual_threshold: float = 0.7,
        group: str = "",
        on_change: StragglersChanged | None = None,
    ) -> None:
        if interval is not None and interval <= timedelta(0):
            raise ValueError(f"interval must be above 0, or None for no thread, not {interval!r}")
        self._store, self._rank, self._world_size = _found_ranks(store, rank, world_size)
        self._own_connection = False
        self._thresholds = checked_threshold(relative_threshold), checked_threshold(individual_threshold)
        self._group = group
        self._on_change = on_change
        self._restart_index = current_restart_index()
        self._origin = Origin()
        self._sections: dict[str, SectionTimes] = {}
        self._cuda: dict[SectionTimes, CudaTimes] = {}
        self._last_step: float | None = None
        self._busy = threading.Lock()  # never waited for: an exception thrown into a thread may leave it locked
        self._published = 0
        self._seen: dict[int, tuple[int, int]] = {}  # rank: number of its summary, and of ours when we first saw it
        self._newest: StragglerReport | None = None
        self._named: frozenset[tuple[int, str, str]] = frozenset()
        self._failing = False
        self._stop = threading.Event()
        self._thread: JoinableThread | None = None
        if interval is not None:
            arguments = weakref.ref(self), self._stop, interval.total_seconds()
            self._thread = JoinableThread(_exchange_each, "inprocess-stragglers", arguments)
            self._thread.start()
            weakref.finalize(self, self._stop.set).atexit = False
            # A thread within a call of a store while the interpreter exits would end the process by a signal.
            before_exit(weakref.WeakMethod(self.close))

    # -- measuring -----------------------------------------------------------------------------------------------------

    def section(self, name: str, *, cuda: bool = False) -> _HostSection | _CudaSection:
        """Return the context of a section; if it is left by an exception, its time does not count.

        With `cuda`, the time is that between two events on the current stream, and not that of the host. Leave out
        collectives and other waits for other ranks: the fast ranks wait in them for the slow one.
        """
        times = self._sections.get(name) or self._new_section(name)
        if not cuda:
            return _HostSection(times)
        on_device = self._cuda.get(times)
        if on_device is None:
            on_device = self._cuda[times] = CudaTimes(times)
        return _CudaSection(on_device)

    def step(self) -> None:
        """Note the end of a step: the time since the last call is one execution of the section "step"."""
        now = time.perf_counter()
        if self._last_step is not None:
            (self._sections.get(STEP) or self._new_section(STEP)).add(now - self._last_step)
        self._last_step = now

    def record(self, name: str, seconds: float) -> None:
        """Note one execution of a section that the caller has measured."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"section {name!r} cannot take {seconds!r} s")
        (self._sections.get(name) or self._new_section(name)).add(seconds)

    def _new_section(self, name: str) -> SectionTimes:
        if len(self._sections) < _MOST_SECTIONS:
            return self._sections.setdefault(name, SectionTimes())
        if len(self._sections) == _MOST_SECTIONS:
            _log.warning("there are more than %d sections: %r and later ones are not measured", _MOST_SECTIONS, name)
            self._sections[""] = SectionTimes()  # that of all others, which is not published
        return self._sections[""]

    # -- exchanging ----------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Write the summary of this rank into the store. The thread does this, if there is one."""
        if self._is_over or not self._busy.acquire(blocking=False):
            return
        try:
            for on_device in list(self._cuda.values()):
                on_device.collect()
            summaries = {name: times.summarize() for name, times in list(self._sections.items()) if name}
            self._published += 1
            text = _to_text(self._published, self._group, summaries)
            self._connected_store().set(self._key(self._rank), text)
        finally:
            self._busy.release()

    def report(self) -> StragglerReport | None:
        """Return a report of what all ranks have published, on rank 0; on other ranks None.

        A rank that published nothing while rank 0 did so three times is silent, and not compared.
        """
        if self._rank != 0:
            return None
        if self._is_over or not self._busy.acquire(blocking=False):
            return self._newest
        try:
            self._newest = self._gathered()
        finally:
            self._busy.release()
        self._tell(self._newest)
        return self._newest

    def _gathered(self) -> StragglerReport:
        store = self._connected_store()
        missing = [rank for rank in range(self._world_size) if rank not in self._seen]
        for rank in self._present(store, missing):
            self._seen[rank] = (0, self._published)
        ranks: dict[int, Contribution] = {}
        keys = [self._key(rank) for rank in self._seen]
        values = store.multi_get(keys) if keys and store.has_extended_api() else [store.get(key) for key in keys]
        for rank, value in zip(list(self._seen), values, strict=True):
            number, contribution = _from_text(value)
            if number != self._seen[rank][0]:
                self._seen[rank] = number, self._published
            if self._published - self._seen[rank][1] < _SILENT_AFTER:
                ranks[rank] = contribution
        silent = tuple(rank for rank in range(self._world_size) if rank not in ranks)
        return StragglerReport(self._restart_index or 0, dict(sorted(ranks.items())), silent)

    def _present(self, store: Any, ranks: list[int]) -> Iterator[int]:
        """The ranks of these that have published: few requests, whether all have done so or almost none."""
        if not ranks:
            return
        if store.check([self._key(rank) for rank in ranks]):
            yield from ranks
        elif len(ranks) > 1:
            half = len(ranks) // 2
            yield from self._present(store, ranks[:half])
            yield from self._present(store, ranks[half:])

    def _tell(self, report: StragglerReport) -> None:
        found = report.identify_stragglers(*self._thresholds)
        named = frozenset((each.rank, each.section, each.kind) for each in found)
        if named == self._named:
            return
        self._named = named
        if found:
            more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            _log.warning("stragglers: %s%s", "; ".join(map(str, found[:_MOST_NAMED])), more)
        else:
            _log.warning("there are no stragglers any more")
        if self._on_change is not None:
            self._on_change(report, found)

    def _exchange(self) -> None:
        """Publish and report. An error is logged, once until it works again."""
        try:
            self.publish()
            self.report()
            self._failing = False
        except Exception:
            if not self._failing and not self._is_over:
                _log.warning("the comparison of section times has failed, it goes on trying", exc_info=True)
            self._failing = True

    def _connected_store(self) -> Any:
        """The store, with a connection of its own if it can have one: no other thread has to wait for our requests."""
        if not self._own_connection:
            self._store.check([self._key(self._rank)])  # if its host is dead: torch would try to connect for minutes
            self._own_connection = True
            try:
                own = self._store.clone()
            except (AttributeError, RuntimeError, NotImplementedError):  # a kind that cannot, such as HashStore
                own = self._store
            if own is not self._store:
                own.set_timeout(_STORE_TIMEOUT)
            self._store = own
        return self._store

    def _key(self, rank: int) -> str:
        return f"inprocess.straggler/{self._restart_index or 0}/{rank}"

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._stop.is_set() or not self._origin.is_here or current_restart_index() != self._restart_index

    def close(self) -> None:
        """End the thread; nothing is published any more. Waits at most two seconds for a store that does not answer."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # a restart does not wait for the store, which may be what has failed
            self._stop.set()


class _HostSection:
    """The context of a section that is measured on the host."""

    __slots__ = ("_begun", "_times")

    def __init__(self, times: SectionTimes) -> None:
        self._times = times

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._times.add(time.perf_counter() - self._begun)


class _CudaSection:
    """The context of a section that is measured on a stream."""

    __slots__ = ("_pair", "_times")

    def __init__(self, times: CudaTimes) -> None:
        self._times = times

    def __enter__(self) -> None:
        self._pair = self._times.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None and self._pair is not None:
            self._times.end(self._pair)


def _exchange_each(detector: weakref.ref[Detector], stop: threading.Event, interval_s: float) -> None:
    while not stop.wait(interval_s):
        found = detector()
        if found is None or found._is_over:
            return
        found._exchange()
        del found


def _found_ranks(store: Any, rank: int | None, world_size: int | None) -> tuple[Any, int, int]:
    """Return the store, rank and world size: as given, else of the process group, else of the environment."""
    import torch.distributed as dist

    is_grouped = dist.is_available() and dist.is_initialized()
    if store is None:
        if not is_grouped:
            raise ValueError(
                "Detector needs a store: call torch.distributed.init_process_group first, or pass one, "
                "such as the `store` of inprocess.CallWrapper"
            )
        store = dist.distributed_c10d._get_default_store()
    if rank is None or world_size is None:
        found = None if is_grouped else ranks_of_environment()
        own, size = (dist.get_rank(), dist.get_world_size()) if found is None else (found.rank, found.world_size)
        rank, world_size = own if rank is None else rank, size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    return store, rank, world_size


def _to_text(number: int, group: str, summaries: Mapping[str, SectionSummary | None]) -> str:
    sections = {
        name: [summary.count, summary.median_s, summary.best_s] for name, summary in summaries.items() if summary
    }
    return json.dumps({"number": number, "group": group, "sections": sections})


def _from_text(text: bytes) -> tuple[int, Contribution]:
    content = json.loads(text)
    sections = {name: SectionSummary(*values) for name, values in content["sections"].items()}
    return content["number"], Contribution(content["group"], sections)
