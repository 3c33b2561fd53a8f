"""The house (decision 0030) stays one that a reader can hold: short files, one name for one thing, a map that is true.

The lists are exceptions of today. They may only shrink: an entry that is not needed any more has to be removed.
"""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

from tools.measure.sources import LONGEST_FILE, Module, long_files, modules_of, repeated_classes, repeated_modules

REPOSITORY = Path(__file__).resolve().parents[1]

# Longer files, and the lines that each may have.
LONG_FILES: dict[str, int] = {}

# Names of modules with one meaning in every package: what the package sends, what users set, and so on.
ROLES = {"background", "errors", "interface", "messages", "options", "worker"}

# Other names of modules that several packages have, and how many.
SAME_MODULES: dict[str, int] = {}

# Names that several classes have, and how many.
SAME_CLASSES = {
    "MaxActiveWorldSize": 2,  # fixed by nvidia_resiliency_ext, in two modules: a rank assignment, and a filter
    "RankFilter": 2,  # likewise
}


@pytest.fixture(scope="module")
def libraries() -> list[Module]:
    return [module for package in ("ckpt", "inprocess") for module in modules_of(REPOSITORY, package)]


def _compare(found: dict[str, int], allowed: dict[str, int], advice: dict[str, str]) -> None:
    grown = [f"{name}: {advice[name]}" for name, number in found.items() if number > allowed.get(name, 0)]
    assert not grown, "\n".join(grown)
    gone = sorted(allowed.keys() - found.keys())
    assert not gone, f"an exception is not needed any more, remove it: {gone}"


def test_files_are_short(libraries: list[Module]) -> None:
    found = long_files(libraries + modules_of(REPOSITORY, "tools") + modules_of(REPOSITORY, "examples"))
    advice = {
        name: f"{lines} lines, of at most {LONG_FILES.get(name, LONGEST_FILE)}: move a part with a name of its own"
        for name, lines in found.items()
    }
    _compare(found, LONG_FILES, advice)


def test_a_name_of_a_module_has_one_meaning(libraries: list[Module]) -> None:
    found = {name: where for name, where in repeated_modules(libraries).items() if name not in ROLES}
    advice = {name: f"is in {', '.join(sorted(where))}: choose another name" for name, where in found.items()}
    _compare({name: len(where) for name, where in found.items()}, SAME_MODULES, advice)


def test_a_name_of_a_class_has_one_meaning(libraries: list[Module]) -> None:
    found = repeated_classes(libraries)
    advice = {name: f"is in {', '.join(sorted(where))}: choose another name" for name, where in found.items()}
    _compare({name: len(where) for name, where in found.items()}, SAME_CLASSES, advice)


def _places() -> set[str]:
    """Every path of the repository's sources, with each of its ends: `storage/root.py` for ckpt/storage/root.py."""
    paths = [
        path.relative_to(REPOSITORY)
        for folder in ("ckpt", "inprocess", "tools", "tests", "docs", "examples")
        for path in [REPOSITORY / folder, *(REPOSITORY / folder).rglob("*")]
        if "__pycache__" not in path.parts
    ]
    return {"/".join(path.parts[start:]) for path in paths for start in range(len(path.parts))}


def _missing(text: str, names: set[str]) -> set[str]:
    """Return the files, folders, classes and methods in backticks that are not there."""
    places = _places()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    missing = set()
    for quoted in re.findall(r"`([^`]+)`", prose):
        name = quoted.rstrip("/")
        is_path = re.fullmatch(r"\w[\w*-]*(/[\w*-]+)*\.(py|c|md)|\w[\w-]*(/[\w-]+)+", name)
        if is_path and name not in places and not ("*" in name and fnmatch.filter(places, name)):
            missing.add(quoted)
        if (found := re.match(r"[A-Z][a-z]+(?:[A-Z][a-z]+)+(?:\.\w+)?", quoted)) and found[0] not in names:
            missing.add(quoted)
    return missing


def test_the_map_names_what_is_there(libraries: list[Module]) -> None:
    classes = [found for module in libraries for found in module.classes]
    names = {found.name for found in classes}
    names |= {
        f"{found.name}.{method.name}"
        for found in classes
        for method in found.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not _missing((REPOSITORY / "docs" / "architecture.md").read_text(), names)


def test_the_map_has_every_package() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    folders = [path.parent for package in ("ckpt", "inprocess") for path in (REPOSITORY / package).rglob("__init__.py")]
    names = {folder.relative_to(REPOSITORY).as_posix() for folder in folders} - {"ckpt", "inprocess"}
    missing = {name for name in names if f"`{name}`" not in text and f"{name.partition('/')[2]}/" not in text}
    assert not missing, f"docs/architecture.md does not tell what is in {sorted(missing)}"


def test_a_missing_file_and_class_are_seen() -> None:
    text = "`storage/root.py`, `storage/gone.py`, `ckpt/gone`, `store_*.py`, `gone_*.py`, `PendingSave.join`"
    assert _missing(text, {"PendingSave"}) == {"storage/gone.py", "ckpt/gone", "gone_*.py", "PendingSave.join"}
    assert not _missing("`PendingSave.join` and `PendingSave`", {"PendingSave", "PendingSave.join"})


def _pages_in_messages(path: Path) -> list[str]:
    """Return the texts of a module, docstrings aside, that name a page of the repository."""
    tree = ast.parse(path.read_text(), str(path))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = [node for node in texts if id(node) not in alone and re.search(r"\w\.md\b|\bdocs/", node.value)]
    return [f"{path.relative_to(REPOSITORY)}:{node.lineno}: {node.value:.80}" for node in named]


def test_messages_name_no_page_of_the_repository() -> None:
    """Who has installed the package has no docs/: a message says it itself."""
    folders = ("ckpt", "inprocess", "tools/inspect_ckpt")
    found = [
        each for name in folders for path in (REPOSITORY / name).rglob("*.py") for each in _pages_in_messages(path)
    ]
    assert not found, "\n".join(found)
