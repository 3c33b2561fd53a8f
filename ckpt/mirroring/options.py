"""`Mirror`: where copies of steps go, and which."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ckpt.arguments import check_mapping, check_number, duration, whole_number
from ckpt.saving.retention import Keep, keep_policy


@dataclass(frozen=True)
class Mirror:
    """A second root, usually in an object store, that gets copies of published steps.

    root: a directory or a URL, as `Checkpointer` takes them; no other job may save there
    every: the first step that a Checkpointer saves is copied, then every N-th after it; also the first one after a
        restore that left newer steps; with `close` the last one
    keep: the steps that stay in the mirror, as for `Checkpointer`; None keeps all. The first root's `keep` does not
        matter here
    bandwidth: at most so many bytes per second are read to be copied, by each rank; None: no limit
    storage_options: for this root, as those of `Checkpointer`; they are not shown
    close_timeout: `close` waits so long (a timedelta, or seconds) for what is not copied yet, at most the `timeout` of
        the Checkpointer
    held: so many steps that wait to be copied, the newest, stay in the first root beyond its own `keep`
    """

    root: str | os.PathLike[str]
    every: int = 1
    keep: Keep | int | None = None
    bandwidth: float | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    close_timeout: timedelta | float = timedelta(minutes=5)
    held: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.root, str | os.PathLike):
            raise TypeError(
                f"Mirror: root must be a directory or a URL, not {self.root!r:.80} ({type(self.root).__name__})"
            )
        whole_number("Mirror: every", self.every, unit="saves")
        whole_number("Mirror: held", self.held, unit="steps")
        object.__setattr__(self, "keep", keep_policy(self.keep, "Mirror: keep"))
        if self.bandwidth is not None:
            check_number("Mirror: bandwidth", self.bandwidth, "bytes per second")
        check_mapping("Mirror: storage_options", self.storage_options)
        close_timeout = duration("Mirror: close_timeout", self.close_timeout, or_zero=True)
        object.__setattr__(self, "close_timeout", close_timeout)

    @classmethod
    def of(cls, given: Any) -> Mirror | None:
        """Return the argument `mirror` of a `Checkpointer`; a directory or URL stands for a mirror without options."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str | os.PathLike):
            return cls(given)
        raise TypeError(
            # Not the value: a dict of arguments may have credentials, which get into no log.
            "mirror must be a directory, a URL such as 's3://bucket/run7', or ckpt.Mirror(...), not a "
            f"{type(given).__name__}"
        )
