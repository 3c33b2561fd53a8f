"""Which steps stay: policies, pins, and a model of them under any sequence of saves, faults and restores."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import Best, Checkpointer, Every, EverySeconds, Keep, Latest, Pinned, StorageError
from ckpt.storage.documents import decode_document, encode_document
from tests.support.saves import save_here


def _save(checkpointer: Checkpointer, step: int, **metrics: Any) -> None:
    save_here(checkpointer, {"w": torch.full((8,), float(step))}, step, metrics=metrics)


def _published_at(root: Path, step: int, seconds: float) -> None:
    """Have a step say that it was saved at this time."""
    path = root / f"step_{step:08d}" / "parts" / "000" / "rank_00000.json"
    part = decode_document(path.read_bytes(), str(path))
    part["times"] |= {"write_begin": seconds, "write_s": 0.0, "sync_s": 0.0}
    path.write_bytes(encode_document(part))
    os.utime(root / f"step_{step:08d}" / "zarr.json", (seconds, seconds))  # so that it is read again


def test_a_metric_that_no_step_has_is_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(tmp_path, keep=Latest(2) | Best("loss") | Best("val_loss")) as checkpointer:
        for step in range(1, 5):
            checkpointer.save({"w": torch.zeros(8)}, step, metrics={"val_loss": float(step)})
        assert checkpointer.all_steps() == [1, 3, 4]
    said = capfd.readouterr().err
    assert said.count("keep has ckpt.Best('loss'), and no step of") == said.count("ckpt.Best(") == 1, said
    assert "they have 'val_loss'" in said


def test_the_latest_and_every_multiple(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Latest(2) | Every(4)) as checkpointer:
        for step in range(1, 11):
            _save(checkpointer, step)
        assert checkpointer.all_steps() == [4, 8, 9, 10]


@pytest.mark.parametrize(("mode", "expected"), [("min", [2, 5, 7]), ("max", [1, 6, 7])])
def test_the_best_by_a_metric(tmp_path: Path, mode: Any, expected: list[int]) -> None:
    losses = {1: 0.9, 2: 0.1, 3: 0.5, 4: "none", 5: 0.2, 6: 0.9, 7: math.pi / 10}
    with Checkpointer(tmp_path, keep=Best("loss", 2, mode=mode)) as checkpointer:
        for step, loss in losses.items():
            _save(checkpointer, step, loss=loss)
        assert checkpointer.all_steps() == expected


def test_one_in_so_many_seconds(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=EverySeconds(60) | Latest(1)) as checkpointer:
        for step, seconds in {1: 1000, 2: 1030, 3: 1059, 4: 1060, 5: 1119, 6: 1125}.items():
            _save(checkpointer, step)
            _published_at(tmp_path, step, seconds)
        _save(checkpointer, 7)
        _published_at(tmp_path, 7, 1126)
        assert checkpointer.all_steps() == [1, 4, 6, 7]


def test_the_times_of_files_decide_nothing(tmp_path: Path) -> None:
    """As after a copy that does not keep them, or a touch of all files."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    with Checkpointer(first) as checkpointer:
        for step in range(1, 7):
            _save(checkpointer, step)
            _published_at(first, step, 1000 + 100 * step)
    shutil.copytree(first, copy, copy_function=shutil.copyfile)
    for root in (first, copy):
        with Checkpointer(root, keep=EverySeconds(200)) as checkpointer:
            checkpointer.restore({"w": torch.zeros(8)})
            _save(checkpointer, 7)
            assert checkpointer.all_steps() == [1, 3, 5, 7]
    for path in first.rglob("*"):
        os.utime(path, (0, 0))
    with Checkpointer(first, keep=EverySeconds(200)) as checkpointer:
        checkpointer.restore({"w": torch.zeros(8)})
        _save(checkpointer, 8)
        assert set(checkpointer.all_steps()) >= {1, 3, 5, 8}


def test_a_step_that_does_not_say_when_it_was_saved_is_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            _save(checkpointer, step)
    (tmp_path / "step_00000002" / "parts" / "000" / "rank_00000.json").unlink()
    with Checkpointer(tmp_path, keep=EverySeconds(3600)) as checkpointer:
        checkpointer.restore({"w": torch.zeros(8)})
        _save(checkpointer, 4)
        assert checkpointer.all_steps() == [1, 2, 4]


def test_one_in_so_many_seconds_when_the_clock_goes_back(tmp_path: Path) -> None:
    """A node had a clock that was years ahead, and was repaired."""
    with Checkpointer(tmp_path, keep=EverySeconds(60)) as checkpointer:
        for step, seconds in {1: 10**9, 2: 1000, 3: 1030, 4: 1060, 5: 1119, 6: 1120}.items():
            _save(checkpointer, step)
            _published_at(tmp_path, step, seconds)
        _save(checkpointer, 7)
        assert checkpointer.all_steps() == [1, 2, 4, 6, 7]


def test_pinned_steps_stay_until_they_are_unpinned(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Latest(1) | Pinned(2)) as checkpointer:
        for step in range(1, 4):
            _save(checkpointer, step)
        assert checkpointer.all_steps() == [2, 3]
        checkpointer.pin(3)
        checkpointer.pin(3)
        with pytest.raises(ckpt.CheckpointNotFoundError):
            checkpointer.pin(1)
        with pytest.raises(StorageError, match=r"step 3 .* is pinned: unpin it first"):
            checkpointer.delete(3)
    with Checkpointer(tmp_path, keep=Latest(1)) as checkpointer:
        _save(checkpointer, 4)
        _save(checkpointer, 5)
        assert checkpointer.all_steps() == [3, 5]
        assert checkpointer.unpin(3)
        assert not checkpointer.unpin(3)
        _save(checkpointer, 6)
        assert checkpointer.all_steps() == [6]


