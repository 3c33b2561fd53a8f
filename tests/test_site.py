"""The navigation of the site names every page, the reference every public name, the index every decision.

`make docs` checks the links.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

DOCS = Path(__file__).resolve().parents[1] / "docs"
GENERATED = {"index.md", "changelog.md", "contributing.md"}
PUBLIC_MODULES = ("ckpt", "ckpt.restart", "inprocess", "inprocess.fault_tolerance", "inprocess.rank_assignment")


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
