"""A loop like that of a trainer, to see what a save in flight costs the steps beside it."""

import time
from collections.abc import Callable

import torch

__all__ = ["StepLoop"]

_SIZE = 768


class StepLoop:
    """Each step multiplies matrices with all of torch's threads, for about `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._weights = torch.randn(_SIZE, _SIZE)
        self._products = 1
        while self._step() < step_s / 2:
            self._products *= 2
        self._products = max(1, round(self._products * step_s / min(self._step() for _ in range(3))))

    def run(self, steps: int, between: Callable[[], None] = lambda: None) -> float:
        """Seconds that `steps` steps take, each followed by `between`."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
            between()
        return time.perf_counter() - begin

    def run_until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """Steps until `done`, which is asked after each, and the seconds they take."""
        steps, begin = 0, time.perf_counter()
        while True:
            self._step()
            steps += 1
            if done():
                return steps, time.perf_counter() - begin

    def _step(self) -> float:
        begin = time.perf_counter()
        product = self._weights
        for _ in range(self._products):
            product = product @ self._weights
            product = product / product.norm()
        return time.perf_counter() - begin
