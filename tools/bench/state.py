"""A state like that of a transformer in mixed precision: bf16 weights, fp32 master weights and two Adam moments."""

import math
from collections.abc import Iterator

import torch

__all__ = ["PARTS", "State", "make_shapes", "make_state", "tensors"]

State = dict[str, dict[str, torch.Tensor]]

_LAYERS = 11
_WIDTH = 640
_HIDDEN = 1728
_VOCABULARY = 26214
_BYTES_PER_PARAMETER = 2 + 3 * 4
PARTS = {"model": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def make_shapes(total_bytes: float) -> dict[str, tuple[int, ...]]:
    """The shape of each of the 101 parameters of a state of about `total_bytes`."""
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
    """404 tensors of about `total_bytes` together, at 1 GB from 1.3 KB (a norm) to 67 MB (the embedding in fp32)."""
    shapes = make_shapes(total_bytes)
    generator = torch.Generator().manual_seed(0)

    def filled(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, dtype=dtype).normal_(generator=generator) for name, shape in shapes.items()}

    return {part: filled(dtype) for part, dtype in PARTS.items()}


def tensors(state: State) -> Iterator[torch.Tensor]:
    """All tensors, in the order of the state."""
    for part in state.values():
        yield from part.values()
