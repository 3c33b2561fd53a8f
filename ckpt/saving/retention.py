"""Which published steps stay when a new one is published.

A policy says which steps it keeps; joined by ``|``, policies keep what any of them keeps::

    Checkpointer(root, keep=Latest(3) | Every(1000) | Best("loss", 2, mode="min"))

The newest step stays whatever the policies say, and so do steps that are pinned or being read. What a policy does not
keep once is gone, so each decides from the steps that are left, always in the same way.
"""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt.arguments import whole_number
from ckpt.errors import CheckpointError
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, decode_root
from ckpt.storage.interface import Root
from ckpt.storage.names import parse_save_name
from ckpt.storage.regular_files import DamagedFileError

_SHOWN = 8
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """The facts that a policy knows of a published step: its metrics, and when it was saved (seconds since 1970).

    The step records both, so a copy of a root is decided about as the root is.
    """

    step: int
    metrics: Mapping[str, Any]
    saved_s: float


class Keep(ABC):
    """Says which published steps to keep. Frozen, and pickled to the writer process, which decides."""

    needs_facts = False
    """Whether `kept` looks at more than the numbers of the steps."""

    @abstractmethod
    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        """Return the numbers of those of `steps`, oldest first, that are to stay."""

    def __or__(self, other: Keep) -> Keep:
        """Return the policy that keeps what this one or the other keeps."""
        if not isinstance(other, Keep):
            return NotImplemented
        return _Any((*_parts(self), *_parts(other)))


def _parts(policy: Keep) -> tuple[Keep, ...]:
    return policy.policies if isinstance(policy, _Any) else (policy,)


@dataclass(frozen=True)
class _Any(Keep):
    policies: tuple[Keep, ...]

    @property
    def needs_facts(self) -> bool:  # type: ignore[override]
        return any(policy.needs_facts for policy in self.policies)

    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        return set().union(*(policy.kept(steps) for policy in self.policies))


@dataclass(frozen=True)
class Latest(Keep):
    """Keeps the newest `count` steps."""

    count: int

    def __post_init__(self) -> None:
        _check_count("Latest", self.count)

    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        """See `Keep.kept`."""
        return {each.step for each in steps[-self.count :]}


@dataclass(frozen=True)
class Every(Keep):
    """Keeps the multiples of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _check_count("Every", self.steps)

    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        """See `Keep.kept`."""
        return {each.step for each in steps if each.step % self.steps == 0}


@dataclass(frozen=True)
class EverySeconds(Keep):
    """Keeps the oldest step, and from then on each that was saved at least `seconds` after the last one kept.

    Or so long before it: then the clock was set back, and the interval begins there.
    """

    seconds: float

    needs_facts = True

    def __post_init__(self) -> None:
        if not (isinstance(self.seconds, int | float) and self.seconds > 0 and math.isfinite(self.seconds)):
            raise ValueError(f"EverySeconds takes a positive number of seconds, not {self.seconds!r}")

    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        """See `Keep.kept`."""
        kept, last = set(), -math.inf
        for each in steps:
            if abs(each.saved_s - last) >= self.seconds:
                kept.add(each.step)
                last = each.saved_s
        return kept


@dataclass(frozen=True)
class Best(Keep):
    """Keeps the `count` steps with the smallest (or largest) number of this name in their `metrics`.

    Of equal ones the older stay. Steps without that number are not kept by this policy.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    needs_facts = True

    def __post_init__(self) -> None:
        _check_count("Best", self.count)
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"Best takes the name of a metric, such as Best('loss', 2), not {self.metric!r:.80}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Best: mode must be 'min' or 'max', not {self.mode!r}")

    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        """See `Keep.kept`."""
        sign = 1 if self.mode == "min" else -1
        values = ((each.metrics.get(self.metric, math.nan), each.step) for each in steps)
        found = [(sign * value, step) for value, step in values if is_number(value)]
        return {step for _, step in sorted(found)[: self.count]}


@dataclass(frozen=True, init=False)
class Pinned(Keep):
    """Keeps the steps with these numbers. See also `Checkpointer.pin`, for steps that are there already."""

    steps: frozenset[int]

    def __init__(self, *steps: int) -> None:
        if not all(type(step) is int and step >= 0 for step in steps):
            raise ValueError(f"Pinned takes the numbers of steps, not {steps!r}")
        object.__setattr__(self, "steps", frozenset(steps))

    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        """See `Keep.kept`."""
        return {each.step for each in steps} & self.steps


def _check_count(name: str, count: Any) -> None:
    if type(count) is not int or count < 1:
        raise ValueError(f"{name} takes a whole number of at least 1, not {count!r}")


