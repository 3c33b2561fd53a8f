"""A loop like that of a trainer, to see what a save in flight costs the steps beside it."""

import time
from collections.abc import Callable

import torch

__all__ = ["StepLoop"]

_SIZE = {"cpu": 768, "cuda": 4096}


class StepLoop:
    """Each step multiplies matrices with all of torch's threads, or on the GPU, for about `step_s`."""

    def __init__(self, step_s: float, device: str = "cpu") -> None:
        self._device = device
        self._weights = torch.randn(_SIZE[device], _SIZE[device], device=device)
        self._product = torch.empty_like(self._weights)
        self._products = 10
        once = min(self._step() for _ in range(5)) / self._products
        self._products = max(1, round(step_s / once))

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
        for _ in range(self._products):
            torch.matmul(self._weights, self._weights, out=self._product)
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin
