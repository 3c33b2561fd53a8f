"""Helpers for tests that need several real processes, or that must show that nothing was left behind."""

from tests.support.leaks import LeakCheck
from tests.support.ranks import RankGroup, RankResult, RanksFailed, launch_ranks, rank_values, run_ranks

__all__ = ["LeakCheck", "RankGroup", "RankResult", "RanksFailed", "launch_ranks", "rank_values", "run_ranks"]
