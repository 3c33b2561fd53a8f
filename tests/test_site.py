"""The site builds; its navigation names every page, the reference every public name, the index every decision."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
GENERATED = {"index.md", "changelog.md", "contributing.md"}
PUBLIC_MODULES = (
    "ckpt",
    "ckpt.restart",
    "ckpt.sinks",
    "inprocess",
    "inprocess.fault_tolerance",
    "inprocess.rank_assignment",
    "inprocess.straggler",
)


def _targets(nav: Any) -> Iterator[str]:
    """Every page and folder of a navigation: nested lists of names, and of dicts from titles to names or lists."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from _targets(entry)


def _references() -> set[str]:
    """The names that the pages of the reference document."""
    pages = (path.read_text() for path in (DOCS / "reference").glob("*.md"))
    return {name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}


def test_the_navigation_names_every_page() -> None:
    targets = set(_targets(yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text())["nav"]))
    folders = {target for target in targets if target.endswith("/")}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    in_folders = {page for page in pages if any(page.startswith(folder) for folder in folders)}
    assert targets - folders == (pages - in_folders) | GENERATED
    assert all((DOCS / folder).is_dir() for folder in folders)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_the_reference_has_every_public_name(name: str) -> None:
    module = import_module(name)
    values = {f"{name}.{public}": getattr(module, public) for public in module.__all__}
    missing = {dotted for dotted, value in values.items() if not isinstance(value, ModuleType)} - _references()
    assert not missing


def test_the_reference_has_the_names_of_every_adapter_and_what_public_methods_return() -> None:
    """An adapter is read, not imported: its framework need not be there."""
    names = {"ckpt.loading.restore_step.RestoreReport", "ckpt.Checkpoint", "ckpt.LazyTensor"}
    for file in sorted((REPOSITORY / "ckpt" / "integrations").glob("*.py")):
        if "_" in file.stem:  # a part of an adapter, or __init__
            continue
        values = {
            target.id: node.value
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        names |= {f"ckpt.integrations.{file.stem}.{name}" for name in ast.literal_eval(values["__all__"])}
    assert not names - _references()


def test_pages_and_messages_ask_for_the_versions_of_the_package() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest = {name: m[1] for name, needs in extras.items() if (m := re.match(r"[^=>]+>=([\d.]+)", needs[0]))}
    said = 0
    for file in [*(DOCS / "integrations").glob("*.md"), *(REPOSITORY / "ckpt" / "integrations").glob("*.py")]:
        text = re.sub(r"\[(\w+)\]\([^)]*\)", r"\1", file.read_text())
        for name, version in re.findall(r"(\w+) (\d+(?:\.\d+)+) or\s+newer", text):
            assert version == oldest[name.lower()], f"{file}: {name} {version}"
            said += 1
    assert said >= 8


def test_pages_install_what_there_is() -> None:
    """The package is on no index: pages install a clone, with extras that exist."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        text = page.read_text()
        assert "ckpt-inprocess[" not in text, page
        for wanted in re.findall(r"install.* '\.\[([\w,]+)\]'", text):
            assert set(wanted.split(",")) <= set(extras), page


@pytest.mark.timeout(180)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(DOCS / "site" / "mkdocs.yml")]
    built = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")], capture_output=True, text=True, timeout=170, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "examples" / "with_accelerate.py").exists()
    assert "RestoreReport" in (tmp_path / "site" / "reference" / "ckpt.html").read_text()


def test_the_index_of_decisions_has_each_once_and_marks_those_that_were_changed() -> None:
    folder = DOCS / "decisions"
    index = (folder / "README.md").read_text()
    lines = re.findall(r"^\* (\d{4}): \[(.+?)\]\((\S+\.md)\)(?:; changed by (.+))?$", index, re.MULTILINE)
    files = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    assert sorted(file for _, _, file, _ in lines) == files, "docs/decisions/README.md needs a line for each decision"
    for number, title, file, changed_by in lines:
        text = (folder / file).read_text().splitlines()
        assert re.fullmatch(rf"# {number}[ -]+{re.escape(title)}", text[0]), f"{file} has the title {text[0]!r}"
        for later in re.findall(r"\[(\d{4})\]", changed_by):
            assert later in "\n".join(text[1:14]), f"{file} does not say near its beginning that {later} changed it"
