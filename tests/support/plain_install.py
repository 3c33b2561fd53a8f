"""An environment with the plain install only: this package and what `[project.dependencies]` need, no extras.

Nothing is downloaded: it is a virtual environment with links to the distributions of this one.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGE = "ckpt-inprocess"
_HARNESS = ("hypothesis", "pytest", "pytest-timeout")
_LEFT_OUT = {"..", "__pycache__"}


def make_environment(folder: Path, *, harness: bool) -> Path:
    """Make the environment in `folder`, and return its interpreter; with `harness`, pytest and hypothesis are there."""
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next(folder.glob("lib/python3*/site-packages"))
    for name in _closure((_PACKAGE, *(_HARNESS if harness else ()))):
        _link(importlib.metadata.distribution(name), packages)
    (packages / "repository.pth").write_text(f"{REPOSITORY}\n{REPOSITORY / 'tools'}\n")
    return folder / "bin" / "python"


def run_in(python: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` in the repository, with the output in the result, whatever the exit code is."""
    left_out = ("PYTHON", "PYTEST", "TESTS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return subprocess.run(
        [str(python), *arguments],
        cwd=REPOSITORY,
        env=environment | {"VIRTUAL_ENV": str(python.parents[1]), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _closure(names: Iterable[str]) -> set[str]:
    """Return the distributions with these names, and all that they require here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or of no use here
        found.add(name)
        wanted = map(Requirement, requires)
        waiting += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def _link(distribution: importlib.metadata.Distribution, packages: Path) -> None:
    """Link the files and folders of a distribution that are directly in its site-packages."""
    if distribution.metadata["Name"] == _PACKAGE:
        return  # by the path of the repository
    for top in {file.parts[0] for file in distribution.files or ()} - _LEFT_OUT:
        source, target = Path(str(distribution.locate_file(top))), packages / top
        if source.exists() and not target.exists():
            target.symlink_to(source.resolve())
