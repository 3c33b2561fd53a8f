"""`Mirror`: where copies of steps go, and which."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ckpt.saving.retention import Keep

__all__ = ["Mirror"]


@dataclass(frozen=True)
class Mirror:
    """A second root, usually in an object store, that gets copies of published steps.

    root: a directory or a URL, as `Checkpointer` takes them; no other job may save there
    every: the first step that a Checkpointer saves is copied, then every N-th after it; also the first one after a
        restore that left newer steps; with `close` the last one
    keep: which steps stay in the mirror; None keeps all. The first root's `keep` does not matter here
    bandwidth: at most so many bytes per second are read to be copied, by each rank; None: no limit
    storage_options: for this root, as those of `Checkpointer`; they are not shown
    close_timeout: `close` waits so long for what is not copied yet, at most the `timeout` of the Checkpointer
    held: so many steps that wait to be copied, the newest, stay in the first root beyond its own `keep`
    """

    root: str | os.PathLike[str]
    every: int = 1
    keep: Keep | None = None
    bandwidth: float | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    close_timeout: timedelta = timedelta(minutes=5)
    held: int = 4

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"Mirror: every must be a whole number of at least 1, not {self.every!r}")
        if type(self.held) is not int or self.held < 1:
            raise ValueError(f"Mirror: held must be a whole number of at least 1, not {self.held!r}")
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise ValueError(f"Mirror: keep is a policy such as ckpt.Latest(3), not {self.keep!r}")
        if self.bandwidth is not None and not (self.bandwidth > 0 and math.isfinite(self.bandwidth)):
            raise ValueError(f"Mirror: bandwidth is a positive number of bytes per second, not {self.bandwidth!r}")
        if self.close_timeout < timedelta(0):
            raise ValueError(f"Mirror: close_timeout must not be negative, but is {self.close_timeout}")
