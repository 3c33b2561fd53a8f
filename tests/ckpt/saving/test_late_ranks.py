"""A rank that does not come is named long before the time is over, by one of those that wait for it."""

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ckpt
from ckpt.ranks import collectives, rounds
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.rounds import LateRanks, meet
from ckpt.ranks.stop import Outcome, StopAgreement, StopRequest
from inprocess.ipc.process import Process
from tests.ckpt.crash.killers import wait_until
from tests.support import run_ranks
from tests.support.saves import save_here

_LONG_S = 50.0
_EARLY_S = 0.05


class _Warnings(logging.Handler):
    """The warnings of this process; the first one calls `seen`."""

    def __init__(self, seen: Any) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._seen = seen
        logging.getLogger("ckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._seen()


def test_a_warning_comes_after_half_a_minute_and_then_less_and_less_often() -> None:
    ranks = LateRanks()
    assert [at for at in range(600) if ranks.is_due(float(at))] == [30, 60, 120, 240, 480]


def test_one_of_those_that_wait_names_the_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_LATE_S", _EARLY_S)
    store, warned = dist.HashStore(), threading.Event()
    warnings = _Warnings(warned.set)

    def attend(rank: int, doing: str) -> None:
        meet(store, rank, 3, _LONG_S, doing)

    def attend_all(doing: str, last: threading.Event) -> None:
        threads = [threading.Thread(target=attend, args=(rank, doing), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        assert last.wait(_LONG_S)
        attend(2, doing)
        for thread in threads:
            thread.join(_LONG_S)

    try:
        attend_all("the first save", warned)
        first, before = warnings.texts[0], len(warnings.texts)
        warned.clear()
        attend_all("the second save", warned)
        second = warnings.texts[before]
    finally:
        logging.getLogger("ckpt").removeHandler(warnings)
    for texts in (warnings.texts[:before], warnings.texts[before:]):
        assert len({text.split(" has waited")[0] for text in texts}) == 1, "one rank tells of it"
    assert "s for rank 2 to agree on the first save, and waits 50 s more: rank 2 has taken part in nothing yet" in first
    assert re.search(r"rank 2 took part last in the first save, \d+ s ago; process \d+ is (waiting|running)", second)
    assert "Every rank must call save, warmup and restore" in second


def test_what_a_process_does_is_known_on_its_node() -> None:
    here = Process.here()
    assert rounds.described(here) == f"process {here.pid} is running"
    assert rounds.described(Process(here.host, here.pid, here.start - 1)) == f"process {here.pid} has ended"
    assert rounds.described(Process("elsewhere", 7, 8)) == "process 7 is on another node"


def _one_saves_first(rank: int, world_size: int, root: Path, early: int, planned: bool) -> Any:
    """The other one does when it is missed."""
    rounds._LATE_S = _EARLY_S
    missed = root.parent / "missed"
    warnings = _Warnings(missed.touch)
    state = {"w": ckpt.PerRank(rank)}
    with ckpt.Checkpointer(root, timeout=_LONG_S) as checkpointer:
        if planned:  # so that the next save needs no agreement
            save_here(checkpointer, state, 1)
        else:
            checkpointer.restore(state)
        warnings.texts.clear()
        dist.barrier()
        missed.unlink(missing_ok=True)
        dist.barrier()
        if rank != early:
            wait_until(missed.exists, "a warning")
        save_here(checkpointer, state, 2)
        return warnings.texts, checkpointer.all_steps()


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_does_not_save_is_missed(tmp_path: Path, early: int) -> None:
    results = run_ranks(_one_saves_first, 2, tmp_path / "root", early, False)
    (text, *_), steps = results[early].value
    assert steps == [2]
    other = 1 - early
    assert re.search(
        rf"^rank {early} has waited \d+ s for rank {other} to agree on the save of step 2, and waits", text
    )
    assert re.search(rf"rank {other} took part last in the restore, \d+ s ago; process \d+ is ", text)


@pytest.mark.parametrize("early", [0, 1])
def test_a_writer_misses_the_part_of_a_rank_that_does_not_save(tmp_path: Path, early: int) -> None:
    results = run_ranks(_one_saves_first, 2, tmp_path / "root", early, True)
    (text, *_), steps = results[early].value
    assert steps == [1, 2]
    other = 1 - early
    assert text.startswith(f"rank {early} has waited ")
    assert f" s for all ranks to finish their parts of step 2 (rank {other} missing), and waits " in text
    assert re.search(rf"rank {other} has written nothing of this save; its writer, process \d+ is ", text)


def _one_finalizes_first(rank: int, world_size: int, folder: Path) -> list[str]:
    """The other one does when it is missed: the queue waits for all ranks in one all_reduce."""
    rounds._LATE_S, collectives._ATTENDED_S = _EARLY_S, _EARLY_S / 2
    missed = folder / "missed"
    warnings = _Warnings(missed.touch)
    with ckpt.AsyncCallsQueue(no_dist=False) as queue:
        for early in range(world_size):
            queue.schedule_async_request(ckpt.AsyncRequest(None, (), []))
            dist.barrier()
            missed.unlink(missing_ok=True)
            dist.barrier()
            if rank != early:
                wait_until(missed.exists, "a warning")
            assert queue.maybe_finalize_async_calls(blocking=True) == [early]
        dist.barrier()
        store = Ranks().store()
        assert not any(store.check([f"waits/reduce/{each}"]) for each in range(world_size)), "a wait has ended"
    return warnings.texts


def test_the_queue_names_the_rank_that_does_not_finalize(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(_one_finalizes_first, 2, tmp_path)):
        first = result.value[0]
        text = (
            rf"^rank {rank} has waited \d+ s for rank {1 - rank} to agree on background calls, and waits until the "
            rf"timeout of the process group: rank {1 - rank} has taken part in nothing yet\. Every rank must call the "
        )
        assert re.search(text, first), first


def test_a_stop_that_a_rank_takes_no_part_in_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_LATE_S", _EARLY_S)
    store = dist.HashStore()
    ranks = [StopAgreement(rank, 3) for rank in range(3)]
    warned = threading.Event()
    warnings = _Warnings(warned.set)
    request = StopRequest("signal SIGTERM", 0, 100.0)
    outcomes: list[Outcome] = []

    def train(agreement: StopAgreement) -> None:
        for step in range(1, 100):
            if (outcome := agreement.arrive(step)) is not Outcome.GO_ON:
                outcomes.append(outcome)
                return

    try:
        for agreement in ranks[:2]:
            agreement.look(store, request, 0.0)
        threads = [threading.Thread(target=train, args=(agreement,), daemon=True) for agreement in ranks[:2]]
        for thread in threads:
            thread.start()
        wait_until(
            lambda: all(agreement.look(store, request, 0.0) and warned.is_set() for agreement in ranks[:2]), "it"
        )
        ranks[2].look(store, None, 0.0)
        for agreement in ranks[:2]:
            agreement.look(store, None, 0.0)
        for thread in threads:
            thread.join(_LONG_S)
    finally:
        logging.getLogger("ckpt").removeHandler(warnings)
    assert outcomes == [Outcome.STOP, Outcome.STOP]
    (text, *_) = warnings.texts
    assert re.search(
        r"^rank 0 has waited \d+ s for rank 2 to agree on a step to stop after, and waits \d+ s more: ", text
    )
    assert "rank 2 has taken part in nothing yet" in text
    assert not any(text.startswith("rank 1 ") for text in warnings.texts), "one rank tells of it"
