"""What the judge gets to know of a checkpoint root is what a training has published there."""

from pathlib import Path

import torch

import ckpt
from tests.inprocess.nodes.judge import Facts, Limits, judge
from tests.inprocess.nodes.play import read_published


def test_a_root_without_steps(tmp_path: Path) -> None:
    assert read_published(tmp_path / "never made") == []


def test_the_steps_of_a_training(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(8)}
    for steps in ((1, 2), (3,)):
        with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
            checkpointer.restore(state)
            for step in steps:
                checkpointer.save(state, step)
    published = read_published(tmp_path / "root")
    assert [its.step for its in published] == [1, 2, 3]
    assert [None if its.continues is None else its.continues[0] for its in published] == [None, 1, 2]
    facts = Facts(started=0.0, now=0.0, processes=frozenset(), published=published)
    assert judge([], facts, Limits(quiet_s=1.0, alone_s=1.0)) == []
