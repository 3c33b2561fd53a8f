"""The sdist installs with and without a C compiler, and works; the site-packages get nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
USE_INSTALLED = REPOSITORY / "tools" / "release" / "use_installed.py"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(command: list[Any], **options: Any) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the working tree, built in a copy."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("needs setuptools 77 to build")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in ("ckpt", "inprocess", "tools", "tests", "examples"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", build], cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.mark.timeout(200)
@pytest.mark.parametrize("compiler", ["cc", "none"])
def test_the_sdist_installs_and_works(compiler: str, sdist: Path, tmp_path: Path) -> None:
    site, root = tmp_path / "site", tmp_path / "root"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    without_compiler = {"CC": "/bin/false"} if compiler == "none" else {}
    run([*PIP, "install", *offline, "--target", site, sdist], env={**os.environ, **without_compiler})
    installed = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert installed == {"ckpt", "inprocess", "inspect_ckpt", "bin"}
    assert {path.relative_to(site).as_posix() for path in site.rglob("py.typed")} == {
        "ckpt/py.typed",
        "inprocess/py.typed",
    }
    assert not [path for path in site.rglob("*") if path.suffix in (".c", ".h")]
    assert (site / "inprocess/unblock/_gloo_waits.abi3.so").exists() == (compiler == "cc")
    used = run([sys.executable, USE_INSTALLED, root, site], cwd=tmp_path, env=environment)
    assert ("in C" in used) == (compiler == "cc")
    listed = run([site / "bin" / "inspect_ckpt", "ls", root], cwd=tmp_path, env=environment)
    assert "<- restart" in listed
