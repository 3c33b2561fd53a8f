"""The arguments of a Checkpointer and its classes of options: short forms, and sentences for what is invalid."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.saves import save_here

_OPTIONS = (ckpt.Snapshots, ckpt.Staging, ckpt.FailedSaves, ckpt.Mirror, ckpt.ExportOptions)


def test_there_are_fourteen_arguments() -> None:
    assert list(inspect.signature(ckpt.Checkpointer).parameters) == [
        "root",
        "keep",
        "save_every",
        "snapshots",
        "mirror",
        "node_local",
        "export",
        "staging",
        "storage_options",
        "timeout",
        "read_only",
        "process_group",
        "queue",
        "on_failed_save",
    ]


def test_completion_shows_what_a_user_calls(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert {name for name in dir(checkpointer) if not name.startswith("_")} == {
            *("save", "async_save", "save_request", "snapshot", "step", "maybe_finalize", "warmup", "close"),
            *("restore", "recover", "start_over", "register", "last_restore", "resume_step"),
            *("all_steps", "latest_step", "current_step", "failed_steps", "replicated_step", "delete", "pin", "unpin"),
            *("root", "queue", "bridge"),
        }


@pytest.mark.parametrize("name", ["keep_last", "snapshot_every", "replicas", "linger", "slots", "on_divergence"])
def test_old_arguments_are_unknown(tmp_path: Path, name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        ckpt.Checkpointer(tmp_path, **{name: 1})


def test_short_forms_work(tmp_path: Path) -> None:
    """`keep` as a number, `snapshots` as a number, `mirror` as a path, `timeout` in seconds."""
    state = {"w": torch.arange(10.0)}
    mirror = tmp_path / "mirror"
    with ckpt.Checkpointer(
        tmp_path / "root", keep=2, save_every=2, snapshots=1, mirror=str(mirror), timeout=60
    ) as checkpointer:
        for step in range(1, 9):
            checkpointer.step(state, step)
        checkpointer.maybe_finalize(blocking=True)
        assert checkpointer.all_steps()[-2:] == [6, 8]
        checkpointer.step(state, 9)
        assert checkpointer.restore(state) == 9
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.in_memory
    with ckpt.Checkpointer(mirror, read_only=True) as reader:
        assert reader.latest_step() == 8


def test_a_schedule_that_never_saves_is_an_error(tmp_path: Path) -> None:
    for snapshots in (None, ckpt.Snapshots()):
        with ckpt.Checkpointer(tmp_path, snapshots=snapshots) as checkpointer:
            with pytest.raises(ValueError, match=r"step\(\) would never save anything: give Checkpointer save_every"):
                checkpointer.step({"w": torch.ones(3)}, 1)
            checkpointer.save({"w": torch.ones(3)}, 1 if snapshots is None else 2)
            assert checkpointer.maybe_finalize() == []


def test_a_schedule_without_step_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, at the second save: the first may be that of a job which is stopped in its first step."""
    state = {"w": torch.ones(3)}
    with ckpt.Checkpointer(tmp_path, save_every=2) as checkpointer:
        checkpointer.step(state, 1)
        for step in (3, 4, 5):
            save_here(checkpointer, state, step)
    assert "has no effect" not in caplog.text
    with ckpt.Checkpointer(tmp_path, save_every=2) as checkpointer:
        save_here(checkpointer, state, 6)
        assert "has no effect" not in caplog.text
        for step in (7, 8, 9):
            save_here(checkpointer, state, step)
    assert caplog.text.count("save_every=Steps(count=2) has no effect") == 1


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_path_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    """It is mostly that of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    for use in (
        lambda: ckpt.Checkpointer(empty),
        lambda: ckpt.Checkpointer("root", mirror=empty),
        lambda: ckpt.Checkpointer("root", mirror="mirror", node_local=empty),
        lambda: ckpt.load(empty),
        lambda: ckpt.open(empty),
    ):
        with pytest.raises(ckpt.StorageError, match="is empty: is a variable not set"):
            use()
    ckpt.Checkpointer(".").close()


def test_seconds_and_timedeltas_are_the_same(tmp_path: Path) -> None:
    assert ckpt.Snapshots(linger=90) == ckpt.Snapshots(linger=timedelta(seconds=90))
    assert ckpt.Snapshots(linger=0.25).linger == timedelta(seconds=0.25)
    assert ckpt.Mirror("m", close_timeout=0) == ckpt.Mirror("m", close_timeout=timedelta(0))
    assert ckpt.ExportOptions(tmp_path, 5, timeout=2.5) == ckpt.ExportOptions(
        tmp_path, 5, timeout=timedelta(seconds=2.5)
    )
    assert ckpt.Mirror("m", keep=3) == ckpt.Mirror("m", keep=ckpt.Latest(3))


@pytest.mark.parametrize("kind", _OPTIONS, ids=lambda kind: kind.__name__)
def test_options_are_frozen(kind: type[Any], tmp_path: Path) -> None:
    made = {ckpt.Mirror: lambda: ckpt.Mirror("m"), ckpt.ExportOptions: lambda: ckpt.ExportOptions(tmp_path, 1)}
    options = made.get(kind, kind)()
    field = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, field, None)


def _checkpointer(**options: Any) -> Callable[[], object]:
    return lambda: ckpt.Checkpointer("/nowhere", **options)


_INVALID: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "root": (lambda: ckpt.Checkpointer(7), TypeError, "root must be a directory, or a URL .*, not 7 (int)"),  # type: ignore[arg-type]
    "timeout": (_checkpointer(timeout="10m"), TypeError, "timeout must be a number of seconds or a timedelta"),
    "timeout True": (_checkpointer(timeout=True), TypeError, "timeout must be a number of seconds or a timedelta"),
    "timeout 0": (_checkpointer(timeout=0), ValueError, "timeout must be positive"),
    "timeout nan": (_checkpointer(timeout=float("nan")), ValueError, "timeout must be a finite duration"),
    "timeout long": (_checkpointer(timeout=1e17), ValueError, "timeout must be a finite duration, not 1e+17 seconds"),
    "node_local": (_checkpointer(node_local=5), TypeError, "node_local must be a directory, not 5 (int)"),
    "keep": (_checkpointer(keep="3"), TypeError, "keep must be a number of steps, such as 3, or a policy"),
    "keep True": (_checkpointer(keep=True), TypeError, "keep must be a number of steps, such as 3, or a policy"),
    "keep 0": (_checkpointer(keep=0), ValueError, "keep must be a whole number of steps of at least 1, not 0"),
    "save_every": (_checkpointer(save_every=2.5), TypeError, "save_every must be a whole number of steps"),
    "snapshots": (_checkpointer(snapshots=True), TypeError, "snapshots must be a number of steps, such as 10, or ckpt"),
    "snapshots 0": (_checkpointer(snapshots=0), ValueError, "snapshots must be a whole number of steps of at least 1"),
    "mirror": (_checkpointer(mirror=3), TypeError, "mirror must be a directory, a URL .* or ckpt.Mirror"),
    "export": (_checkpointer(export="/data"), TypeError, "export must be ckpt.ExportOptions(directory, every=1000)"),
    "staging": (
        _checkpointer(staging={"slots": 3}),
        TypeError,
        "staging must be ckpt.Staging(slots=3, ...), not {",
    ),
    "storage_options": (_checkpointer(storage_options="key"), TypeError, "storage_options must be a dict"),
    "read_only": (_checkpointer(read_only="no"), TypeError, "read_only must be True or False, not 'no' (str)"),
    "queue": (_checkpointer(queue=object()), TypeError, "queue must be a ckpt.AsyncCallsQueue"),
    "on_failed_save": (_checkpointer(on_failed_save="stop"), ValueError, "on_failed_save must be 'raise', 'warn' or"),
    "on_failed_save 3": (_checkpointer(on_failed_save=3), TypeError, "ckpt.FailedSaves(in_a_row=5, ...), not 3 (int)"),
    "FailedSaves.in_a_row": (lambda: ckpt.FailedSaves(0), ValueError, "in_a_row must be a whole number of saves of at"),
    "FailedSaves.longest": (lambda: ckpt.FailedSaves(longest="6h"), TypeError, "longest must be a number of seconds"),  # type: ignore[arg-type]
    "Staging.on_divergence": (
        lambda: ckpt.Staging(on_divergence="stop"),  # type: ignore[arg-type]
        ValueError,
        "Staging: on_divergence must be 'error', 'warn' or 'ignore', not 'stop'",
    ),
    "Snapshots.every": (lambda: ckpt.Snapshots("1"), TypeError, "Snapshots: every must be a whole number of steps"),  # type: ignore[arg-type]
    "Snapshots.replicas": (lambda: ckpt.Snapshots(replicas=2), ValueError, "Snapshots: replicas must be 0 or 1"),  # type: ignore[arg-type]
    "Snapshots.host": (lambda: ckpt.Snapshots(host="::1"), ValueError, "host is about replicas, and there are none"),
    "Snapshots.linger": (lambda: ckpt.Snapshots(linger="5m"), TypeError, "Snapshots: linger must be a number of"),  # type: ignore[arg-type]
    "Snapshots.place": (
        lambda: ckpt.Snapshots(replicas=1, place=3),
        TypeError,
        "Snapshots: place must be a text, not 3",
    ),  # type: ignore[arg-type]
    "Staging.slots": (lambda: ckpt.Staging(slots=0), ValueError, "Staging: slots must be a whole number of at least 1"),
    "Staging.overlap": (lambda: ckpt.Staging(overlap=1), TypeError, "Staging: overlap must be True or False"),  # type: ignore[arg-type]
    "Staging.compression": (
        lambda: ckpt.Staging(compression="gz"),
        ValueError,
        "compression must be None, 'zstd' or 'lz4'",
    ),
    "Staging.threads": (lambda: ckpt.Staging(threads=0), ValueError, "Staging: threads must be a whole number"),
    "Staging.bytes": (
        lambda: ckpt.Staging(max_host_bytes=1e9),
        TypeError,
        "a whole number of bytes of at least 1, not 1",
    ),  # type: ignore[arg-type]
    "Mirror.root": (lambda: ckpt.Mirror(None), TypeError, "Mirror: root must be a directory or a URL, not None"),  # type: ignore[arg-type]
    "Mirror.storage_options": (
        lambda: ckpt.Mirror("m", storage_options=["key"]),
        TypeError,
        "Mirror: storage_options must be a dict, such as {'endpoint': 'http://host:9000'}, not a list",
    ),  # type: ignore[arg-type]
    "Mirror.every": (lambda: ckpt.Mirror("m", every=0), ValueError, "Mirror: every must be a whole number of saves"),
    "Mirror.keep": (lambda: ckpt.Mirror("m", keep="3"), TypeError, "Mirror: keep must be a number of steps"),  # type: ignore[arg-type]
    "ExportOptions": (lambda: ckpt.ExportOptions(3, 1), TypeError, "ExportOptions: directory must be a path, not 3"),  # type: ignore[arg-type]
}


def test_credentials_in_a_dict_for_a_mirror_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"ckpt\.Mirror\(\.\.\.\), not a dict") as raised:
        ckpt.Checkpointer(tmp_path, mirror={"root": "s3://b/x", "storage_options": {"secret": "hunter2"}})  # type: ignore[arg-type]
    assert "hunter2" not in str(raised.value)


def test_credentials_are_in_no_text_of_a_part(tmp_path: Path) -> None:
    """Programs that show the variables of a traceback print all of them."""
    secret = {"password": "hunter2"}
    mirror = ckpt.Mirror("sftp://host/mirror", storage_options=secret)
    pytest.importorskip("paramiko", reason="needs paramiko")
    with ckpt.Checkpointer("sftp://host/root", mirror=mirror, storage_options=secret) as checkpointer:
        assert "hunter2" not in repr(checkpointer._parts)
        assert "storage_options" not in repr(mirror)


@pytest.mark.parametrize("case", _INVALID)
def test_what_is_invalid_is_an_error_that_says_what_is_expected(case: str) -> None:
    make, kind, says = _INVALID[case]
    pattern = ".*".join(map(re.escape, says.split(".*")))
    with pytest.raises(kind, match=pattern):
        make()


@pytest.mark.parametrize("scheme", ["", "file://", "directory://"])
def test_options_of_a_store_are_refused_for_a_directory(tmp_path: Path, scheme: str) -> None:
    """They would do nothing: the URL of the store is missing, or they are left from another root."""
    place, options = f"{scheme}{tmp_path}/root", {"endpoint": "http://host:9000", "secret_access_key": "hunter2"}
    for use in (
        lambda: ckpt.Checkpointer(place, storage_options=options),
        lambda: ckpt.Checkpointer(tmp_path / "other", mirror=ckpt.Mirror(place, storage_options=options)),
        lambda: ckpt.load(place, storage_options=options),
        lambda: ckpt.open(place, storage_options=options),
        lambda: ckpt.wait_until_written(place, 1, storage_options=options),
    ):
        with pytest.raises(
            ValueError, match=r"has none: leave out endpoint, secret_access_key, or give the URL"
        ) as raised:
            use()
        assert "hunter2" not in str(raised.value)
        assert str(tmp_path) in str(raised.value)
    ckpt.Checkpointer(place, storage_options={}).close()
    ckpt.Checkpointer(place, storage_options=None).close()


def test_storage_options_are_in_no_error() -> None:
    with pytest.raises(TypeError) as caught:
        ckpt.Checkpointer("/nowhere", storage_options="secret-key")  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
