"""The arguments of the wrapper: the signature that callers rely on, and what is refused, with which words."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from inprocess import Compose, Wrapper
from inprocess.abort import AbortTorchDistributed
from inprocess.health_check import ChainedGPUHealthCheck, ChainedNicHealthCheck, ChainedNVLHealthCheck, FaultCounter
from inprocess.rank_assignment import ShiftRanks
from inprocess.store import TCPStore

SECONDS = {
    "monitor_thread_interval": 1,
    "monitor_process_interval": 1,
    "progress_watchdog_interval": 1,
    "soft_timeout": 60,
    "hard_timeout": 90,
    "heartbeat_timeout": 30,
    "barrier_timeout": 120,
    "completion_timeout": 120,
    "last_call_wait": 1,
    "termination_grace_time": 5,
}
ABSENT = ("store_kwargs", "initialize", "finalize", "health_check", "rank_filter", "monitor_process_logfile")
LATER = ("heartbeat_interval", "completion", "terminate", "monitor_process_pidfile")
INSTANCES = {"abort": AbortTorchDistributed, "rank_assignment": ShiftRanks}
FAULTS = {"max_same_faults": 3, "max_faults_per_hour": 20, "max_backoff": timedelta(seconds=60)}


def defaults() -> dict[str, Any]:
    parameters = inspect.signature(Wrapper).parameters.values()
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    return {parameter.name: parameter.default for parameter in parameters}


def test_the_classic_signature() -> None:
    found = defaults()
    assert {name: found[name] for name in SECONDS} == {name: timedelta(seconds=s) for name, s in SECONDS.items()}
    assert [found[name] for name in ABSENT] == [None] * len(ABSENT)
    assert {name: type(found[name]) for name in INSTANCES} == INSTANCES
    assert found["store_factory"] is TCPStore
    assert found["enabled"] is True


def test_what_later_releases_added() -> None:
    found = defaults()
    assert found["heartbeat_interval"] == timedelta(seconds=1)
    assert [found[name] for name in LATER[1:]] == [None] * 3
    assert {name: found[name] for name in FAULTS} == FAULTS
    ours = found.keys() - {*SECONDS, *ABSENT, *INSTANCES, *LATER, *FAULTS, "store_factory", "enabled"}
    assert [found[name] for name in ours] == [None] * len(ours), "what is ours must be asked for"


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ("soft_timeout", "hard_timeout"),
        ("hard_timeout", "barrier_timeout"),
        ("heartbeat_timeout", "barrier_timeout"),
        ("monitor_process_interval", "heartbeat_timeout"),
        ("monitor_process_interval", "barrier_timeout"),
        ("monitor_process_interval", "soft_timeout"),
        ("monitor_thread_interval", "soft_timeout"),
        ("progress_watchdog_interval", "soft_timeout"),
        ("heartbeat_interval", "heartbeat_timeout"),
    ],
)
def test_times_that_contradict_each_other(shorter: str, longer: str) -> None:
    # All times in an order that is fine, but for the two in question, which are equal.
    times = {
        "progress_watchdog_interval": 1,
        "monitor_thread_interval": 1,
        "monitor_process_interval": 1,
        "heartbeat_interval": 1,
        "heartbeat_timeout": 10,
        "soft_timeout": 20,
        "hard_timeout": 30,
        "barrier_timeout": 40,
    }
    Wrapper(**{name: timedelta(seconds=seconds) for name, seconds in times.items()})
    times[shorter] = times[longer]
    with pytest.raises(ValueError, match="this must hold") as caught:
        Wrapper(**{name: timedelta(seconds=seconds) for name, seconds in times.items()})
    conditions = [
        (a, b) for a, b in ((shorter, longer), *_others(shorter, longer)) if f"{a} < {b}" in str(caught.value)
    ]
    assert conditions, caught.value
    for name in conditions[0]:
        assert f"{name}={timedelta(seconds=times[name])}" in str(caught.value)


def _others(shorter: str, longer: str) -> list[tuple[str, str]]:
    """An interval as long as the barrier's timeout is longer than other timeouts, too, which may be told first."""
    if (shorter, longer) == ("monitor_process_interval", "barrier_timeout"):
        return [(shorter, "heartbeat_timeout"), (shorter, "soft_timeout")]
    if (shorter, longer) == ("monitor_process_interval", "soft_timeout"):
        return [(shorter, "heartbeat_timeout")]
    return []


