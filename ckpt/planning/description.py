"""The description of a rank's state, without its bytes: names, shapes, dtypes, shardings.

Ranks that hold the same names in the same global shapes have *equal* descriptions, whatever shards they hold. See
`ckpt.planning.exchange`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.paths import Path
from ckpt.planning.boxes import OwnBoxes, Sharding
from ckpt.values.containers import Container


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the whole job sees it. Without `sharding`, every rank that has the name has the whole tensor.

    A tensor that is `per_rank` belongs to one rank; other ranks may have one of the same name in another shape.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    sharding: Sharding | OwnBoxes | None = None
    per_rank: bool = False


@dataclass(frozen=True)
class StateDescription:
    """What planning needs to know of one rank's state.

    `values` maps the path of each leaf that is not a tensor to whether it is per rank. `aliases` maps the path of a
    tensor with the same memory as an earlier one to that one's path. `containers` are those that are not plain dicts,
    and whether each is per rank. Tensors in `from_lowest` are written by the lowest rank that has them, even if others
    have different ones. `structure` is that of `FlatState`.
    """

    tensors: Mapping[Path, TensorSpec] = field(default_factory=dict)
    values: Mapping[Path, bool] = field(default_factory=dict)
    aliases: Mapping[Path, Path] = field(default_factory=dict)
    containers: Mapping[Path, tuple[Container, bool]] = field(default_factory=dict)
    from_lowest: frozenset[Path] = frozenset()
    structure: str = ""
