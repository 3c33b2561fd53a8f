"""Pages whose example is also a file, because its framework may be missing where the blocks of pages are executed."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def assert_page_shows(page: str, example: Path) -> None:
    """Assert that the page has blocks indented by four spaces, and that the lines of each are in the example.

    Fenced blocks are not looked at.
    """
    text = "\n".join(_lines(example.read_text()))
    blocks = _indented_blocks((REPOSITORY / page).read_text())
    assert blocks
    for block in blocks:
        assert "\n".join(_lines(block)) in text, f"{example} does not have these lines:\n{block}"


def _lines(text: str) -> list[str]:
    """The lines, without indentation: on a page, it begins further left."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _indented_blocks(text: str) -> list[str]:
    blocks, block = [], ""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for line in [*text.splitlines(), "end"]:
        if line.startswith("    ") or (block and not line):
            block += f"{line}\n"
        elif block:
            blocks.append(block)
            block = ""
    return blocks
