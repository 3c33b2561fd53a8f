"""The name of a leaf: the keys that lead to it through the nesting of the state."""

from __future__ import annotations

__all__ = ["Path", "display"]

Path = tuple[str | int, ...]


def display(path: Path) -> str:
    """Return the name of the leaf at `path` for messages: its keys joined by "/", on one line."""
    name = "/".join(map(str, path))
    if not name.isprintable():
        name = "/".join(_printable(str(key)) for key in path)
    return name or "(the state itself)"


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