def test_a_step_that_cannot_be_read_is_kept_by_policies_that_look_at_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Best("loss")) as checkpointer:
        _save(checkpointer, 1, loss=1.0)
        (tmp_path / "step_00000001" / "zarr.json").write_text("{")
        _save(checkpointer, 2, loss=0.1)
        _save(checkpointer, 3, loss=0.5)
        assert checkpointer.all_steps() == [1, 2, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Latest(0), "at least 1"),
        (lambda: Every(True), "at least 1"),
        (lambda: EverySeconds(-1), "positive number of seconds"),
        (lambda: Best("loss", mode="least"), "must be 'min' or 'max'"),
        (lambda: Best(3), "takes the name of a metric"),
        (lambda: Best(""), "takes the name of a metric"),
        (lambda: Pinned("7"), "numbers of steps"),
        (lambda: Checkpointer("/nowhere", keep=0), "of at least 1"),
    ],
)
def test_bad_policies_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- a model -----------------------------------------------------------------------------------------------------------

_METRIC = st.one_of(st.none(), st.floats(-4, 4), st.integers(-3, 3), st.just("text"))
_POLICY = st.lists(
    st.one_of(
        st.builds(Latest, st.integers(1, 3)),
        st.builds(Every, st.integers(2, 5)),
        st.builds(EverySeconds, st.integers(1, 40)),
        st.builds(Best, st.just("m"), st.integers(1, 3), st.sampled_from(["min", "max"])),
        st.builds(Pinned, st.integers(0, 12)),
    ),
    min_size=1,
    max_size=3,
)
_EVENT = st.one_of(
    st.tuples(st.just("save"), _METRIC, st.integers(0, 30)),
    st.tuples(st.just("failed save"), st.none(), st.just(0)),
    st.tuples(st.just("restore"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("pin"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("unpin"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("new job"), st.none(), st.just(0)),
)


class _Model:
    """What has to be there, told from the definitions of the policies alone."""

    def __init__(self, policies: list[Any]) -> None:
        self.policies = policies
        self.steps: dict[int, tuple[Any, float]] = {}
        self.pinned: set[int] = set()

    def save(self, step: int, metric: Any, at: float) -> None:
        self.steps = {known: fact for known, fact in self.steps.items() if known < step}
        self.steps[step] = metric, at
        kept = {step} | self.pinned
        for policy in self.policies:
            kept |= self._kept(policy)
        self.steps = {known: fact for known, fact in self.steps.items() if known in kept}

    def _kept(self, policy: Any) -> set[int]:
        steps = sorted(self.steps)
        if isinstance(policy, Latest):
            return set(steps[-policy.count :])
        if isinstance(policy, Every):
            return {step for step in steps if step % policy.steps == 0}
        if isinstance(policy, Pinned):
            return set(policy.steps)
        if isinstance(policy, EverySeconds):
            kept: list[int] = []
            for step in steps:
                if not kept or self.steps[step][1] >= self.steps[kept[-1]][1] + policy.seconds:
                    kept.append(step)
            return set(kept)
        numbers = [(metric, step) for step, (metric, _) in self.steps.items() if isinstance(metric, int | float)]
        order = sorted(numbers, key=lambda item: (item[0] if policy.mode == "min" else -item[0], item[1]))
        return {step for _, step in order[: policy.count]}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(policies=_POLICY, events=st.lists(_EVENT, min_size=3, max_size=14), reuse=st.booleans())
@pytest.mark.timeout(300)
def test_what_is_kept_is_what_the_policies_say(policies: list[Any], events: list[Any], reuse: bool) -> None:
    keep: Keep = policies[0]
    for policy in policies[1:]:
        keep |= policy
    model, step, clock = _Model(policies), 0, 1000.0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        checkpointer = Checkpointer(root, keep=keep, staging=ckpt.Staging(reuse_files=reuse))
        try:
            for kind, value, seconds in events:
                if kind == "save":
                    step, clock = step + 1, clock + seconds
                    _save(checkpointer, step, m=value)
                    _published_at(root, step, clock)
                    model.save(step, value, clock)
                elif kind == "failed save" and step in model.steps:
                    with pytest.raises(ckpt.CheckpointExistsError):
                        _save(checkpointer, step)
                    model.steps = {known: fact for known, fact in model.steps.items() if known <= step}
                elif kind == "restore" and model.steps:
                    step = sorted(model.steps)[value % len(model.steps)]
                    checkpointer.restore({"w": torch.zeros(8)}, step)
                elif kind == "pin" and model.steps:
                    chosen = sorted(model.steps)[value % len(model.steps)]
                    checkpointer.pin(chosen)
                    model.pinned.add(chosen)
                elif kind == "unpin" and model.pinned:
                    chosen = sorted(model.pinned)[value % len(model.pinned)]
                    assert checkpointer.unpin(chosen)
                    model.pinned.discard(chosen)
                elif kind == "new job":
                    checkpointer.close()
                    checkpointer = Checkpointer(root, keep=keep, staging=ckpt.Staging(reuse_files=reuse))
                    step = checkpointer.restore({"w": torch.zeros(8)}) or 0
                shown = [known for known in checkpointer.all_steps() if known <= step]
                assert shown == [known for known in sorted(model.steps) if known <= step], (kind, value)
        finally:
            checkpointer.close()
