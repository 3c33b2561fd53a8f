"""Durations of a section on the current stream of CUDA, by events around it. The program never waits for the device.

An elapsed time is read when the device has passed both events: by the publisher, or by a later execution when many
pairs are waiting. Events are used again, so there are at most `_MOST_PAIRS` pairs of each section.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from inprocess.straggler.durations import SectionTimes

_MOST_PAIRS = 64


class CudaTimes:
    """Pairs of events of one section, whose elapsed times go to `times`. Usable by any thread."""

    def __init__(self, times: SectionTimes) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.cuda.current_device()
        self._times = times
        self._pairs: deque[tuple[Any, Any]] = deque()
        self._free: deque[tuple[Any, Any]] = deque(maxlen=_MOST_PAIRS)

    def begin(self) -> tuple[Any, Any] | None:
        """Record the first event of a pair. None if too many pairs are waiting, and while a CUDA graph is captured."""
        if self._cuda.is_current_stream_capturing():
            return None
        if len(self._pairs) >= _MOST_PAIRS and not self._take_oldest():
            return None
        try:
            pair = self._free.popleft()
        except IndexError:
            pair = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        pair[0].record()
        return pair

    def end(self, pair: tuple[Any, Any]) -> None:
        """Record the second event."""
        pair[1].record()
        self._pairs.append(pair)

    def collect(self) -> None:
        """Read the elapsed times that are ready."""
        with self._cuda.device(self._device):  # else a thread of its own may occupy memory of device 0
            for _ in range(len(self._pairs)):
                if not self._take_oldest():
                    return

    def _take_oldest(self) -> bool:
        try:
            pair = self._pairs.popleft()
        except IndexError:  # another thread was faster
            return False
        if not (pair[0].query() and pair[1].query()):  # of two streams, if the program has changed it meanwhile
            self._pairs.appendleft(pair)
            return False
        self._times.add(pair[0].elapsed_time(pair[1]) * 1e-3)
        self._free.append(pair)
        return True
