"""Parts of an HTML page that needs nothing else: no scripts, no fonts, no network. Everything is escaped.

Text becomes part of a page only by `text`, which also shows what cannot be printed by its escape codes. A `Markup` is
HTML that was made here or in `charts`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NewType

from .output import one_line

Markup = NewType("Markup", str)

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --fg: #1b2330; --soft: #5b6675; --line: #dfe3e8;
  --grid: #e9ecf0; --good: #15803d; --bad: #b91c1c; --warn: #b45309; --a: #2563eb; --b: #d97706; --c: #0f766e;
  --d: #7c3aed; --e: #94a3b8; --f: #be123c; --g: #1e3a8a; }
@media (prefers-color-scheme: dark) { :root { --bg: #10151c; --card: #18202a; --fg: #e6eaf0; --soft: #9aa7b7;
  --line: #2b3644; --grid: #243040; --good: #4ade80; --bad: #f87171; --warn: #fbbf24; --a: #60a5fa; --b: #fbbf24;
  --c: #2dd4bf; --d: #a78bfa; --e: #64748b; --f: #fb7185; --g: #3b5bdb; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px;
  margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 12px; margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 14px; }
.tile b { display: block; font-size: 20px; line-height: 1.4; white-space: nowrap;
  font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span, .tile small { display: block; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } svg { display: block; width: 100%; min-width: 620px; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-family: inherit; } svg text.strong { fill: var(--fg); }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; white-space: nowrap; }
th, td { padding: 5px 20px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .right { text-align: right; white-space: nowrap; }
td.left { overflow-wrap: anywhere; min-width: 120px; } td .bar { width: min(30vw, 260px); }
.bar { display: flex; height: 14px; min-width: 120px; margin: 4px 0; border-radius: 3px; overflow: hidden;
  background: var(--grid); } .bar i { display: block; height: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 10px; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.pill { display: inline-block; padding: 0 8px; border-radius: 9px; font-size: 12px; line-height: 18px; font-weight: 600;
  color: var(--tone); border: 1px solid var(--tone); }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); font-size: 14px; }
footer { color: var(--soft); font-size: 13px; margin-top: 20px; }
@media (max-width: 600px) { main { padding: 16px 10px 32px; } section { padding: 12px; } h1 { font-size: 20px; } }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } }
"""


def text(value: object) -> Markup:
    """Return text as HTML."""
    return Markup(html.escape(one_line(str(value))))


def join(parts: Iterable[Markup]) -> Markup:
    """Return parts, one behind the other."""
    return Markup("\n".join(parts))


def page(title: str, intro: str, parts: Iterable[Markup], made: str) -> Markup:
    """Return a whole page. The policy in its head keeps a browser from loading anything."""
    return Markup(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{text(title)}</h1>
<p class="soft">{text(intro)}</p>
{join(parts)}
<footer>{text(made)}</footer>
</main>
</body>
</html>
"""
    )


def section(title: str, intro: str, *parts: Markup) -> Markup:
    """Return a section with a heading and a sentence about it."""
    about = f'<p class="soft">{text(intro)}</p>' if intro else ""
    return Markup(f"<section>\n<h2>{text(title)}</h2>\n{about}\n{join(parts)}\n</section>")


def tiles(values: Iterable[tuple[str, str, str, str]]) -> Markup:
    """Return figures side by side: of each the name, the value, a note, and a colour ("" for that of text)."""
    cells = (
        f"<span>{text(name)}</span><b{_colour(tone)}>{text(value)}</b><small>{text(note)}</small>"
        for name, value, note, tone in values
    )
    tiles = "".join(f'<div class="tile">{cell}</div>' for cell in cells)
    return Markup(f'<div class="tiles">{tiles}</div>')


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Markup]], markup: Sequence[int] = ()) -> Markup:
    """Return a table. A column whose title begins with ">" is aligned to the right; columns in `markup` hold Markup."""
    sides = ["right" if column.startswith(">") else "left" for column in columns]
    titles = zip(columns, sides, strict=True)
    head = "".join(f'<th class="{side}">{text(column.removeprefix(">"))}</th>' for column, side in titles)
    body = []
    for row in rows:
        cells = (cell if number in markup else text(cell) for number, cell in enumerate(row))
        body.append("".join(f'<td class="{side}">{cell}</td>' for cell, side in zip(cells, sides, strict=True)))
    lines = "\n".join(f"<tr>{cells}</tr>" for cells in body)
    return Markup(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>')


def bar(parts: Iterable[tuple[float, str, str]], total: float) -> Markup:
    """Return a bar of parts: of each its length, colour and title. `total` is the length of the whole width."""
    pieces = []
    for length, tone, title in parts:
        share = 100 * max(length, 0.0) / (total or 1.0)
        pieces.append(f'<i style="width:{share:.3f}%;background:var(--{tone})" title="{text(title)}"></i>')
    return Markup(f'<div class="bar">{"".join(pieces)}</div>')


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return what the colours mean: names and colours."""
    items = (f'<span><i style="background:var(--{tone})"></i>{text(name)}</span>' for name, tone in entries)
    return Markup(f'<div class="legend">{"".join(items)}</div>')


def pill(word: str, tone: str) -> Markup:
    """Return a word in a frame of a colour."""
    return Markup(f'<span class="pill" style="--tone:var(--{tone})">{text(word)}</span>')


def details(summary: str, *parts: Markup) -> Markup:
    """Return parts that are shown after a click."""
    return Markup(f"<details><summary>{text(summary)}</summary>\n{join(parts)}\n</details>")


def _colour(tone: str) -> str:
    return f' style="color:var(--{tone})"' if tone else ""
