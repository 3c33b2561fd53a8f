"""The arguments of `Wrapper`, checked."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from types import MappingProxyType
from typing import Any

__all__ = ["LAUNCHER_VARIABLES", "Hook", "RejoinPolicy", "Settings"]

Hook = Callable[..., Any]  # of either style: see `inprocess.hook_compat`

_SHORTER_THAN = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
)
_MAY_BE_ZERO = ("last_call_wait", "termination_grace_time", "max_backoff")
_COUNTS = ("max_same_faults", "max_faults_per_hour")
_THREADS = (None, "warn", "error")  # about those of an interrupted iteration that go on
_ABSOLUTE_PATHS = ("monitor_process_logfile", "monitor_process_pidfile")
LAUNCHER_VARIABLES: Mapping[str, str] = MappingProxyType(
    {name: f"INPROCESS_{name.upper()}" for name in (*_COUNTS, "max_backoff", "rejoin")}
)
"""The environment variables by which a launcher replaces these settings.

Limits are numbers, or "none" for no limit; times are in seconds; `rejoin` is as in the argument.
"""


@dataclass(frozen=True)
class RejoinPolicy:
    """When a process that is ready to join makes the others restart: `delay_s` after it is ready; None: never."""

    delay_s: float | None

    @classmethod
    def from_text(cls, text: str | None) -> RejoinPolicy:
        """Read "now" (also for None), "next-restart" or "after=SECONDS". ValueError for other texts."""
        if text is None or text == "now":
            return cls(0.0)
        if text == "next-restart":
            return cls(None)
        name, _, number = text.partition("=")
        try:
            delay_s = float(number)
        except ValueError:
            delay_s = math.nan
        if name != "after" or not 0 <= delay_s < math.inf:
            raise ValueError(f"rejoin must be 'now', 'next-restart', or 'after=SECONDS' like 'after=60', not {text!r}")
        return cls(delay_s)


@dataclass(kw_only=True, eq=False)
class Settings:
    """The arguments of `Wrapper`. TypeError for a wrong type, ValueError for a violated relation."""

    store_factory: Any
    store_kwargs: Any = None  # a dict, empty for None
    initialize: Hook | None = None
    abort: Hook | None = None
    completion: Hook | None = None
    terminate: Hook | None = None
    finalize: Hook | None = None
    health_check: Hook | None = None
    rank_assignment: Hook | None = None
    rank_filter: Hook | None = None
    monitor_thread_interval: timedelta = timedelta(seconds=1)
    monitor_process_interval: timedelta = timedelta(seconds=1)
    heartbeat_interval: timedelta = timedelta(seconds=1)
    progress_watchdog_interval: timedelta = timedelta(seconds=1)
    soft_timeout: timedelta = timedelta(seconds=60)
    hard_timeout: timedelta = timedelta(seconds=90)
    heartbeat_timeout: timedelta = timedelta(seconds=30)
    barrier_timeout: timedelta = timedelta(seconds=120)
    completion_timeout: timedelta = timedelta(seconds=120)
    last_call_wait: timedelta = timedelta(seconds=1)
    termination_grace_time: timedelta = timedelta(seconds=5)
    max_same_faults: int | None = 3
    max_faults_per_hour: int | None = 20
    max_backoff: timedelta = timedelta(seconds=60)
    monitor_process_logfile: Any = None  # a path; text from here on
    monitor_process_pidfile: Any = None
    sections: Any = None
    uninterrupted_modules: Any = None  # names of modules; a tuple from here on
    threads: str | None = None  # as "warn"
    rejoin: str | None = None  # as "now"
    enabled: bool = True

    def __post_init__(self) -> None:
        self._take_from_launcher(os.environ)
        for name in _COUNTS:
            self._check_count(name)
        for item in fields(self):
            if isinstance(item.default, timedelta):
                self._check_duration(item.name)
        for shorter, longer in _SHORTER_THAN:
            a, b = getattr(self, shorter), getattr(self, longer)
            _require(a < b, f"{shorter} < {longer}", {shorter: a, longer: b})
        for name in _ABSOLUTE_PATHS:
            path = getattr(self, name)
            if path is None:
                continue
            if not isinstance(path, str | os.PathLike):
                raise TypeError(f"{name} must be a path or None, not {type(path).__name__}")
            setattr(self, name, os.fspath(path))
            _require(os.path.isabs(path), f"os.path.isabs({name})", {name: os.fspath(path)})
        if not isinstance(self.store_factory, type):
            raise TypeError(f"store_factory must be a class of stores, not {type(self.store_factory).__name__}")
        if self.store_kwargs is None:
            self.store_kwargs = {}
        if not isinstance(self.store_kwargs, dict):
            raise TypeError(f"store_kwargs must be a dict, not {type(self.store_kwargs).__name__}")
        if self.sections is not None and not hasattr(self.sections, "rank_section_timeouts"):
            raise TypeError(f"sections must be a FaultToleranceConfig or None, not {type(self.sections).__name__}")
        modules = () if self.uninterrupted_modules is None else self.uninterrupted_modules
        if isinstance(modules, str) or not all(isinstance(name, str) for name in modules):
            raise TypeError(f"uninterrupted_modules must be names of modules, such as ('pandas',), not {modules!r}")
        self.uninterrupted_modules = tuple(modules)
        if self.threads not in _THREADS:
            raise ValueError(f"threads must be 'warn' or 'error', not {self.threads!r}")
        if not isinstance(self.rejoin, str | None):
            raise TypeError(f"rejoin must be a str or None, not {type(self.rejoin).__name__}")
        RejoinPolicy.from_text(self.rejoin)
        if not isinstance(self.enabled, bool):
            raise TypeError(f"enabled must be a bool, not {type(self.enabled).__name__}")

    def _take_from_launcher(self, environment: Mapping[str, str]) -> None:
        """Replace the settings that the launcher has given. ValueError for a limit that is no number."""
        self.rejoin = environment.get(LAUNCHER_VARIABLES["rejoin"], self.rejoin)
        for name in (*_COUNTS, "max_backoff"):
            variable = LAUNCHER_VARIABLES[name]
            text = environment.get(variable)
            if text is None:
                continue
            try:
                if name in _COUNTS:
                    setattr(self, name, None if text == "none" else int(text))
                else:
                    setattr(self, name, timedelta(seconds=float(text)))
            except (ValueError, OverflowError):
                raise ValueError(f"the environment variable {variable} must be a number, not {text!r}") from None

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name} must be an int or None, not {type(value).__name__}")
        _require(value is None or value >= 1, f"{name} >= 1", {name: value}, hint="None for no limit")

    def _check_duration(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, timedelta):
            raise TypeError(f"{name} must be a datetime.timedelta, not {type(value).__name__}")
        if name in _MAY_BE_ZERO:
            _require(value >= timedelta(0), f"{name} >= timedelta(0)", {name: value})
        else:
            _require(value > timedelta(0), f"{name} > timedelta(0)", {name: value})


def require_main_thread() -> None:
    """Raise ValueError outside the main thread."""
    _require(
        threading.current_thread() is threading.main_thread(),
        "threading.current_thread() is threading.main_thread()",
        {"threading.current_thread()": threading.current_thread().name},
        hint="call the wrapped function on the main thread: no other thread can be freed from a blocking call. In a "
        "framework that runs it in a thread, such as Ray Train, leave the wrapper out: the framework restarts workers",
    )


def require_no_process_group() -> None:
    """Raise ValueError if torch.distributed is not available, or has a process group already."""
    import torch.distributed

    _require(torch.distributed.is_available(), "torch.distributed.is_available()")
    _require(
        not torch.distributed.is_initialized(),
        "not torch.distributed.is_initialized()",
        hint="create process groups inside the wrapped function: each restart needs new ones",
    )


def _require(holds: bool, condition: str, values: Mapping[str, object] | None = None, hint: str = "") -> None:
    if holds:
        return
    shown = ", ".join(f"{name}={value}" for name, value in (values or {}).items())
    raise ValueError(f"this must hold: {condition}" + (f" ({shown})" if shown else "") + (f"; {hint}" if hint else ""))
