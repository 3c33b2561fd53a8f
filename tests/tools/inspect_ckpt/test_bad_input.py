"""Bad input gives one line on stderr and the right exit code: never a traceback, never a read outside the path."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.ranks.failure import Failure
from ckpt.storage.commit import PendingSave
from ckpt.storage.documents import FORMAT_VERSION
from ckpt.storage.names import SaveId
from ckpt.storage.root import CheckpointRoot
from ckpt.validation import validate
from tests.ckpt.validation.forgery import array_of, reseal_index, reseal_part, reseal_root
from tests.support.seeds import random_bytes
from tools.inspect_ckpt.__main__ import main

READERS: dict[str, Callable[[str], list[str]]] = {
    "show": lambda path: ["show", path],
    "validate": lambda path: ["validate", path],
    "quick": lambda path: ["validate", "--quick", path],
    "stats": lambda path: ["stats", path, "*"],
    "diff": lambda path: ["diff", path, path],
    "json": lambda path: ["show", "--json", path],
}
DAMAGED = dict.fromkeys(READERS, 1) | {"diff": 2}
CANNOT = dict.fromkeys(READERS, 2)
UNPUBLISHED = dict.fromkeys(READERS, 3)


@pytest.fixture
def root(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A root with one whole step. Tests may change it."""
    shutil.copytree(saved["one"] / "step_00000004", tmp_path / "root" / "step_00000004")
    return tmp_path / "root"


def nothing(root: Path) -> Path:
    return root.parent / "nowhere"


def a_file(root: Path) -> Path:
    return root / "step_00000004" / "zarr.json"


def below_a_file(root: Path) -> Path:
    return root / "step_00000004" / "zarr.json" / "x"


def empty_folder(root: Path) -> Path:
    (root / "empty").mkdir()
    return root / "empty"


def other_folder(root: Path) -> Path:
    (root / "other").mkdir()
    (root / "other" / "notes.txt").write_text("hello")
    return root / "other"


def other_zarr_group(root: Path) -> Path:
    (root / "group").mkdir()
    (root / "group" / "zarr.json").write_text('{"zarr_format":3,"node_type":"group","attributes":{}}')
    return root / "group"


def with_line_break(root: Path) -> Path:
    return root / "two\nlines\x1b[31m"


def with_null(root: Path) -> Path:
    return root / "nu\0ll"


def begun(root: Path) -> PendingSave:
    checkpoints = CheckpointRoot(str(root))
    token = checkpoints.ownership.claim(checkpoints.ownership.newest())
    pending = PendingSave(checkpoints, SaveId(9, token, "0123456789abcdef"))
    pending.begin(1, "plan")
    checkpoints.ownership.release(token)
    return pending


def pending_save(root: Path) -> Path:
    return Path(begun(root).path)


def pending_save_just_before_its_rename(root: Path) -> Path:
    pending = begun(root)
    shutil.copytree(root / "step_00000004", pending.path, dirs_exist_ok=True)
    return Path(pending.path)


def abandoned_save(root: Path) -> Path:
    pending = begun(root)
    pending.abandon(Failure(0, "StorageError", "full"))
    return root / ".abandoned" / pending.save.name


def root_with_pending_only(root: Path) -> Path:
    begun(root)
    shutil.rmtree(root / "step_00000004")
    return root


def newer_format(root: Path) -> Path:
    step = root / "step_00000004"
    reseal_root(step, lambda document: document["attributes"]["ckpt"].update(format=FORMAT_VERSION + 1))
    return step


def older_format(root: Path) -> Path:
    step = root / "step_00000004"
    reseal_root(step, lambda document: document["attributes"]["ckpt"].update(format=1))
    return step


def _with_root(root: Path, content: bytes) -> Path:
    (root / "step_00000004" / "zarr.json").write_bytes(content)
    return root / "step_00000004"


def empty_manifest(root: Path) -> Path:
    return _with_root(root, b"")


def junk_manifest(root: Path) -> Path:
    return _with_root(root, random_bytes(10_000_000))


def json_junk_manifest(root: Path) -> Path:
    return _with_root(root, b"[" * 10_000_000)


def text_junk_manifest(root: Path) -> Path:
    return _with_root(root, b'{"a":"' + b"x\\n" * 3_000_000 + b'"}')


def missing_manifest(root: Path) -> Path:
    (root / "step_00000004" / "zarr.json").unlink()
    return root / "step_00000004"


def manifest_is_a_directory(root: Path) -> Path:
    (root / "step_00000004" / "zarr.json").unlink()
    (root / "step_00000004" / "zarr.json").mkdir()
    return root / "step_00000004"


def manifest_is_a_pipe(root: Path) -> Path:
    (root / "step_00000004" / "zarr.json").unlink()
    os.mkfifo(root / "step_00000004" / "zarr.json")
    return root / "step_00000004"


def invalid_root_document(root: Path) -> Path:
    step = root / "step_00000004"
    reseal_root(step, lambda document: document["attributes"]["ckpt"].update(parts=None))
    return step


