"""What a SIGKILL leaves in a bucket: cells of the matrix of `tests.ckpt.crash`."""

from pathlib import Path

import pytest

from tests.ckpt.crash.test_matrix import CELLS, Cell, play
from tests.support.object_server import Bucket
from tests.support.selection import FULL

_REPRESENTATIVE = {
    ("writer", "during write", 1, 2),
    ("both", "before publish", 0, 2),
}


def _selected() -> list[Cell]:
    return [cell for cell in CELLS if not cell.reuse and (FULL or cell.key in _REPRESENTATIVE)]


@pytest.mark.parametrize("cell", _selected(), ids=str)
def test_kill(cell: Cell, tmp_path: Path, bucket: Bucket) -> None:
    play(cell, tmp_path, (bucket.url, bucket.url), bucket.env)


def test_the_selection_is_of_the_matrix() -> None:
    assert {cell.key for cell in CELLS} >= _REPRESENTATIVE
