"""The crash matrix, with the ranks on two mounts."""

import pytest

from tests.ckpt.crash.test_matrix import Cell, play, selected
from tests.ckpt.shared_fs.mounts import Mounts

_FEW = {
    ("writer", "during write", 1, 2),
    ("both", "before publish", 0, 2),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cell", selected(_FEW), ids=str)
def test_kill(cell: Cell, mounts: Mounts) -> None:
    play(cell, mounts.folder.parent, (mounts.one / "root", mounts.two / "root"))
