"""The command line as users start it: from a checkout or installed, on a terminal or in a pipe, without torch."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt
from tests.tools.inspect_ckpt.commands import REPOSITORY
from tools.inspect_ckpt import __main__ as command_line


@pytest.fixture
def root(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the root that two ranks saved to."""
    return Path(shutil.copytree(saved["two"], tmp_path / "root"))


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tools.inspect_ckpt", *map(str, arguments)]
    return subprocess.run(
        line, cwd=REPOSITORY, capture_output=True, text=True, timeout=50, env={**os.environ, **environment}
    )


def test_torch_is_never_imported(root: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    commands = [["ls", root], ["show", root], ["validate", root], ["diff", root, root], ["stats", root, "*"]]
    commands += [["timeline", root], ["clean", root, "--dry-run"], ["memory"]]
    code = f"""
import sys
from tools.inspect_ckpt.__main__ import main
for arguments in {[[str(a) for a in line] for line in commands]!r}:
    assert main(arguments) == 0, arguments
assert "torch" not in sys.modules
"""
    path = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert answer.returncode == 0, answer.stderr


def test_every_module_imports_relatively() -> None:
    for file in Path(command_line.__file__).parent.rglob("*.py"):
        with_torch = file.name in ("torch_file.py", "dcp_writer.py", "dcp_reader.py")
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith(("tools", "inspect_ckpt")) for name in names), file
            assert with_torch or not any(name.startswith("torch") for name in names), file


def test_runs_from_a_checkout(root: Path) -> None:
    answer = command("ls", root)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "\x1b" not in answer.stdout
    assert "exit codes" in command("--help").stdout


def test_a_closed_pipe_is_not_an_error(root: Path) -> None:
    line = f"{sys.executable} -m tools.inspect_ckpt show {root} | head -1; exit ${{PIPESTATUS[0]}}"
    answer = subprocess.run(["bash", "-c", line], cwd=REPOSITORY, capture_output=True, text=True, timeout=50)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_colours_unless_told_otherwise(root: Path, no_color: str) -> None:
    pytest.importorskip("rich")
    import pty

    master, slave = pty.openpty()
    line = [sys.executable, "-m", "tools.inspect_ckpt", "validate", "--quick", str(root)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": no_color}
    with subprocess.Popen(line, cwd=REPOSITORY, stdout=slave, stderr=subprocess.PIPE, env=environment) as process:
        os.close(slave)
        chunks = []
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(master)
    text = b"".join(chunks).decode()
    assert process.returncode == 0
    assert "newest whole step: 4" in text
    assert ("\x1b[32m" in text) == (not no_color)


@pytest.mark.parametrize("without_rich", [False, True])
def test_progress_on_a_terminal(root: Path, without_rich: bool) -> None:
    if not without_rich:
        pytest.importorskip("rich")
    import pty

    code = "import sys, time\n" + ("sys.modules['rich'] = None\n" if without_rich else "")
    code += "from ckpt import progress\nprogress._REDRAW_S = 0.0\n"
    code += f"from tools.inspect_ckpt.__main__ import main\nsys.exit(main(['validate', {str(root)!r}]))"
    shown = {}
    for wanted in ("0", "1"):
        master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "CKPT_PROGRESS": wanted}
        line = [sys.executable, "-c", code]
        done = subprocess.run(line, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=slave, env=environment, timeout=50)
        assert done.returncode == 0
        os.write(slave, b"<end>")
        os.close(slave)
        shown[wanted] = os.read(master, 65536)
        os.close(master)
        assert b"newest whole step: 4" in done.stdout
    assert shown["0"] == b"<end>"
    assert b"step_00000004" in shown["1"]


def test_the_version_is_printed() -> None:
    answer = command("--version")
    assert (answer.returncode, answer.stdout) == (0, f"inspect_ckpt {ckpt.__version__}\n")


def test_tab_completes_commands_options_and_paths(root: Path) -> None:
    pytest.importorskip("shtab")
    script = command("--print-completion", "bash")
    assert (script.returncode, script.stderr) == (0, "")
    ask = """
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
        $(complete -p inspect_ckpt | sed 's/.*-F *//; s/ .*//') inspect_ckpt "${COMP_WORDS[COMP_CWORD]}"
        echo "${COMPREPLY[@]}"
    """
    lines = ["inspect_ckpt va", "inspect_ckpt validate --qu", f"inspect_ckpt ls {root.parent}/ro"]
    asked = "".join(f"COMP_WORDS=({line}); {ask}\n" for line in lines)
    answer = subprocess.run(["bash", "-c", script.stdout + asked], capture_output=True, text=True, timeout=50)
    assert answer.stdout.splitlines() == ["validate", "--quick", str(root)], answer.stderr


def test_completion_without_shtab_says_what_to_install() -> None:
    code = "import sys; sys.modules['shtab'] = None; from tools.inspect_ckpt.__main__ import main; sys.exit(main())"
    line = [sys.executable, "-c", code, "--print-completion", "zsh"]
    answer = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=50)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "tab completion needs shtab: pip install 'ckpt-inprocess[tools]'" in answer.stderr
