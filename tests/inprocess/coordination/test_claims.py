"""Which processes a rank 0 takes for the ranks of its job, and that a rank is one process."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from inprocess.coordination import CoordinationStore
from inprocess.coordination.claims import RankClaim, RankClaims, RankSlot
from inprocess.exception import StoreError
from tests.inprocess.coordination.conftest import Connect


def claim(rank: int, job: str, world_size: int = 3, parent: str = "1", host: str = "here") -> RankClaim:
    return RankClaim(
        f"{job}{rank}{parent}{host}", rank, world_size, host, parent, f"{job}{rank}", frozenset({"same", job})
    )


def test_the_first_claims_that_are_just_alike_are_taken() -> None:
    claims = RankClaims(claim(0, "A"))
    assert claims.missing() == "missing: 1,2"
    assert claims.add(claim(2, "A")) is None
    assert not claims.is_full
    assert claims.add(claim(1, "A")) is None
    assert claims.add(claim(1, "A", host="there")) is None
    assert claims.is_full
    assert claims.is_alike
    assert claims.taken == {1: claim(1, "A"), 2: claim(2, "A")}


def test_claims_that_are_more_alike_are_better() -> None:
    claims = RankClaims(claim(0, "A", 2))
    claims.add(claim(1, "B", 2))
    assert claims.is_full, "if no better one comes, it is taken: ranks of a job may differ"
    assert not claims.is_alike
    claims.add(claim(1, "A", 2, parent="2"))
    assert not claims.is_alike, "on one host they have the same parent"
    claims.add(claim(1, "A", 2))
    assert claims.is_alike
    assert claims.taken == {1: claim(1, "A", 2)}


def test_on_another_host_the_parent_is_another() -> None:
    claims = RankClaims(claim(0, "A", 2))
    claims.add(claim(1, "A", 2, parent="2", host="there"))
    assert claims.is_alike


def test_a_claim_that_is_more_like_another_rank_0_is_not_taken() -> None:
    claims = RankClaims(claim(0, "A", 2))
    claims.add(claim(1, "B", 2))
    assert claims.add(claim(0, "B", 2)) == "this job has a rank 0"
    assert not claims.is_full
    assert claims.missing() == "missing: 1; of another job, which uses the same port: B0 as rank 0, B1 as rank 1"
    claims.add(claim(1, "A", 2))
    assert claims.is_full


def test_where_no_other_job_can_come_ranks_may_differ() -> None:
    claims = RankClaims(claim(0, "A", 2), certain=True)
    claims.add(claim(1, "B", 2))
    assert claims.is_full
    assert claims.is_alike


def test_claims_that_do_not_fit() -> None:
    claims = RankClaims(claim(0, "A"))
    assert claims.add(claim(1, "A", 4)) == "it is one of 4 ranks, and this job has 3"
    assert claims.add(claim(3, "A")) == "a job of 3 has no such rank"
    with pytest.raises(ValueError, match="not the claim of a rank"):
        RankClaim.decode(b'{"rank": 1}')


def test_what_differs_between_ranks_is_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=0", "--node-rank", "0", "--lr", "1"])
    first = RankClaim.of_this_process(0, 2)
    assert RankClaim.decode(first.encode().encode()) == first
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "MY_API_KEY"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=1", "--node-rank", "1", "--lr", "1"])
    second = RankClaim.of_this_process(1, 2)
    assert second.difference(first) == 0
    assert second.id != first.id
    for change in (lambda: monkeypatch.setenv("SEED", "2"), lambda: monkeypatch.chdir(os.sep)):
        change()
        assert second.difference(RankClaim.of_this_process(1, 2)) > 0
        second = RankClaim.of_this_process(1, 2)
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "2"])
    assert second.difference(RankClaim.of_this_process(1, 2)) == 2
    assert second.difference(replace(second, parent="0")) == 1
    for name, value in (("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0")):
        monkeypatch.setenv(name, value)
    second = RankClaim.of_this_process(1, 2)
    assert second.difference(RankClaim.of_this_process(1, 2)) == 0
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert second.difference(RankClaim.of_this_process(1, 2)) == 2, "another step is mostly another job"


class TestRankSlot:
    def test_a_rank_is_one_process(self, client: CoordinationStore) -> None:
        first, second = RankSlot(client, 1), RankSlot(client, 1)
        RankSlot(client, 0).claim()
        first.claim()
        with pytest.raises(StoreError, match="another process is rank 1 of this job already"):
            second.claim()
        first.enter()
        assert not second.take_over()

    def test_a_replacement_is_the_rank_until_that_has_entered(self, connect: Connect) -> None:
        lost, other, replacement = (RankSlot(connect(), 1) for _ in range(3))
        lost.claim()
        assert other.take_over()
        assert replacement.take_over()
        for gone in (lost, other):
            with pytest.raises(StoreError, match="another process is rank 1"):
                gone.enter()
        replacement.enter()

    def test_a_rank_that_has_claimed_nothing_is_replaced(self, client: CoordinationStore) -> None:
        replacement = RankSlot(client, 1)
        assert replacement.take_over()
        with pytest.raises(StoreError, match="another process is rank 1"):
            RankSlot(client, 1).claim()
        replacement.enter()
