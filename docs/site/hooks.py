"""Pages of the site that are not files under docs/: those at the top of the repository, and the examples."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[2]
TOP_LEVEL = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_ALONE = "---\nhide: [navigation]\n---\n\n"  # a page without others in its section
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_INDEX = "README.md"  # of a folder, where it has one: the first of its pages


def on_config(config: MkDocsConfig) -> None:
    """Replace each folder in the navigation by its pages."""
    config.nav = [_expanded(entry) for entry in config.nav or []]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are made."""
    for source, page in TOP_LEVEL.items():
        text = _LINK.sub(lambda match: _target(match[1]), (REPOSITORY / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=_ALONE + text if page == "index.md" else text))
    examples = REPOSITORY / "examples"
    for example in sorted([*examples.glob("*.py"), *examples.glob("kubernetes/*.yaml")]):
        name = example.relative_to(REPOSITORY).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(example)))


def on_page_markdown(markdown: str, **_: object) -> str:
    """Have links to examples, which are beside docs/ in the repository, lead to those of the site."""
    return re.sub(r"\]\(\.\./(\.\./)?examples/", r"](\1examples/", markdown)


def _expanded(entry: object) -> object:
    if not isinstance(entry, dict):
        return entry
    ((title, value),) = entry.items()
    if isinstance(value, str) and value.endswith("/"):
        pages = {path.name for path in (REPOSITORY / "docs" / value).glob("*.md")}
        return {title: [f"{value}{page}" for page in sorted(pages, key=lambda page: (page != _INDEX, page))]}
    return entry


def _target(link: str) -> str:
    """Return where a link of a file at the top of the repository leads on the site."""
    if link in TOP_LEVEL:
        return TOP_LEVEL[link]
    path = link.removeprefix("docs/")
    return f"{path.rstrip('/')}/{_INDEX}" if (REPOSITORY / link).is_dir() else path
