"""Where a step comes from, as its root summary records it: restart index, metrics of the user, versions."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import StateError
from ckpt.storage.documents import canonical_json

MAX_METRICS_BYTES = 64 << 10
"""The largest size of the metrics of a step, as JSON."""

_log = logging.getLogger("ckpt")
_MAX_NESTING = 32


@dataclass(frozen=True, slots=True)
class Lineage:
    """What the coordinator records of a save: `restart` is None outside of the in-process wrapper.

    `mirror`: the step is due for the mirror. Rank 0 decides that, once for all ranks, which read it from here. `run`:
    the name that `Checkpointer.start_over` gave to the run. `pace`: what was measured, for a policy of `save_every`.
    """

    restart: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    mirror: bool = False
    run: str | None = None
    pace: Mapping[str, Any] | None = None

    def to_document(self) -> dict[str, Any]:
        """Return the members of the intent, and of the summary, of the step."""
        document = {"restart": self.restart, "metrics": self.metrics, "versions": self.versions}
        known = {name: value for name, value in (("run", self.run), ("pace", self.pace)) if value is not None}
        return document | ({"mirror": True} if self.mirror else {}) | known


def own_versions() -> dict[str, str]:
    """Return the versions of this package and of torch, in a process that has imported torch."""
    import torch

    from ckpt.version import __version__  # it reads metadata: ten milliseconds of the start of a writer

    return {"ckpt": __version__, "torch": str(torch.__version__)}


def checked_metrics(metrics: Mapping[str, Any] | None, warned: set[str]) -> dict[str, Any]:
    """Return a copy of the metrics of a save; empty if there are none.

    Tensors and arrays without dimensions, and scalars of numpy, become Python's numbers: of a GPU that waits for what
    runs there. JSON has no nan and no infinity, so they become "NaN", "Infinity" and "-Infinity". That is logged once
    for each name, which is entered in `warned`. StateError unless metrics are a dict of numbers, strings, bools, None,
    and lists and dicts of these, with keys that are strings, of less than 64 KiB as JSON.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, dict):
        raise StateError(f"metrics must be a dict, not a {type(metrics).__name__}")
    checked = _checked(metrics, "metrics", 0)
    finite = {name: _finite(value) for name, value in checked.items()}
    for name in checked.keys() - warned:
        if finite[name] != checked[name]:
            warned.add(name)
            _log.warning(
                "the metric %r has a value that is not finite: it is recorded as a string, and policies such as "
                "ckpt.Best do not count it; is training still well?",
                name,
            )
    data = canonical_json(finite)
    if len(data) >= MAX_METRICS_BYTES:
        raise StateError(f"metrics have {len(data)} bytes as JSON, and may have {MAX_METRICS_BYTES - 1}")
    copy: dict[str, Any] = json.loads(data)
    return copy


def _checked(value: Any, where: str, depth: int) -> Any:
    """Return a value of metrics with Python's numbers in place of tensors and scalars. StateError if it has others."""
    if depth > _MAX_NESTING:
        raise StateError(f"metrics are nested deeper than {_MAX_NESTING}, or contain themselves")
    value = _number(value, where)
    if isinstance(value, dict):
        for key in value:
            _check_text(key, f"{where}: the key {key!r:.80}")
        return {key: _checked(item, f"{where}[{key!r:.80}]", depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise StateError(f"{where} is an integer of more than 64 bits")
    elif value is not None and not isinstance(value, float):
        _check_text(value, where)
    return value


def _number(value: Any, where: str) -> Any:
    """Return the number in a tensor or an array without dimensions, or a scalar of numpy; another value as it is.

    Not that of a distributed tensor, which would need all ranks. Torch may not be imported.
    """
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item") or hasattr(value, "full_tensor"):
        return value
    try:
        number = value.item()
    except Exception as error:  # as of a tensor without storage
        raise StateError(f"{where} is a {type(value).__name__} without a value: {error}") from error
    return value if isinstance(number, complex) else number


def _finite(value: Any) -> Any:
    """Return a checked value with strings in place of the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise StateError(
            f"{where} is a {type(value).__name__}; metrics are numbers, strings, bools, None, and lists and dicts of "
            "these: use tensor.item() for a number"
        )
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise StateError(f"{where} is not valid Unicode")
