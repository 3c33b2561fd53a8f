"""`--ft-preload`: workers in processes that were started before, and have imported modules."""

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from inprocess.fault_tolerance.launcher.preloading import PreloadedWorkers
from tests.inprocess.fault_tolerance.launching import Job

PRINTS = """
    import json, multiprocessing, os, sys, threading
    loaded = "slow" in sys.modules
    import beside, slow

    class Here:
        pass

    def ends():
        main = sys.modules["__main__"]
        print("ends", main.__dict__ is globals(), Here is main.Here, file=sys.stderr)

    threading.Thread(target=lambda: (threading.main_thread().join(), ends())).start()
    print(json.dumps({
        "loaded": loaded, "pid": os.getpid(), "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
        "session": os.getsid(0) == os.getpid(), "environment": dict(os.environ), "cwd": os.getcwd(),
        "fds": sorted(os.listdir("/proc/self/fd")),
    }, sort_keys=True))
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a program, a module beside it, and one on the path that takes time to import."""
    tmp_path.joinpath("program").mkdir()
    tmp_path.joinpath("program", "main.py").write_text(textwrap.dedent(PRINTS))
    tmp_path.joinpath("program", "beside.py").touch()
    tmp_path.joinpath("program", "package").mkdir()
    tmp_path.joinpath("program", "package", "__init__.py").touch()
    tmp_path.joinpath("lib").mkdir()
    tmp_path.joinpath("lib", "slow.py").write_text("import os\nFOUND = os.environ.get('OMP_NUM_THREADS')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lib'}:{tmp_path / 'program'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def preloaded() -> Iterator[PreloadedWorkers]:
    found = PreloadedWorkers(["slow"], 1)
    yield found
    found.close()


def run(
    folder: Path, preloaded: PreloadedWorkers | None, arguments: Sequence[str], **env: str
) -> tuple[int, dict[str, Any], str]:
    """Run a program as torch does; its exit code, what it prints, and its standard error."""
    make = SubprocessHandler if preloaded is None else preloaded.handler
    handler = make(
        entrypoint=sys.executable,
        args=("-u", *arguments),
        env={"RANK": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **env},
        stdout=str(folder / "out"),
        stderr=str(folder / "err"),
        local_rank_id=0,
        numa_options=None,
    )
    code = handler.proc.wait(30)
    for file in (handler._stdout, handler._stderr):
        assert file is not None
        file.close()
    return code, json.loads((folder / "out").read_text()), (folder / "err").read_text()


@pytest.mark.parametrize("program", ["script", "module", "directory"])
def test_a_program_finds_what_it_finds_in_a_process_of_its_own(
    folder: Path, preloaded: PreloadedWorkers, program: str
) -> None:
    script, directory = folder / "program" / "main.py", folder / "program" / "app"
    directory.mkdir()
    directory.joinpath("__main__.py").write_text(script.read_text())
    arguments = {"script": [str(script)], "module": ["-m", "main"], "directory": [str(directory)]}[program]
    preloaded.fill()
    (pid,) = preloaded.pids
    fresh = run(folder, None, [*arguments, "7"])
    taken = run(folder, preloaded, [*arguments, "7"])
    assert taken[1].pop("pid") == pid != fresh[1].pop("pid")
    assert (taken[1].pop("loaded"), fresh[1].pop("loaded")) == (True, False)
    assert taken == fresh
    assert taken[0] == 7


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_modules_of_the_program_are_not_taken_for_those_beside_the_waiting_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, safe_path: str
) -> None:
    """The launcher has a module `node_table`, too."""
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    (folder / "program" / "node_table.py").write_text("MINE = True\n")
    main = folder / "program" / "main.py"
    main.write_text(f"import node_table\nassert node_table.MINE\n{main.read_text()}")
    found = []
    for modules in ([], ["node_table"]):
        preloaded = PreloadedWorkers(modules, 1)
        preloaded.fill()
        code, values, errors = run(folder, preloaded, [str(main), "0"])
        assert code == 0, errors
        found.append(values["path"])
    assert found[0] == found[1]


def test_a_program_that_comes_early_waits_for_the_modules_only(folder: Path, preloaded: PreloadedWorkers) -> None:
    preloaded.fill(delay_s=3600)
    (pid,) = preloaded.pids
    code, found, _ = run(folder, preloaded, [str(folder / "program" / "main.py"), "0"])
    assert (code, found["pid"], found["loaded"]) == (0, pid, True)


@pytest.mark.parametrize("name", ["absent", "exits"])
def test_a_module_that_cannot_be_imported_does_not_keep_the_program_from_running(folder: Path, name: str) -> None:
    (folder / "lib" / "exits.py").write_text("raise SystemExit(9)")
    preloaded = PreloadedWorkers([name], 1)
    preloaded.fill(delay_s=3600)
    (pid,) = preloaded.pids
    code, found, _ = run(folder, preloaded, [str(folder / "program" / "main.py"), "0"])
    assert (code, found["pid"], found["loaded"]) == (0, pid, False)


@pytest.mark.parametrize(
    ("env", "dies", "said"),
    [({"CUDA_VISIBLE_DEVICES": "3"}, False, "CUDA_VISIBLE_DEVICES"), ({}, True, "has ended")],
)
def test_a_process_that_is_not_right_is_not_taken(
    folder: Path,
    preloaded: PreloadedWorkers,
    env: dict[str, str],
    dies: bool,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    preloaded.fill()
    (pid,) = preloaded.pids
    if dies:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    code, found, _ = run(folder, preloaded, [str(folder / "program" / "main.py"), "0"], **env)
    assert (code, found["loaded"]) == (0, False)
    assert not os.path.exists(f"/proc/{pid}"), "it has ended"
    assert said in caplog.text


def test_processes_that_wait_end_with_their_launcher(job: Job) -> None:
    script = """
    say("loaded", "colorsys" in sys.modules)
    if cycle == 0:
        sys.exit(5)
    hang()
    """
    launcher = job.one_node(script, "--ft-preload=colorsys,wave")
    job.wait_event("cycle 1 rank 0 loaded True")
    launcher.die_with_workers()
    job.wait_for(lambda: "none" if not job.left() else "", "none", 20)
