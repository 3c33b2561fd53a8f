"""The page about a root: complete, self-contained, and safe whatever the names in a checkpoint are."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Checkpointer
from ckpt.ranks.failure import Failure
from ckpt.storage.commit import PendingSave
from ckpt.storage.names import SaveId
from ckpt.storage.root import CheckpointRoot
from tests.support.saves import save_here
from tests.tools.inspect_ckpt.commands import Commands

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x1b[31m"
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "section", "div", "span", "b", "i"),
    *("small", "footer", "svg", "path", "rect", "circle", "text", "table", "thead", "tbody", "tr", "th", "td"),
    *("details", "summary"),
}
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that a page is well-formed and has nothing that runs or loads anything. `text` is what a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: dict[str, int] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "href", "xlink:href", "action"), (tag, name)
            assert "url(" not in (value or ""), value
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            assert (self.get_starttag_text() or "").endswith("/>"), tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data


@pytest.fixture
def root(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the root that two ranks saved to."""
    return Path(shutil.copytree(saved["two"], tmp_path / "root"))


def report(run: Commands, root: Path, *options: str | Path, code: int = 0) -> Page:
    file = root.parent / "report.html"
    run("report", root, "-o", file, *options, code=code)
    html = file.read_text()
    assert "http" not in html.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in html
    return Page(html)


def test_the_page_has_every_section(run: Commands, root: Path) -> None:
    page = report(run, root)
    for words in ("Over time", "Saves", "Ranks", "Changes", "Health", "Branches", "What is kept"):
        assert words in page.text
    assert "Step 3 and step 4" in page.text
    assert "model/weight" in page.text
    assert page.text.count("whole") >= 2
    assert "Goodput" not in page.text
    assert page.tags["svg"] == 3


def test_events_add_restarts_and_goodput(run: Commands, root: Path, tmp_path: Path) -> None:
    common = {"rank": 0, "step": 3}
    lines: list[dict[str, Any]] = [
        {"event": "SaveStarted", "time": 1000.0, **common},
        {"event": "SaveStaged", "time": 1001.0, "stall_s": 1.0, **common},
        {
            "event": "SaveAbandoned",
            "time": 1002.0,
            "by_rank": 1,
            "kind": "StorageError",
            "cause": EVIL,
            "rank": 0,
            "step": 5,
        },
        {"event": "Restored", "time": 1011.0, "seconds": 1.0, **common},
        {"event": "Restarted", "time": 1012.0, "seconds": 2.0, "iteration": 1, "cause": EVIL, "rank": 0},
    ]
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(run, root, "--events", file)
    for words in ("Goodput", "restarts", "restores", "abandoned", "lost: done again", "StorageError", "restart 1"):
        assert words in page.text
    assert run.json("report", root, "-o", tmp_path / "r", "--events", file)["goodput"]["lost_s"] == pytest.approx(9.0)


def test_each_restart_is_shown_with_its_cause(run: Commands, root: Path, tmp_path: Path) -> None:
    died = {"fault_class": "out of memory", "advice": "reduce it", "evidence": ["host gpu-07", "memory was short"]}
    lines: list[dict[str, Any]] = [
        {"event": "Restarted", "time": 1012.0, "iteration": 1, "cause": EVIL},  # as earlier versions wrote them
        {"event": "Restarted", "time": 1020.0, "iteration": 2, "cause": "rank 3: process 7 died: SIGKILL", **died},
    ]
    file = tmp_path / "events.jsonl"
    with open(file, "w") as stream:
        for line, rank in itertools.product(lines, range(2)):
            stream.write(json.dumps({"rank": rank, "seconds": 2.0, **line}) + "\n")
    page = report(run, root, "--events", file)
    for words in ("2 restarts: 1 unknown, 1 out of memory", "host gpu-07; memory was short", "reduce it", "SIGKILL"):
        assert words in page.text
    text = run("report", root, "--goodput", "--events", file)
    assert "out of memory: rank 3: process 7 died: SIGKILL; reduce it" in text
    restarts = run.json("report", root, "--goodput", "--events", file)["restarts"]
    assert [each["fault_class"] for each in restarts] == ["unknown", "out of memory"]


def test_names_in_a_checkpoint_are_text(run: Commands, tmp_path: Path) -> None:
    root = tmp_path / EVIL.replace("/", "|")
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            state = {EVIL: torch.full((3,), float(step)), "x": {EVIL: EVIL * step}}
            save_here(checkpointer, state, step, metrics={EVIL: EVIL})
        save = SaveId(3, CheckpointRoot(str(root)).ownership.newest(), "0" * 16)
        PendingSave(CheckpointRoot(str(root)), save).abandon(Failure(0, EVIL, EVIL))
        page = report(run, root)
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert "\x1b" not in page.text


def test_a_damaged_step_is_named(run: Commands, root: Path) -> None:
    file = root / "step_00000004" / "packs/000/rank_00000_000"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    page = report(run, root, code=1)
    assert "damaged" in page.text
    assert "written by rank 0" in page.text
    assert "could not be compared" in page.text
    (root / "step_00000004" / "zarr.json").write_text("{}")
    assert "cannot be read" in report(run, root, code=1).text


def test_what_is_read_can_be_limited(run: Commands, root: Path) -> None:
    page = report(run, root, "--validate", "0", "--no-compare", "--last", "1")
    assert "all bytes" not in page.text
    assert "the newest of 2" in page.text
    page = report(run, root, "--validate", "1", "--no-compare")
    assert "--no-compare" in page.text
    assert "all bytes" in page.text
    assert "metadata and sizes" in page.text


def test_branches_and_pins(run: Commands, tmp_path: Path) -> None:
    root = tmp_path / "root"
    state = {"w": torch.ones(3)}
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            save_here(checkpointer, state, step)
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(state, step=1)
        save_here(checkpointer, state, 2)
        checkpointer.pin(2)
    page = report(run, root)
    assert "2 steps of other branches were moved aside" in page.text
    assert "pinned: 2" in page.text
    assert page.tags["circle"] >= 4


def test_what_cannot_be_written_is_refused(run: Commands, root: Path, tmp_path: Path) -> None:
    assert "no such directory" in run.refused("report", root, "-o", tmp_path / "missing" / "page.html")
    (tmp_path / "folder").mkdir()
    assert run.refused("report", root, "-o", tmp_path / "folder")
    assert "0 is too few" in run.refused("report", root, "--last", "0")


def test_a_root_with_thousands_of_saves_gives_a_small_page(run: Commands, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with open(file, "w") as stream:
        for number in range(5000):
            at = 1000.0 + 60 * number
            stream.write(
                json.dumps({"event": "SaveStaged", "time": at, "rank": 0, "step": number, "stall_s": 0.1}) + "\n"
            )
    report(run, root, "--events", file)
    assert os.path.getsize(tmp_path / "report.html") < 400_000