@pytest.mark.parametrize("name", [*SECONDS, "heartbeat_interval"])
def test_times_are_timedeltas_and_positive(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a datetime.timedelta, not float"):
        Wrapper(**{name: 1.0})
    with pytest.raises(ValueError, match=rf"{name} >=? timedelta\(0\) \({name}=-1 day"):
        Wrapper(**{name: timedelta(seconds=-1)})


def test_waits_that_may_be_left_out() -> None:
    Wrapper(last_call_wait=timedelta(0), termination_grace_time=timedelta(0), max_backoff=timedelta(0))


def test_a_launcher_replaces_the_limits_of_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INPROCESS_MAX_SAME_FAULTS", "7")
    monkeypatch.setenv("INPROCESS_MAX_FAULTS_PER_HOUR", "none")
    monkeypatch.setenv("INPROCESS_MAX_BACKOFF", "0.5")
    wrapper = Wrapper(max_same_faults=2, max_faults_per_hour=3)
    assert (wrapper.max_same_faults, wrapper.max_faults_per_hour) == (7, None)
    assert wrapper.max_backoff == timedelta(seconds=0.5)
    monkeypatch.setenv("INPROCESS_MAX_SAME_FAULTS", "many")
    with pytest.raises(ValueError, match="INPROCESS_MAX_SAME_FAULTS must be a number, not 'many'"):
        Wrapper()


@pytest.mark.parametrize("name", ["max_same_faults", "max_faults_per_hour"])
def test_limits_of_faults_are_positive_or_none(name: str) -> None:
    Wrapper(**{name: None})
    with pytest.raises(TypeError, match=f"{name} must be an int or None, not float"):
        Wrapper(**{name: 1.5})
    with pytest.raises(ValueError, match=rf"{name} >= 1 \({name}=0\); None for no limit"):
        Wrapper(**{name: 0})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"store_factory": TCPStore.close}, "store_factory must be a class"),
        ({"store_kwargs": [1]}, "store_kwargs must be a dict"),
        ({"enabled": 1}, "enabled must be a bool, not int"),
        ({"monitor_process_logfile": 3}, "monitor_process_logfile must be a path"),
        ({"initialize": 3}, "initialize must be callable, not int"),
        ({"abort": AbortTorchDistributed}, "abort must be an object that can be called, not the class"),
        ({"finalize": lambda a, b, c: None}, "finalize: .* has the parameters"),
        ({"rank_assignment": None}, "ShiftRanks"),
        ({"no_such_argument": 1}, "no_such_argument"),
    ],
)
def test_wrong_types(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Wrapper(**arguments)


def test_what_becomes_of_threads_is_a_word() -> None:
    for word in (None, "warn", "error"):
        assert Wrapper(threads=word).threads == word
    with pytest.raises(ValueError, match="threads must be 'warn' or 'error', not 'end'"):
        Wrapper(threads="end")


@pytest.mark.parametrize("name", ["monitor_process_logfile", "monitor_process_pidfile"])
def test_paths_are_absolute(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"os.path.isabs\({name}\) \({name}=logs/rank"):
        Wrapper(**{name: "logs/rank_{rank}.log"})
    assert getattr(Wrapper(**{name: tmp_path / "a_{rank}"}), name) == f"{tmp_path}/a_{{rank}}"


def test_the_health_check_after_a_fault_looks_at_the_devices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, other = FaultCounter(), FaultCounter()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert Wrapper().restart_health_check is None
    assert Wrapper(health_check=counter).restart_health_check is counter
    monkeypatch.setenv("LOCAL_RANK", "not a number")
    assert Wrapper().restart_health_check is None

    monkeypatch.setenv("LOCAL_RANK", "3")
    checks = Wrapper(health_check=Compose(other, counter)).restart_health_check.instances
    assert set(checks[-2:]) == {other, counter}
    devices = {type(check): check for check in checks[:-2]}
    assert devices.keys() == {ChainedGPUHealthCheck, ChainedNVLHealthCheck, ChainedNicHealthCheck}
    assert all(check.device_index == 3 for check in devices.values())
    assert len(Wrapper().restart_health_check.instances) == 3
