"""Limits learned from measured durations: a factor above the longest of each kind.

Of each quantity the largest value of each block of 64 values is kept, for the last 32 blocks; older blocks are
forgotten. From 16 blocks on, the factor is not applied to the largest block, so that one outlier among thousands of
values does not make the limit five times as long. A limit is never below a measured value, though:

    limit = max(floor, factor * high value, largest value)

Nothing here needs a monitor. Only `synchronize_all` needs torch, and imports it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from inprocess.sections.timeouts import WARMUP, HeartbeatTimeouts, SectionTimeouts

__all__ = ["TimeoutsCalc", "TimeoutsCalcError"]

_BLOCK = 64
_BLOCKS = 32
_BLOCKS_TO_TRIM = 16
_NEW_WEIGHT = 0.5


class TimeoutsCalcError(Exception):
    """A section was opened or closed at the wrong time, or there is too little data for what was asked for."""


class _Largest:
    """The largest recent values; -1: none."""

    __slots__ = ("_blocks", "_left", "current")

    def __init__(self) -> None:
        self.current = -1.0
        self._left = _BLOCK
        self._blocks: deque[float] = deque(maxlen=_BLOCKS)

    def add(self, value: float) -> None:
        if value > self.current:
            self.current = value
        self._left -= 1
        if not self._left:
            self._blocks.append(self.current)
            self.current, self._left = -1.0, _BLOCK

    @property
    def longest(self) -> float:
        return max(self.current, *self._blocks, -1.0)

    @property
    def high(self) -> float:
        """The value to which the factor is applied."""
        if len(self._blocks) < _BLOCKS_TO_TRIM:
            return self.longest
        return sorted((*self._blocks, self.current))[-2]


class TimeoutsCalc:
    """Measures the durations of one rank, and computes limits. One thread at a time.

    Stamps and results are in seconds; a stamp that is not given is `time.monotonic()`. No limit is below `floor`: a
    delay of the scheduler must not make a very short section late.
    """

    def __init__(
        self,
        sections: Iterable[str] | None = None,
        start_time: float | None = None,
        safety_factor: float = 5.0,
        floor: float = 1.0,
    ) -> None:
        self.safety_factor = safety_factor
        self.floor = floor
        self.start_time = time.monotonic() if start_time is None else start_time
        self._sections: dict[str, _Largest] = {name: _Largest() for name in sections or ()}
        self._initial, self._beat, self._gap = _Largest(), _Largest(), _Largest()
        self._last_beat: float | None = None
        self._idle_since: float | None = self.start_time
        self._agreed: list[float] | None = None
        self.open_sections: dict[str, float] = {}

    # -- measuring -----------------------------------------------------------------------------------------------------

    def reset_start_time(self, start_time: float | None = None) -> None:
        """Restart the clock of the first heartbeat."""
        self.start_time = time.monotonic() if start_time is None else start_time

    def restart(self, stamp: float) -> None:
        """Forget open sections, without learning from them, and start anew at `stamp`. What was measured stays."""
        self.open_sections.clear()
        self.start_time = self._idle_since = stamp
        self._last_beat = None

    def update_on_heartbeat(self, stamp: float | None = None) -> None:
        """Note a heartbeat."""
        stamp = time.monotonic() if stamp is None else stamp
        if self._last_beat is None:
            self._initial.add(stamp - self.start_time)
        else:
            self._beat.add(stamp - self._last_beat)
        self._last_beat = stamp

    def update_on_section_open(self, name: str, stamp: float | None = None) -> None:
        """Note that a section begins. TimeoutsCalcError if it is open already, or unknown."""
        stamp = time.monotonic() if stamp is None else stamp
        opened = self.open_sections
        if name in opened:
            raise TimeoutsCalcError(f"section {name!r} is open already; close it with end_section first")
        if name not in self._sections:
            raise TimeoutsCalcError(f"section {name!r} is not in the configuration")
        if not opened and self._idle_since is not None:
            self._gap.add(stamp - self._idle_since)
        opened[name] = stamp

    def update_on_section_close(self, name: str, stamp: float | None = None, learn: bool = True) -> float:
        """Note that a section ends; return its seconds. TimeoutsCalcError if it is not open.

        Without `learn` its time does not count.
        """
        stamp = time.monotonic() if stamp is None else stamp
        since = self.open_sections.pop(name, None)
        if since is None:
            known = name in self._sections
            raise TimeoutsCalcError(f"section {name!r} is not " + ("open" if known else "in the configuration"))
        if learn:
            self._sections[name].add(stamp - since)
        if not self.open_sections:
            self._idle_since = stamp
        return stamp - since

    def update_on_section_close_all(self, stamp: float | None = None) -> None:
        """Note that every open section ends."""
        stamp = time.monotonic() if stamp is None else stamp
        for name in list(self.open_sections):
            self.update_on_section_close(name, stamp)

    def update_on_background(self, name: str, seconds: float) -> None:
        """Note how long a section in the background took. It is neither an open section nor the end of a gap."""
        self._sections[name].add(seconds)

    def update_on_running_gap(self, stamp: float | None = None) -> None:
        """Count the present gap although it goes on, if no section is open."""
        if not self.open_sections and self._idle_since is not None:
            self._gap.add((time.monotonic() if stamp is None else stamp) - self._idle_since)

    # -- agreeing ------------------------------------------------------------------------------------------------------

    def measured(self) -> list[float]:
        """Return the high values of first heartbeat, heartbeats, gap and sections, in order; then the longest ones."""
        found = [self._initial, self._beat, self._gap, *self._sections.values()]
        return [item.high for item in found] + [item.longest for item in found]

    def agree(self, measured_by_ranks: Iterable[Sequence[float]]) -> None:
        """Compute limits from the largest values of these ranks from now on. ValueError if they differ in length."""
        self._agreed = [max(values) for values in zip(*measured_by_ranks, strict=True)]

    def synchronize_all(self) -> None:
        """Collective: from now on limits are computed from the largest values of all ranks, the same on each.

        TimeoutsCalcError without a default process group.
        """
        import torch
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise TimeoutsCalcError("limits are learned by all ranks together, but there is no process group")
        device = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
        values = torch.tensor(self.measured(), dtype=torch.float32, device=device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        self.agree([values.tolist()])

    # -- computing -----------------------------------------------------------------------------------------------------

    def can_get_hb_timeouts(self) -> bool:
        """Whether there were two heartbeats."""
        values = self._values()
        return values["initial"][0] > 0 and values["beat"][0] > 0

    def can_get_section_timeouts(
        self, selected_sections: Collection[str] | None = None, calc_out_of_section: bool = True
    ) -> bool:
        """Whether every selected quantity was measured. None selects every section, an empty collection none.

        None selects "warmup" only if it was measured: usually it only names a limit.
        """
        values = self._values()
        wanted = [("section", name) for name in self._selected(selected_sections, values)]
        return all(values[key][0] > 0 for key in [*wanted, *(["gap"] if calc_out_of_section else [])])

    def get_hb_timeouts(self, current: HeartbeatTimeouts | None = None) -> HeartbeatTimeouts:
        """Return both limits, merged with the current ones. TimeoutsCalcError if there is too little data."""
        if not self.can_get_hb_timeouts():
            raise TimeoutsCalcError("limits of heartbeats need at least two heartbeats")
        values = self._values()
        initial, subsequent = self._limit(values["initial"]), self._limit(values["beat"])
        if current is not None and current.were_calculated:
            initial, subsequent = _merged(current.initial, initial), _merged(current.subsequent, subsequent)
        return HeartbeatTimeouts(initial, subsequent, were_calculated=True)

    def get_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        current: SectionTimeouts | None = None,
    ) -> SectionTimeouts:
        """Return limits: learned ones for what is selected, merged with those learned before; else the current ones.

        TimeoutsCalcError if there is too little data.
        """
        if not self.can_get_section_timeouts(selected_sections, calc_out_of_section):
            raise TimeoutsCalcError("each selected section must have been closed once, and there must have been a gap")
        current = current or SectionTimeouts(dict.fromkeys(self._sections))
        values = self._values()
        limits = dict(current.section)
        selected = self._selected(selected_sections, values)
        for name in selected:
            new = self._limit(values["section", name])
            limits[name] = _merged(limits.get(name), new) if name in current.calculated_sections else new
        gap = current.out_of_section
        if calc_out_of_section:
            new = self._limit(values["gap"])
            gap = _merged(gap, new) if current.is_out_of_section_calculated else new
        return SectionTimeouts(
            limits,
            gap,
            {*current.calculated_sections, *selected},
            current.is_out_of_section_calculated or calc_out_of_section,
        )

    def _selected(self, names: Collection[str] | None, values: Mapping[Any, tuple[float, float]]) -> list[str]:
        if names is None:
            return [name for name in self._sections if name != WARMUP or values["section", name][0] > 0]
        unknown = sorted(set(names) - set(self._sections))
        if unknown:
            raise TimeoutsCalcError(f"sections {unknown} are not in the configuration")
        return [name for name in self._sections if name in names]

    def _values(self) -> dict[Any, tuple[float, float]]:
        """Return (high, longest) by quantity."""
        measured = self.measured() if self._agreed is None else self._agreed
        half = len(measured) // 2
        keys = ["initial", "beat", "gap", *(("section", name) for name in self._sections)]
        return dict(zip(keys, zip(measured[:half], measured[half:], strict=True), strict=True))

    def _limit(self, value: tuple[float, float]) -> float:
        high, longest = value
        return max(self.floor, self.safety_factor * high, longest)


def _merged(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEW_WEIGHT) * old + _NEW_WEIGHT * new