CASES: dict[Callable[[Path], Path], dict[str, int]] = {
    nothing: CANNOT,
    a_file: CANNOT,
    below_a_file: CANNOT,
    empty_folder: CANNOT,
    other_folder: CANNOT,
    other_zarr_group: CANNOT,
    with_line_break: CANNOT,
    with_null: CANNOT,
    pending_save: UNPUBLISHED,
    pending_save_just_before_its_rename: UNPUBLISHED,
    abandoned_save: UNPUBLISHED,
    root_with_pending_only: UNPUBLISHED,
    newer_format: CANNOT,
    older_format: CANNOT,
    empty_manifest: DAMAGED,
    junk_manifest: DAMAGED,
    json_junk_manifest: DAMAGED,
    text_junk_manifest: DAMAGED,
    missing_manifest: DAMAGED,
    manifest_is_a_directory: DAMAGED,
    manifest_is_a_pipe: DAMAGED,
}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_line_and_the_right_exit_code(
    root: Path, case: Callable[[Path], Path], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = case(root)
    code = main(READERS[command](str(path)))
    out, err = capsys.readouterr()
    assert code == CASES[case][command], (out, err)
    if command in ("validate", "quick") and code == 1:
        assert "DAMAGED" in out
        assert len(out) < 2000
        assert err == ""
    else:
        assert err.count("\n") == 1, err
        assert err.startswith("inspect_ckpt: ")
        assert out == ""
    assert len(err) < 1000
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err


def test_an_invalid_root_document_is_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(invalid_root_document(root))]) == 1
    assert "does not describe a checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["show"], ["validate", "--jobs", "0", "x"], ["ls", "a", "b"]])
def test_usage_errors_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", [["stats", "nothing*"], ["stats", "model/weigth"], ["show", "--filter", "x*"]])
def test_a_name_that_matches_nothing(root: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name, *more = command
    assert main([name, str(root), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "did you mean model/weight" in err or "weigth" not in more[-1]


@pytest.mark.parametrize("command", ["ls", "timeline", "clean"])
@pytest.mark.parametrize(
    ("case", "code"),
    [
        (nothing, 2),
        (a_file, 2),
        (empty_folder, 2),
        (other_folder, 2),
        (with_line_break, 2),
        (lambda r: r / "step_00000004", 2),
    ],
)
def test_commands_for_roots(
    root: Path, case: Callable[[Path], Path], code: int, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(case(root))]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


# -- nothing outside is read -----------------------------------------------------------------------------------------


@pytest.fixture
def outside(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the step beside the root. Opening anything in it fails the test."""
    outside = root.parent / "outside"
    shutil.copytree(root / "step_00000004", outside)

    real = os.open

    def guarded(file: Any, *args: Any, **kwargs: Any) -> int:
        path = path_of(file, kwargs.get("dir_fd"))
        assert not os.path.realpath(path).startswith(str(outside)) or args[0] & os.O_NOFOLLOW, f"{path} was opened"
        return real(file, *args, **kwargs)

    monkeypatch.setattr(os, "open", guarded)
    return outside


def path_of(file: Any, folder: int | None) -> str:
    """Return the path that a call of `os.open` opens."""
    return str(file) if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), file)


def links_to(name: str) -> Callable[[Path, Path], None]:
    def make(step: Path, outside: Path) -> None:
        target = step / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        target.symlink_to(outside / name)

    return make


def renamed(*path: str) -> Callable[[Path, Path], None]:
    """Name a tensor `path`, with the directory of the copy for "{outside}"."""

    def make(step: Path, outside: Path) -> None:
        name = [key.format(outside=outside) for key in path]
        reseal_index(step, lambda index: array_of(index, "half").update(path=name))

    return make


WAYS_OUT: dict[str, Callable[[Path, Path], None]] = {
    "link to zarr.json": links_to("zarr.json"),
    "link to state.json": links_to("state.json"),
    "link to parts": links_to("parts"),
    "link to a part": links_to("parts/000/rank_00000.json"),
    "link to index.json": links_to("index.json"),
    "link to packs": links_to("packs"),
    "link to a directory of packs": links_to("packs/000"),
    "link to a pack": links_to("packs/000/rank_00000_000"),
    "tensor at ../": renamed("..", "..", "outside", "packs"),
    "tensor in the middle": renamed("model", "../../../outside", "packs"),
    "absolute tensor": renamed("{outside}", "packs"),
}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("way", WAYS_OUT)
def test_nothing_outside_the_path_is_read(
    root: Path, outside: Path, way: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = root / "step_00000004"
    WAYS_OUT[way](step, outside)
    code = main(READERS[command](str(step)))
    out, err = capsys.readouterr()
    reads_only_data = command in ("stats", "diff") and way in ("link to parts", "link to a part")
    sees_only_metadata = command in ("show", "json") and "pack" in way
    is_only_a_name = "tensor" in way and command != "validate"  # it finds another name in the database
    is_found = not (reads_only_data or sees_only_metadata or is_only_a_name)
    assert code == (DAMAGED[command] if is_found else 0), (out, err)
    assert "Traceback" not in out + err
    assert err.count("\n") <= 1


# -- no permission ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zarr.json", "state.json", "parts/000/rank_00000.json", "packs/000/rank_00000_000"])
def test_missing_permission_is_not_damage(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests may run as root, whom permissions do not stop; so `os.open` is replaced by a function that refuses."""

    real = os.open

    def refusing(file: Any, *args: Any, **kwargs: Any) -> int:
        path = path_of(file, kwargs.get("dir_fd"))
        if path.endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(file, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    assert main(["validate", str(root / "step_00000004")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "ermission" in err


# -- sealed, but not what the root says ------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "value"), [("world_size", 2), ("rank", 1), ("save", "another"), ("plan", "another")])
def test_a_part_with_a_correct_checksum_must_belong_to_the_save(root: Path, key: str, value: Any) -> None:
    step = root / "step_00000004"
    reseal_part(step, 0, lambda part: part.update({key: value}))
    (problem,) = validate(str(step)).problems
    assert problem.file == "parts/000/rank_00000.json"
    assert key in problem.message


def test_an_array_with_too_many_chunks_is_rejected_at_once(root: Path) -> None:
    step = root / "step_00000004"
    reseal_index(step, lambda index: array_of(index, "model", "weight").update(shape=[10**12, 10**5]))
    report = validate(str(step))
    assert not report.restorable
    assert len(report.problems) == 1