def is_number(value: Any) -> bool:
    """Return whether a metric is a number, by which steps can be compared."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def keep_policy(keep: Any, name: str = "keep") -> Keep | None:
    """Return the policy of an argument `keep`: a whole number stands for the newest steps, None keeps all."""
    if keep is None or isinstance(keep, Keep):
        return keep
    if type(keep) is int:
        return Latest(whole_number(name, keep, unit="steps"))
    raise TypeError(
        f"{name} must be a number of steps, such as 3, or a policy, such as ckpt.Latest(3) | ckpt.Every(1000), not "
        f"{keep!r:.80} ({type(keep).__name__})"
    )


# -- applying a policy -------------------------------------------------------------------------------------------------

Facts = MutableMapping[tuple[int, float], PublishedStep]
"""What is known of published steps, by number and time of the file, so that each is read once, and again if it changes.
"""


@dataclass(frozen=True, slots=True)
class Retention:
    """The steps to `keep`; None keeps all. With `reuse_files` the next save writes over the files of one that goes."""

    keep: Keep | None = None
    reuse_files: bool = False


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """The steps that were removed, how many are left, and those that the storage did not let go, with the reason.

    `absent`: the metrics that a policy is about, and no step has; `present` are those that the steps have.
    """

    removed: tuple[int, ...] = ()
    left: int = 0
    failed: Mapping[int, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    present: tuple[str, ...] = ()

    def warn(self, known: set[int | str], path: str) -> None:
        """Log the steps of the root at `path` that could not be removed, and absent metrics, but those `known`."""
        for step in self.failed.keys() - known:
            _log.warning("step %d of %s cannot be removed, others are: %s", step, path, self.failed[step])
        for metric in set(self.absent) - known:
            _log.warning(
                "keep has ckpt.Best(%r), and no step of %s has this metric, so it keeps none; %s",
                metric,
                path,
                f"they have {', '.join(map(repr, self.present))}" if self.present else "give save(..., metrics=...)",
            )
        known.intersection_update({each for each in known if isinstance(each, str)})
        known.update(self.failed, self.absent)


def retain(
    root: Root,
    retention: Retention,
    token: int,
    newest: int,
    plan: str,
    facts: Facts,
    *,
    held: Collection[str] = (),
) -> RetentionReport:
    """Remove superfluous steps, and tell which: their files are deleted later (see `remover`).

    Never removes a step that is pinned or being read, one that was published as a save in `held`, nor anything from
    `newest` on. `plan` is the digest of the plan that the next save is likely to have. For the owner: FencedError if
    `token` is not the newest; a step of a later owner is put back. A step that cannot be read is kept, if a policy
    would have to.
    """
    if retention.keep is None:
        return RetentionReport()
    root.ownership.check(token)
    steps = root.listed_steps()
    published = [step for step in steps if step <= newest]
    if retention.keep.needs_facts:
        found = {step: _facts_of(root, step, facts) for step in published}
    else:
        found = {step: PublishedStep(step, {}, 0.0) for step in published}
    known = [each for each in found.values() if each is not None]
    kept = retention.keep.kept(known) | {step for step, each in found.items() if each is None}
    superfluous = [step for step in published if step not in kept and step != newest]
    numbers = {save.step for save in map(parse_save_name, held) if save is not None}
    superfluous = [step for step in superfluous if step not in numbers or root.save_of(step) not in held]
    failed: dict[int, str] = {}
    reuse = plan if retention.reuse_files else None
    removed = root.retire_steps(superfluous, token, reuse, failed=failed) if superfluous else []
    return RetentionReport(tuple(removed), len(steps) - len(removed), failed, *_metrics_of(retention.keep, known))


def _metrics_of(keep: Keep, steps: Sequence[PublishedStep]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the metrics that `keep` is about and none of several steps has, and those that the steps have."""
    present = sorted({name for each in steps for name in each.metrics})
    wanted = [policy.metric for policy in _parts(keep) if isinstance(policy, Best)]
    absent = [name for name in wanted if name not in present] if len(steps) > 1 else []
    return tuple(absent), tuple(present[:_SHOWN])


def _facts_of(root: Root, step: int, known: Facts) -> PublishedStep | None:
    """Return what is known of a step; None if it cannot be read."""
    try:
        key = step, root.published_s(step)
        if key not in known:
            source = root.source_of(step)
            where = os.path.join(source.path, "zarr.json")
            summary = decode_root(source.read("zarr.json", MAX_DOCUMENT_BYTES), where)["attributes"]["ckpt"]
            metrics = summary["metrics"]
            known[key] = PublishedStep(step, metrics if isinstance(metrics, dict) else {}, root.saved_s(step))
    except (CheckpointError, DamagedFileError, OSError, KeyError, TypeError, ValueError):
        return None
    return known[key]
