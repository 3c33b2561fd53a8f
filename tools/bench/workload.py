"""What is saved and trained: the state of a transformer, many small tensors, and a loop of training steps.

Imports nothing but torch: one of the measurements counts the time that imports take.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch

State = dict[str, dict[str, torch.Tensor]]
"""Named tensors of each part of the state."""

_LAYERS = 11
_WIDTH = 640
_HIDDEN = 1728
_BYTES_PER_PARAMETER = 2 + 3 * 4
PARTS = {"model": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def make_shapes(total_bytes: float) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the 101 parameters of a state of about `total_bytes`."""
    scale = math.sqrt(total_bytes / 1e9)
    width, hidden = max(8, round(_WIDTH * scale)), max(8, round(_HIDDEN * scale))
    matrices = {"query": (width, width), "key": (width, width), "value": (width, width), "output": (width, width)}
    matrices |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (width,)}
    for layer in range(_LAYERS):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"layers.{layer}.{name}_norm.weight": (width,) for name in ("attention", "mlp")}
    parameters = total_bytes / _BYTES_PER_PARAMETER - sum(map(math.prod, shapes.values()))
    shapes["embedding.weight"] = (max(1, round(parameters / width)), width)
    return shapes


def make_state(total_bytes: float) -> State:
    """Return a transformer in mixed precision: bf16 weights, fp32 master weights and two Adam moments.

    It has 404 tensors of about `total_bytes` together; at 1 GB from 1.3 KB (a norm) to 67 MB (the embedding in fp32).
    """
    shapes = make_shapes(total_bytes)
    generator = torch.Generator().manual_seed(0)

    def filled(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, dtype=dtype).normal_(generator=generator) for name, shape in shapes.items()}

    return {part: filled(dtype) for part, dtype in PARTS.items()}


def make_many_small(count: int, tensor_bytes: int = 4096) -> State:
    """Return `count` tensors of `tensor_bytes`."""
    values = torch.arange(tensor_bytes // 4, dtype=torch.float32)
    return {"model": {f"layers.{number // 100}.{number % 100}": values + number for number in range(count)}}


def make_one_large(count: int, tensor_bytes: int = 4096) -> State:
    """Return one tensor of the same bytes as those of `make_many_small`."""
    return {"model": {"all": torch.arange(count * tensor_bytes // 4, dtype=torch.float32)}}


def tensors(state: State) -> Iterator[torch.Tensor]:
    """Yield all tensors, in the order of the state."""
    for part in state.values():
        yield from part.values()


def size_of(some: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in some)


_PRODUCT_SIZE = {"cpu": 768, "cuda": 4096}


class StepLoop:
    """Training steps, each of which multiplies matrices for about `step_s`, with all of torch's threads or on a GPU."""

    def __init__(self, step_s: float, device: str = "cpu") -> None:
        size = _PRODUCT_SIZE[device]
        self._device = device
        self._weights = torch.randn(size, size, device=device)
        self._product = torch.empty_like(self._weights)
        self._products = 10
        once = min(self._step() for _ in range(5)) / self._products
        self._products = max(1, round(step_s / once))

    def run(self, steps: int, between: Callable[[], None] = lambda: None) -> float:
        """Return the seconds of `steps` steps, each followed by `between`."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
            between()
        return time.perf_counter() - begin

    def run_until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """Return how many steps it takes until `done`, which is called after each, and their seconds."""
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
