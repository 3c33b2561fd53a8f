"""Each guarantee of `docs/guarantees.md` names tests that exist, and each page that promises something is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "guarantees.md"
PAGES = (
    "guide",
    "format",
    "snapshots",
    "mirrors",
    "object_stores",
    "restart",
    "sections",
    "preemption",
    "kubernetes",
    "ray",
    "megatron",
    "migrating",
)


@functools.cache
def _functions(path: str) -> frozenset[str]:
    """The test functions of a file below `tests`; none if it does not exist."""
    file = REPOSITORY / "tests" / path
    if not file.is_file():
        return frozenset()
    body = ast.parse(file.read_text()).body
    methods = [node for each in body if isinstance(each, ast.ClassDef) for node in each.body]
    return frozenset(node.name for node in [*body, *methods] if isinstance(node, ast.FunctionDef))


def _rows(text: str) -> list[tuple[str, list[str]]]:
    """The guarantees of a page, and what stands beside each as its tests."""
    rows = re.findall(r"^\| (?!guarantee \|)(.+) \| (.+) \|$", text, re.MULTILINE)
    return [(guarantee, tests.split(", ")) for guarantee, tests in rows]


def _missing(text: str) -> list[str]:
    """What a page names as a test and is none."""
    missing = []
    for _, tests in _rows(text):
        for test in tests:
            match = re.fullmatch(r"`(\S+\.py)::(test_\w+)`", test)
            if match is None or match[2] not in _functions(match[1]):
                missing.append(test)
    return missing


def test_the_tests_of_all_guarantees_exist() -> None:
    text = PAGE.read_text()
    assert len(_rows(text)) == text.count("\n| ") - text.count("\n| guarantee |"), "each line has a guarantee and tests"
    assert not _missing(text), "docs/guarantees.md names tests that are not there: were they renamed or moved?"


def test_every_page_is_there_and_no_guarantee_twice() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^Of \[(\w+)\.md\]\(\1\.md\)\.$", text, re.MULTILINE) == list(PAGES)
    for section in text.split("\n## ")[1:]:
        guarantees = [guarantee for guarantee, _ in _rows(section)]
        assert guarantees
        assert len(guarantees) == len(set(guarantees))


def test_a_test_that_does_not_exist_is_seen() -> None:
    here = "docs/test_guarantees.py"
    text = f"| one | `{here}::test_renamed`, `{here}::test_a_test_that_does_not_exist_is_seen` |\n"
    text += "| two | `docs/gone.py::test_it` |\n"
    assert _missing(text) == [f"`{here}::test_renamed`", "`docs/gone.py::test_it`"]
