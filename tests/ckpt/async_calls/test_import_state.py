"""Background processes import what the trainer can import, however it was started and whatever it did to its path."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from tests.support.template import REPOSITORY

# A writer; with EVERYTHING also a mirror and exports: three kinds of processes, and psutil in each of them.
_JOB = """
import os

def note(path, text):
    with open(path, "a") as file:
        file.write(text)

def job(folder, fn=note):
    import ckpt  # here: the writer imports this module, too

    if "EVERYTHING" in os.environ:
        save(folder, fn)
    else:
        with ckpt.AsyncCallsQueue() as queue:
            queue.schedule_async_request(ckpt.AsyncRequest(fn, (folder + "/note", "hello"), []))
            queue.maybe_finalize_async_calls(blocking=True)
    assert open(folder + "/note").read() == "hello"
    print("done")

def save(folder, fn):
    import torch, ckpt

    export = ckpt.ExportOptions(folder + "/exports", every=7)
    options = dict(mirror=ckpt.Mirror(os.path.join(folder, "mirror")), export=export)
    events = []
    with ckpt.observe(events.append) as observation:
        with ckpt.Checkpointer(os.path.join(folder, "root"), **options) as checkpointer:
            checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(fn, (folder + "/note", "hello"), []))
            checkpointer.save({"w": torch.ones(3)}, 7)
            checkpointer.maybe_finalize(blocking=True)
        observation.close()
    failed = [event for event in events if type(event).__name__ in ("MirrorFailed", "ExportFailed")]
    assert not failed, failed
    assert checkpointer.all_steps() == [7]
    assert os.listdir(os.path.join(folder, "mirror")), "no mirror"
    assert os.listdir(folder + "/exports") == ["step_00000007"]
"""
_DIRECT = "import sys\nfrom job import job\njob(sys.argv[1])\n"
_WITH_PATHS_AND_WITHOUT_EXECUTABLE = """
import sys
from pathlib import Path
sys.path.insert(0, Path("/nowhere"))
sys.executable = None
from job import job
job(sys.argv[1])
"""
_EMPTY_EXECUTABLE = """
import sys
sys.executable = ""
from job import job
job(sys.argv[1])
"""
_SITE_AT_RUN_TIME = """
import sys
sys.path[:] = [*sys.path, *{path!r}]
from job import job
job(sys.argv[1])
"""
_STARTED = """
import multiprocessing, sys
from job import job

class Text:
    def __init__(self, text):
        self.text = text

def own(path, text):
    with open(path, "a") as file:
        file.write(Text(text).text)

def child(folder):
    job(folder, own)

if __name__ == "__main__":
    process = multiprocessing.get_context({method!r}).Process(target=child, args=(sys.argv[1],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
_SAVES = """
import sys

def note(path):
    with open(path, "w") as file:
        file.write("\\n".join(sorted(sys.modules)))

def job(folder):
    import torch, ckpt

    state = {"w": torch.ones(300, dtype=torch.bfloat16), "lr": 0.1, "nested": [1, (2, 3)]}
    with ckpt.Checkpointer(folder + "/root", keep=ckpt.Latest(1)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state, step)
        checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(note, (folder + "/note",), []))
        checkpointer.maybe_finalize(blocking=True)
    print("done")
"""
# Each costs time before the first save is durable, and memory in every writer.
_HEAVY = (
    *("torch", "ml_dtypes", "tensorstore", "zarr", "obstore", "paramiko", "safetensors", "pyarrow", "psutil"),
    *("argparse", "asyncio", "concurrent.futures.process", "decimal", "email", "fractions", "http", "logging.config"),
    *("numpy.ma", "numpy.random", "numpy.testing", "ssl", "subprocess", "unittest", "urllib.request", "xml"),
    *("ckpt.async_calls.queue", "ckpt.async_calls.writer", "ckpt.loading", "ckpt.planning", "ckpt.values"),
)
_C_LOCALE = {"LC_ALL": "C"}
_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_EVERYTHING = {"EVERYTHING": "1"}


def _run(tmp_path: Path, command: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    folder = tmp_path / "\u00f6ut"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})}
    command = [sys.executable, *command, str(folder)]
    done = subprocess.run(command, env=environment, cwd=cwd or tmp_path, capture_output=True, text=True, timeout=55)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr


@pytest.mark.parametrize(
    ("program", "env"),
    [
        pytest.param(_EMPTY_EXECUTABLE, _C_LOCALE, id="empty executable, locale C"),
        pytest.param(_DIRECT, _ASCII | _EVERYTHING, id="names of files in ASCII"),
        pytest.param(
            _WITH_PATHS_AND_WITHOUT_EXECUTABLE, _EVERYTHING, id="path with other objects than strings, no executable"
        ),
        pytest.param(_STARTED.format(method="spawn"), {}, id="spawn"),
        pytest.param(_STARTED.format(method="forkserver"), {}, id="forkserver"),
    ],
)
def test_script(tmp_path: Path, program: str, env: dict[str, str]) -> None:
    (tmp_path / "job.py").write_text(_JOB)
    (tmp_path / "script.py").write_text(program)
    _run(tmp_path, [str(tmp_path / "script.py")], env)


def test_site_packages_that_are_found_at_run_time(tmp_path: Path) -> None:
    """As programs do that build systems put together: no site, no environment."""
    (tmp_path / "job.py").write_text(_JOB)
    path = [str(tmp_path), str(REPOSITORY), *(entry for entry in sys.path if "site-packages" in entry)]
    (tmp_path / "script.py").write_text(_SITE_AT_RUN_TIME.format(path=path))
    _run(tmp_path, ["-S", "-I", str(tmp_path / "script.py")], _EVERYTHING)


def test_current_directory(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(_JOB)
    _run(tmp_path, ["-c", _DIRECT])


def test_zip_application(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", _DIRECT)
        archive.writestr("job.py", _JOB)
    _run(tmp_path, [str(tmp_path / "app.pyz")], cwd=Path("/"))


def test_a_writer_that_saves_into_a_directory_is_without_heavy_packages(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(_SAVES)
    _run(tmp_path, ["-c", _DIRECT])
    loaded = (tmp_path / "\u00f6ut" / "note").read_text().split()
    assert "ckpt.saving.write" in loaded
    assert not [name for name in _HEAVY if name in loaded]


def test_path_that_changes_after_the_writer_was_started(tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "late_module.py").write_text("def write(path):\n    open(path, 'w').write('late')\n")
    program = textwrap.dedent("""
        import sys
        import ckpt
        with ckpt.AsyncCallsQueue() as queue:
            queue.schedule_async_request(ckpt.AsyncRequest(print, ("started",), []))
            queue.maybe_finalize_async_calls(blocking=True)
            sys.path.append("late")
            from late_module import write
            queue.schedule_async_request(ckpt.AsyncRequest(write, (sys.argv[1] + "/note",), []))
            queue.maybe_finalize_async_calls(blocking=True)
        print("done")
    """)
    _run(tmp_path, ["-c", program])
    assert (tmp_path / "\u00f6ut" / "note").read_text() == "late"


def test_no_interpreter_is_an_error_at_construction(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        import ckpt, inprocess
        sys.executable = sys._base_executable = None
        sys.exec_prefix = sys.base_exec_prefix = "/nowhere"
        for make in (ckpt.AsyncCallsQueue, lambda: ckpt.Checkpointer(sys.argv[1]), inprocess.Wrapper):
            try:
                make()
            except RuntimeError as error:
                assert "Set sys.executable" in str(error), error
            else:
                raise AssertionError(make)
        print("done")
    """)
    _run(tmp_path, ["-c", program])
