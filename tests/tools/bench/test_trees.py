"""The benchmark of two trees runs with this tree on both sides, and refuses what is no tree."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tools.bench.__main__ import main
from tools.bench.processes import REPOSITORY

pytestmark = pytest.mark.timeout(600)


@pytest.mark.skipif(os.environ.get("TESTS") != "full", reason="runs in `make test-faults`")
def test_a_tree_beside_a_copy_of_itself(tmp_path: Path) -> None:
    other, disk, document = tmp_path / "other", tmp_path / "disk", tmp_path / "result.json"
    disk.mkdir()
    for name in ("ckpt", "inprocess"):
        shutil.copytree(REPOSITORY / name, other / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    main(["trees", "--other", str(other), "--rounds", "1", "--folder", str(disk), "--json", str(document)])
    rows = json.loads(document.read_text())["rows"]
    assert len({row["title"] for row in rows}) == 2 * 2 * 8
    assert all(value > 0 for row in rows for value in row["values"])
    assert list(disk.iterdir()) == []


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no package ckpt"):
        main(["trees", "--other", str(tmp_path)])
